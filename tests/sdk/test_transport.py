"""`carpool.transport()` under the SDK of this environment, and under bare HTTP clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic

import carpool
from carpool import BadCall, RoutingPolicy, WrongClient
from carpool.mock import Constant, MockAnthropic, MockConfig, MockServer, expected_text, serve, serve_in_thread

MODEL = "claude-haiku-4-5"
KEY = "sk-test-of-the-transport"
QUICK = RoutingPolicy(linger_ms=40, poll_interval_s=0.05, batch_rpm=100_000)
SOON = MockConfig(batch_latency=Constant(0.02), batch_rpm=None)
BATCH = {"x-carpool-lane": "batch"}


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": text}], **more}


async def soon(work: Any, seconds: float = 10.0) -> Any:
    return await asyncio.wait_for(work, seconds)


@dataclass
class Log:
    """The mock below a prefix, writing down what reaches it."""

    app: Any
    prefix: str = ""
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"] + ("?" + scope["query_string"].decode() if scope["query_string"] else ""))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        path = scope["path"].removeprefix(self.prefix)
        await self.app({**scope, "path": path, "raw_path": path.encode()}, receive, send)


@asynccontextmanager
async def provided(config: MockConfig = SOON, prefix: str = "") -> AsyncIterator[tuple[MockServer, Log]]:
    provider = MockAnthropic(config)
    log = Log(provider.app, prefix)
    provider.app = log  # type: ignore[assignment]
    async with serve(provider=provider) as server:
        yield server, log


@dataclass
class Scene:
    server: MockServer
    log: Log
    client: AsyncAnthropic
    transport: Any


@asynccontextmanager
async def riding(
    config: MockConfig = SOON, *, prefix: str = "", retries: int = 2, **options: Any
) -> AsyncIterator[Scene]:
    async with provided(config, prefix) as (server, log):
        transport = carpool.transport(**{"policy": QUICK, "close_timeout": 1, **options})
        http = httpx2.AsyncClient(transport=transport)
        base = server.url + prefix
        async with AsyncAnthropic(base_url=base, api_key=KEY, http_client=http, max_retries=retries) as client:
            yield Scene(server, log, client, transport)


@contextmanager
def blocking(config: MockConfig = SOON, **options: Any) -> Iterator[tuple[MockServer, Anthropic, Any]]:
    with serve_in_thread(config) as server:
        transport = carpool.transport(**{"policy": QUICK, "close_timeout": 1, **options})
        http = httpx2.Client(transport=transport)
        with Anthropic(base_url=server.url, api_key=KEY, http_client=http) as client:
            yield server, client, transport


# ---------------------------------------------------------------- lanes


async def test_without_options_calls_go_straight_through() -> None:
    async with riding() as scene:
        message = await soon(scene.client.messages.create(**ask()))
        assert message.content[0].text == expected_text(ask())
        assert scene.log.paths == ["/v1/messages"]
        assert scene.transport.stats.sync_calls == 1
        assert scene.transport.metrics()["carpool.sync_calls"] == 1


async def test_a_default_budget_pools_and_a_header_wins_over_it() -> None:
    async with riding(budget="30m", tags={"team": "ci"}) as scene:
        create = scene.client.messages.create
        told = await soon(asyncio.gather(*(create(**ask(f"n{i}")) for i in range(6))))
        assert [one.content[0].text for one in told] == [expected_text(ask(f"n{i}")) for i in range(6)]
        assert [batch.size for batch in scene.server.provider.batches] == [6]
        await soon(create(**ask(), extra_headers={"x-carpool-lane": "now"}))
        await soon(create(**ask(), extra_headers={"x-carpool-budget": "1s"}))
        assert (scene.transport.stats.sync_calls, scene.transport.stats.batched_calls) == (2, 6)
        assert not any(name.startswith("x-carpool") for headers in scene.log.headers for name in headers)


async def test_the_answer_says_which_way_it_took() -> None:
    async with riding() as scene:
        raw = await soon(scene.client.messages.with_raw_response.create(**ask(), extra_headers=BATCH))
        assert raw.headers["x-carpool-lane"] == "batch"
        assert raw.headers["x-carpool-batch"] == scene.server.provider.batches[0].id
        assert float(raw.headers["x-carpool-saved"].lstrip("$")) > 0


async def test_a_stream_can_come_from_a_batch() -> None:
    async with riding(budget="30m") as scene:
        async with scene.client.messages.stream(**ask("[think] hard")) as told:
            message = await soon(told.get_final_message())
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert scene.transport.stats.batched_calls == 1


def test_threads_pool_together() -> None:
    with blocking(budget="30m") as (server, client, transport):
        told: dict[int, str] = {}

        def one(number: int) -> None:
            told[number] = client.messages.create(**ask(f"n{number}")).content[0].text  # type: ignore[union-attr]

        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert told == {number: expected_text(ask(f"n{number}")) for number in range(8)}
        assert transport.stats.batched_calls == 8
        assert len(server.provider.batches) <= 3


# ---------------------------------------------------------------- where it goes


async def test_the_base_url_is_the_clients_own() -> None:
    async with riding(prefix="/team/v1/api") as scene:
        await soon(scene.client.messages.create(**ask()))
        await soon(scene.client.messages.create(**ask(), extra_headers=BATCH))
        await soon(scene.client.messages.count_tokens(model=MODEL, messages=ask()["messages"]))
        assert all(path.startswith("/team/v1/api/v1/messages") for path in scene.log.paths)


async def test_base_urls_and_keys_are_kept_apart() -> None:
    transport = carpool.transport(budget="30m", policy=QUICK, close_timeout=1)
    async with provided() as (one, _), provided() as (two, _), httpx2.AsyncClient(transport=transport) as http:
        clients = [
            AsyncAnthropic(base_url=server.url, api_key=key, http_client=http)
            for server in (one, two)
            for key in ("sk-a", "sk-b")
        ]
        await soon(asyncio.gather(*(client.messages.create(**ask("same")) for client in clients for _ in range(2))))
        for server in (one, two):
            assert sorted(batch.size for batch in server.provider.batches) == [2, 2]


async def test_everything_is_sent_through_the_clients_own_http() -> None:
    class Counting(httpx2.AsyncHTTPTransport):
        count = 0

        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            Counting.count += 1
            return await super().handle_async_request(request)

    async with riding(through=Counting()) as scene:
        await soon(scene.client.messages.create(**ask()))
        await soon(scene.client.messages.create(**ask(), extra_headers=BATCH))
        assert Counting.count == len(scene.log.paths) >= 4
    mine = httpx2.AsyncClient(transport=Counting())
    async with riding(through=mine) as scene:
        await soon(scene.client.messages.create(**ask()))
    assert not mine.is_closed
    await mine.aclose()
    with blocking(through=httpx2.HTTPTransport()) as (_, client, transport):
        client.messages.create(**ask(), extra_headers=BATCH)
        assert transport.stats.batched_calls == 1


async def test_only_http_is_spoken() -> None:
    async with httpx2.AsyncClient(transport=carpool.transport()) as http:
        answer = await http.post("ftp://example.com/v1/messages", json=ask())
        assert answer.status_code == 400
        assert "not over 'ftp'" in answer.json()["error"]["message"]


async def test_what_is_not_understood_passes_untouched() -> None:
    async with riding(budget="30m") as scene:
        listed = [model.id async for model in scene.client.models.list(limit=7)]
        assert MODEL in listed
        assert scene.log.paths[0].startswith("/v1/models?")
        batch = await soon(scene.client.messages.batches.create(requests=[{"custom_id": "mine", "params": ask()}]))  # type: ignore[typeddict-item]
        assert batch.processing_status == "in_progress"
        with pytest.raises(anthropic.NotFoundError):
            await soon(scene.client.models.retrieve("claude-unknown"))
        assert scene.transport.stats.sync_calls + scene.transport.stats.batched_calls == 0


async def test_without_a_budget_the_provider_judges_what_carpool_can_not_read() -> None:
    async with riding() as scene, httpx2.AsyncClient(transport=scene.transport) as http:
        url, headers = scene.server.url + "/v1/messages", {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
        answer = await soon(http.post(url, content=b"no json", headers=headers))
        assert (answer.status_code, "request-id" in answer.headers) == (400, True)
        answer = await soon(http.post(url, content=b"no json", headers=headers | {"x-carpool-budget": "10m"}))
        assert (answer.status_code, "request-id" in answer.headers) == (400, False)


# ---------------------------------------------------------------- troubles


async def test_the_sdk_retries_what_goes_straight_and_nothing_else() -> None:
    async with riding() as scene:
        scene.server.provider.script("sync_500", 1)
        await soon(scene.client.messages.create(**ask()))
        assert len(scene.log.paths) == 2
        scene.server.provider.script("sync_accepted_cut", 1)
        with pytest.raises(anthropic.InternalServerError) as caught:
            await soon(scene.client.messages.create(**ask(), extra_headers={"x-carpool-budget": "3s"}))
        assert caught.value.status_code == 502
        assert len(scene.log.paths) == 3  # it may have been bought: not bought again
        scene.server.provider.script("sync_accepted_cut", 1)
        await soon(scene.client.messages.create(**ask()))
        assert len(scene.log.paths) == 5


async def test_a_timeout_of_the_client_holds_where_nothing_is_asked_of_carpool() -> None:
    slow = MockConfig(sync_latency=Constant(5.0), batch_latency=Constant(0.5), batch_rpm=None)
    async with riding(slow, retries=0) as scene:
        with pytest.raises(anthropic.APITimeoutError):
            await soon(scene.client.messages.create(**ask(), timeout=0.2))
        stream = await soon(scene.client.messages.create(**ask(), timeout=0.2, stream=True))
        with pytest.raises(httpx2.ReadTimeout):
            await soon(anext(stream))
        await soon(scene.client.messages.create(**ask(), timeout=0.2, extra_headers=BATCH))
    with blocking(slow) as (_, client, _), pytest.raises(anthropic.APITimeoutError):
        client.with_options(max_retries=0, timeout=0.2).messages.create(**ask())


async def test_a_stream_that_breaks_is_what_it_would_be_without_carpool() -> None:
    async with riding() as scene:
        scene.server.provider.script("sync_cut_midway")
        stream = await soon(scene.client.messages.create(**ask(), stream=True))
        with pytest.raises(httpx2.ReadError):
            _ = [event async for event in stream]


async def test_wrong_options_are_told_once() -> None:
    async with riding() as scene:
        with pytest.raises(anthropic.BadRequestError, match="is not a budget"):
            await soon(scene.client.messages.create(**ask(), extra_headers={"x-carpool-budget": "soon"}))
        assert scene.log.paths == []


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"budget": "soon"}, BadCall, "not a budget"),
        ({"lane": "fast"}, BadCall, "not a lane"),
        ({"through": "http://proxy"}, WrongClient, "give it an httpx client"),
    ],
)
def test_wrong_arguments_are_told_at_once(options: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        carpool.transport(**options)


async def test_a_store_that_can_not_be_opened_is_told_and_tried_again(tmp_path: Path) -> None:
    store = tmp_path / "missing" / "fleet.db"
    async with riding(store=store) as scene:
        with pytest.raises(anthropic.InternalServerError) as caught:
            await soon(scene.client.messages.create(**ask()))
        assert caught.value.status_code == 503
        store.parent.mkdir()
        await soon(scene.client.messages.create(**ask()))


# ---------------------------------------------------------------- life


async def test_it_starts_late_and_ends_with_its_client() -> None:
    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("carpool")]

    before = ours()
    transport = carpool.transport()
    async with provided() as (server, _):
        async with httpx2.AsyncClient(transport=transport) as http:
            assert ours() == before
            await soon(http.get(server.url + "/v1/models", headers={"x-api-key": KEY}))
            assert ours() != before
        assert ours() == before
        async with httpx2.AsyncClient(transport=transport) as http:
            answer = await soon(http.get(server.url + "/v1/models"))
            assert (answer.status_code, "closed" in answer.text) == (503, True)


async def test_closing_answers_those_who_wait() -> None:
    never = MockConfig(batch_latency=Constant(60), batch_rpm=None)
    async with riding(never, close_timeout=0.2) as scene:
        waiting = asyncio.ensure_future(scene.client.messages.create(**ask(), extra_headers=BATCH))
        while not scene.server.provider.batches:  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.01)
        await soon(scene.transport.aclose())
        with pytest.raises(anthropic.InternalServerError, match="carpool closed before"):
            await soon(waiting)
        await soon(scene.transport.aclose())


def test_closing_frees_the_threads_that_wait() -> None:
    slow = MockConfig(sync_latency=Constant(60), batch_rpm=None)
    with blocking(slow, close_timeout=0.2) as (_, client, transport):
        told: list[Any] = []

        def one() -> None:
            try:
                client.with_options(max_retries=0).messages.create(**ask())
            except anthropic.APIError as error:
                told.append(error)

        thread = threading.Thread(target=one)
        thread.start()
        while not transport.stats.sync_calls:
            threading.Event().wait(0.01)
        transport.close()
        thread.join(10)
        assert len(told) == 1


async def test_a_cancelled_call_is_taken_back() -> None:
    calm = RoutingPolicy(linger_ms=600_000)
    async with riding(policy=calm) as scene:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await scene.client.messages.create(**ask(), extra_headers=BATCH)
        assert scene.log.paths == []


def other_loop(transport: Any) -> httpx2.Response:
    async def post() -> httpx2.Response:
        return await httpx2.AsyncClient(transport=transport).post("http://127.0.0.1:9/v1/messages")

    return asyncio.run(post())


def other_thread(transport: Any) -> httpx2.Response:
    return httpx2.Client(transport=transport).post("http://127.0.0.1:9/v1/messages")


@pytest.mark.parametrize("other", [other_loop, other_thread])
async def test_one_loop_is_enough_for_one_transport(other: Callable[[Any], httpx2.Response]) -> None:
    async with riding() as scene:
        await soon(scene.client.messages.create(**ask()))
        answer = await asyncio.to_thread(other, scene.transport)
        assert answer.status_code == 500
        assert "Make" in answer.json()["error"]["message"]


async def test_calls_survive_in_a_file(tmp_path: Path) -> None:
    never = MockConfig(batch_latency=Constant(0.5), batch_rpm=None)
    store = tmp_path / "fleet.db"
    async with provided(never) as (server, _):

        async def once(close_timeout: float) -> Any:
            transport = carpool.transport(store=store, policy=QUICK, close_timeout=close_timeout)
            http = httpx2.AsyncClient(transport=transport)
            async with AsyncAnthropic(base_url=server.url, api_key=KEY, http_client=http) as client:
                call = asyncio.ensure_future(
                    client.messages.create(**ask(), extra_headers={**BATCH, "x-carpool-key": "k"})
                )
                await asyncio.wait([call], timeout=10 if close_timeout else 0.2)
            return await soon(call)

        with pytest.raises(anthropic.InternalServerError, match="kept in the store"):
            await once(0)
        assert (await once(5)).content[0].text == expected_text(ask())
        assert [batch.size for batch in server.provider.batches] == [1]


@pytest.mark.parametrize("flavour", ["async", "blocking"])
def test_a_program_that_forgets_to_close_still_ends(flavour: str) -> None:
    program = """
        import asyncio, sys, anthropic, carpool, httpx2
        url, transport = sys.argv[1], carpool.transport()
        given = dict(base_url=url, api_key="k")
        asked = dict(model="claude-haiku-4-5", max_tokens=9, messages=[{"role": "user", "content": "x"}])
        if sys.argv[2] == "async":
            client = anthropic.AsyncAnthropic(**given, http_client=httpx2.AsyncClient(transport=transport))
            print(asyncio.run(client.messages.create(**asked)).type)
        else:
            client = anthropic.Anthropic(**given, http_client=httpx2.Client(transport=transport))
            print(client.messages.create(**asked).type)
    """
    with serve_in_thread(SOON) as server:
        command = [sys.executable, "-c", textwrap.dedent(program), server.url, flavour]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "message"), ended.stderr


async def test_a_stream_that_nobody_listens_to_is_given_up() -> None:
    """A generator that was never begun runs no clean-up when it is closed: the request must be ended all the same."""
    slow = MockConfig(sync_latency=Constant(30.0), batch_rpm=None)
    async with riding(slow) as scene:
        stream = await soon(scene.client.messages.create(**ask(), stream=True))
        await soon(stream.close())
        assert scene.transport.stats.unknown_purchases == 1
