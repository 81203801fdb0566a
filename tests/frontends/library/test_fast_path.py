"""The short way of a submit: the same request and the same answer as through the SDK, and only where that is sure."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from anthropic.lib._stainless_helpers import carry_helper_tag
from anthropic.types import Message, TextBlock
from anthropic.types.beta import BetaMessage
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

import carpool.frontends.library.fast_path
from carpool import BadParams, CallExpired, CarpoolError, FleetDispatcher, KeyConflict, RoutingPolicy
from carpool.frontends.library.exchange import HELLO, InProcessExchange
from carpool.mock import MockConfig, MockServer, expected_text
from tests.support.fleets import KEY, MODEL, QUICK, SOON, Log, ask, blocking, faulty, provided, soon, text_of

BETA = "interleaved-thinking-2025-05-14"
TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}},
}
NOW = {"lane": "now", "budget": "1h"}  # with a budget, carpool retries, and not the SDK
SLOW = {"timeout": 60.0}  # a parameter that only the SDK understands


class Roads:
    """Counts the calls that go the short way, and those that the SDK makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.short = self.sdk = 0
        settled, answer = InProcessExchange.settled, InProcessExchange.answer

        async def count_short(*args: Any) -> Any:
            self.short += 1
            return await settled(*args)

        async def count_sdk(exchange: InProcessExchange, request: Any, body: bytes) -> Any:
            self.sdk += HELLO not in request.headers
            return await answer(exchange, request, body)

        monkeypatch.setattr(InProcessExchange, "settled", count_short)
        monkeypatch.setattr(InProcessExchange, "answer", count_sdk)

    @property
    def taken(self) -> tuple[int, int]:
        return self.short, self.sdk


@pytest.fixture
def roads(monkeypatch: pytest.MonkeyPatch) -> Roads:
    return Roads(monkeypatch)


class Saying:
    """The provider's app, but whatever it is asked on `now` it gives the answer it was told to."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.body: bytes | None = None
        self.status = 200
        self.headers: tuple[tuple[bytes, bytes], ...] = ()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.body is None or scope["path"] != "/v1/messages":
            await self._app(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            continue
        kind = (
            ()
            if any(name == b"content-type" for name, _ in self.headers)
            else ((b"content-type", b"application/json"),)
        )
        head = [*kind, *self.headers, (b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        await send({"type": "http.response.body", "body": self.body})


@dataclass
class Scene:
    server: MockServer
    log: Log
    saying: Saying
    client: AsyncAnthropic
    fleet: FleetDispatcher

    async def submit(self, **params: Any) -> Any:
        return await soon(self.fleet.submit(**params))


@asynccontextmanager
async def riding(
    config: MockConfig = SOON, policy: RoutingPolicy = QUICK, kind: Any = AsyncAnthropic, **options: Any
) -> AsyncIterator[Scene]:
    async with provided(config) as (server, log):
        saying = Saying(log._app)
        log._app = saying
        async with (
            kind(**{"base_url": server.url, "api_key": KEY, **options}) as client,
            FleetDispatcher(client, policy=policy, close_timeout=0.5) as fleet,
        ):
            yield Scene(server, log, saying, client, fleet)


# ---------------------------------------------------------------- the request

REQUESTS: dict[str, dict[str, Any]] = {
    "plain": ask(),
    "order": {"messages": [{"role": "user", "content": "hello"}], "model": MODEL, "max_tokens": 50},
    "unicode": ask('Grüße, 世界 \U0001f600 \x00\x1f\u2028 \\ " </script>'),
    "numbers": ask(metadata={"user_id": "u", "n": [1, -0.0, 2.5e300, 1e16, 10**30, True, None]}),
    "tuples": ask(messages=({"role": "user", "content": ({"type": "text", "text": "x"},)},)),
    "keys": ask(metadata={1: "one", None: "none", False: "false", 2.5: "half"}),
    "null": ask(system=None, stop_sequences=["a"], stream=False),
    "tools": ask(tools=[TOOL], tool_choice={"type": "auto"}, system=[{"type": "text", "text": "Be brief."}]),
    "betas": ask(betas=[BETA, "context-1m-2025-08-07"]),
    "no betas": ask(betas=[]),
    "headers": ask(extra_headers={"X-Team": "ci", "anthropic-beta": BETA}),
    "both": ask(betas=[BETA], extra_headers={"x-api-key": "sk-of-somebody-else"}),
    "options": ask(extra_headers={"x-carpool-tags": "team=ci"}),
}


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS)
async def test_the_provider_hears_the_same(params: dict[str, Any], roads: Roads) -> None:
    async with riding() as scene:
        told = [await scene.submit(**NOW, **params) for _ in range(3)]
        heard = [(one.path, one.headers, one.body) for one in scene.log.messages]
        assert roads.taken == (2, 1)  # the first request and the first answer are the SDK's
        assert heard[0] == heard[1] == heard[2]
        assert [type(one) for one in told] == [BetaMessage if "betas" in params else Message] * 3


@pytest.mark.parametrize(
    "params", [REQUESTS["plain"], REQUESTS["tools"], REQUESTS["betas"]], ids=["plain", "tools", "betas"]
)
async def test_a_batch_carries_the_same(params: dict[str, Any], roads: Roads) -> None:
    async with riding() as scene:
        told = await asyncio.gather(*(scene.submit(lane="batch", **params) for _ in range(6)))
        [create] = scene.log.creates
        lines = [line["params"] for line in create.json()["requests"]]
        assert lines == [{name: value for name, value in params.items() if name != "betas"}] * 6
        assert roads.taken[0] == 5  # those that came in the same moment learned from the first of them
        assert {text_of(one) for one in told} == {expected_text(lines[0])}


async def test_kinds_are_told_apart(roads: Roads) -> None:
    """Whatever is not a value of the body decides about the headers, so that each has a pattern of its own."""
    async with riding() as scene:
        for beta in ("a-2025-01-01", "b-2025-01-01"):
            for team in ("ci", "web"):
                for _ in range(2):
                    await scene.submit(**NOW, **ask(betas=[beta], extra_headers={"x-team": team}))
        heard = [(one.headers["anthropic-beta"], one.headers["x-team"]) for one in scene.log.messages]
        assert heard == [(b, t) for b in ("a-2025-01-01", "b-2025-01-01") for t in ("ci", "web") for _ in range(2)]
        assert roads.short == 4


async def test_default_headers_that_change_are_obeyed() -> None:
    headers = {"x-team": "ci"}
    async with riding(default_headers=headers) as scene:
        await scene.submit(**NOW, **ask())
        await scene.submit(**NOW, **ask())
        headers["x-team"] = "web"
        await scene.submit(**NOW, **ask())
        assert [one.headers["x-team"] for one in scene.log.messages] == ["ci", "ci", "web"]


async def test_whoever_sends_other_headers_every_time_leaves_no_heap_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carpool.frontends.library.fast_path, "MAX_KINDS", 3)
    async with riding() as scene:
        for number in range(6):
            await scene.submit(**NOW, **ask(extra_headers={"x-number": str(number)}))
        assert [one.headers["x-number"] for one in scene.log.messages] == list("012345")
        assert len(scene.fleet._quick._patterns) == 3


# ---------------------------------------------------------------- what only the SDK may do


class Model(StrEnum):
    HAIKU = MODEL


class Own(AsyncAnthropic):
    """A client that says more than the SDK's own."""

    async def _prepare_request(self, request: Any) -> None:
        request.headers["x-own"] = "1"


class Fresh(AsyncAnthropic):
    """A client with another header every time."""

    @property
    def default_headers(self) -> Any:
        return {**super().default_headers, "x-own": str(random.random())}


async def passing(request: Any, call_next: Any) -> Any:
    return await call_next(request)


TAGGED = carry_helper_tag(type("Helper", (), {"_stainless_helper": "mcp_tool"})(), TOOL)
FOR_THE_SDK: dict[str, dict[str, Any]] = {
    "time-out": ask(**SLOW),
    "extra body": ask(extra_body={"top_k": 5}),
    "query": ask(extra_query={"beta": "true"}),
    "model": ask(messages=[{"role": "assistant", "content": [TextBlock(type="text", text="x")]}]),
    "set": ask(stop_sequences={"a"}),
    "omit": ask(system=anthropic.omit),
    "nested omit": ask(metadata={"user_id": anthropic.omit}),
    "enum": ask(model=Model.HAIKU),
    "helper": ask(tools=[TAGGED], betas=[BETA]),
    "profile": ask(user_profile_id="up_1"),
    "raw": ask(extra_headers={"X-Stainless-Raw-Response": "stream"}, **SLOW),
}


@pytest.mark.parametrize("params", FOR_THE_SDK.values(), ids=FOR_THE_SDK)
async def test_parameters_for_the_sdk_go_through_it(params: dict[str, Any], roads: Roads) -> None:
    async with riding() as scene:
        for _ in range(3):
            await scene.submit(**NOW, **params)
        heard = [(one.headers, one.body) for one in scene.log.messages]
        assert heard[0] == heard[1] == heard[2]
        assert roads.taken == (0, 3)


async def test_a_body_that_the_sdk_writes_otherwise_is_the_sdks(roads: Roads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anthropic._base_client, "openapi_dumps", lambda value: json.dumps(value, indent=1).encode())
    async with riding() as scene:
        for _ in range(3):
            await scene.submit(**NOW, **ask())
        assert roads.taken == (0, 3)


async def test_streams_are_the_sdks(roads: Roads) -> None:
    async with riding() as scene:
        for stream in (False, True, True):
            told = await scene.submit(**NOW, **ask(stream=stream))
        events = [event async for event in told]
        assert events[-1].type == "message_stop"
        assert roads.taken == (0, 3)


async def test_options_among_the_headers_hold(roads: Roads) -> None:
    async with riding() as scene:
        for _ in range(3):
            await scene.submit(budget="10h", **ask(extra_headers={"x-carpool-lane": "now"}))
        assert len(scene.log.messages) == 3
        assert roads.short == 2


async def test_an_iterator_is_read_once(roads: Roads) -> None:
    async with riding() as scene:
        for _ in range(2):
            await scene.submit(**NOW, **ask(messages=iter(ask("from an iterator")["messages"])))
        assert [one.json()["messages"][0]["content"] for one in scene.log.messages] == ["from an iterator"] * 2
        assert roads.short == 0


@contextmanager
def span_of_somebody() -> Iterator[None]:
    context = SpanContext(trace_id=1, span_id=2, is_remote=True, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(context)):
        yield


@contextmanager
def talkative_sdk() -> Iterator[None]:
    log = logging.getLogger("anthropic")
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(logging.NOTSET)


@contextmanager
def watched_sdk() -> Iterator[None]:
    kind, create = anthropic.resources.messages.AsyncMessages, anthropic.resources.messages.AsyncMessages.create

    async def watched(*args: Any, **params: Any) -> Any:
        return await create(*args, **params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "create", watched)
        yield


@pytest.mark.parametrize("watching", [span_of_somebody, talkative_sdk, watched_sdk])
async def test_whoever_watches_the_sdk_sees_every_call(watching: Any, roads: Roads) -> None:
    async with riding() as scene:
        await scene.submit(**NOW, **ask())
        await scene.submit(**NOW, **ask())
        assert roads.taken == (1, 1)
        with watching():
            await scene.submit(**NOW, **ask())
            assert roads.taken == (1, 2)
        await scene.submit(**NOW, **ask())
        assert roads.taken == (2, 2)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": Own},
        {"kind": Fresh},
        {"middleware": [passing]},
        {"default_query": {"beta": "true"}},
        {"open_telemetry": {"tracer_provider": trace.NoOpTracerProvider()}},
    ],
    ids=["subclass", "property", "middleware", "query", "tracer"],
)
async def test_a_customised_client_makes_every_request(options: dict[str, Any], roads: Roads) -> None:
    async with riding(**options) as scene:
        for _ in range(2):
            await scene.submit(**NOW, **ask())
        assert roads.taken == (0, 2)
        assert all(("x-own" in one.headers) == ("kind" in options) for one in scene.log.messages)


async def test_the_sdk_warns_of_every_call(roads: Roads) -> None:
    [model, *_] = anthropic.resources.messages.messages.DEPRECATED_MODELS
    async with riding() as scene:
        for _ in range(2):
            with pytest.warns(DeprecationWarning, match=model), pytest.raises(anthropic.NotFoundError):
                await scene.submit(**NOW, **ask(model=model))
        assert roads.short == 0


async def test_mistakes_are_said_as_ever(roads: Roads) -> None:
    """Also where a pattern for calls of these names is known."""
    async with riding() as scene:
        await scene.submit(**NOW, **ask(tools=[]))
        await scene.submit(**NOW, **ask(betas=[BETA]))
        wrong: list[dict[str, Any]] = [
            ask(tools=[{"n": float("nan")}]),
            ask("\ud800", tools=[]),
            ask(tools=[], unheard_of=1),
            {"model": MODEL, "max_tokens": 5},
            ask(betas=[BETA], messages=5),
            ask(tools=[], messages=[{"role": "user", "content": object()}]),
        ]
        for params in wrong:
            with pytest.raises(BadParams, match="The SDK can't make a request"):
                await scene.submit(**NOW, **params)
        circle: list[Any] = []
        circle.append(circle)
        with pytest.raises(BadParams):
            await scene.submit(**NOW, **ask(tools=circle))
        assert roads.short == 0


# ---------------------------------------------------------------- the answer


def usage(**more: Any) -> dict[str, Any]:
    return {"input_tokens": 3, "output_tokens": 4, "service_tier": "standard", **more}


def message(*content: dict[str, Any], **more: Any) -> dict[str, Any]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": list(content)}
    return {**head, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage(), **more}


CONTAINER = {"id": "container_1", "expires_at": "2026-11-20T10:00:00.25+02:00"}
TEXT = {"type": "text", "text": "Hello \u2028 \U0001f600", "citations": None}
CITING = {
    "type": "text",
    "text": "so it is",
    "citations": [
        {
            "type": "char_location",
            "cited_text": "x",
            "document_index": 0,
            "document_title": None,
            "start_char_index": 0,
            "end_char_index": 1,
            "file_id": None,
        }
    ],
}
INPUT = {"n": [1, 2.5, None, True, 10**25, 1e300, -0.0], "deep": {"a": {"b": [[[]]]}}, "": "\x00"}
BLOCKS: list[dict[str, Any]] = [
    TEXT,
    CITING,
    {"type": "text", "text": ""},
    {"type": "text", "text": "x", "unheard_of": {"a": [1]}},
    {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
    {"type": "redacted_thinking", "data": "ZGF0YQ=="},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": INPUT},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}, "caller": {"type": "direct"}},
    {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srvtoolu_1",
        "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
    },
]
ODD_BLOCKS: list[dict[str, Any]] = [  # valid to no type of the SDK's
    {"type": "hologram", "depth": 3},
    {"type": "text"},
    {"type": "text", "text": 5},
    {"type": "tool_use", "id": None, "name": "look", "input": "x"},
]
MORE: list[dict[str, Any]] = [
    {},
    {"unheard_of": 1, "another": {"a": None}},
    {"usage": usage(unheard_of={"n": 1}, cache_read_input_tokens=None)},
    {"usage": usage(cache_creation={"ephemeral_1h_input_tokens": 1, "ephemeral_5m_input_tokens": 2, "unheard_of": 3})},
    {"usage": usage(server_tool_use={"web_search_requests": 1, "web_fetch_requests": 0})},
    {"stop_reason": "stop_sequence", "stop_sequence": "a"},
    {"container": None},
    {"container": {**CONTAINER, "skills": None}},
    {"container": {**CONTAINER, "unheard_of": 1}},
    {"context_management": {"applied_edits": []}},
    {"stop_details": None},
]
ODD_MORE: list[dict[str, Any]] = [
    {"stop_reason": "tired"},
    {"stop_reason": None},
    {"usage": None},
    {"usage": usage(input_tokens="3")},
    {"usage": usage(input_tokens=3.0)},
    {"usage": usage(service_tier="platinum")},
    {"id": None},
    {"role": "user"},
    {"content": None},
    {"container": {"id": 5}},
]


def differences(one: Any, other: Any, at: str = "answer") -> list[str]:
    """Where two answers differ in whatever a caller can see of them."""
    if type(one) is not type(other):
        return [f"{at}: {type(one)} and {type(other)}"]
    if isinstance(one, anthropic.BaseModel):
        seen = [(m.model_fields_set, m.model_extra, vars(m).keys(), repr(m)) for m in (one, other)]
        found = [] if seen[0] == seen[1] else [f"{at}: {seen[0]} and {seen[1]}"]
        return found + [
            line for name in vars(one) for line in differences(vars(one)[name], vars(other)[name], f"{at}.{name}")
        ]
    if isinstance(one, list) and len(one) == len(other):
        return [
            line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{at}[{i}]")
        ]
    return [] if repr(one) == repr(other) else [f"{at}: {one!r} and {other!r}"]


async def both_answers(scene: Scene, body: bytes, params: dict[str, Any]) -> tuple[Any, Any]:
    """What the short way and the SDK make of the same answer; of an error, its type and what it says."""
    scene.saying.body = body
    results = []
    for more in ({}, SLOW):
        try:
            results.append(await scene.submit(**NOW, **params, **more))
        except Exception as error:  # noqa: BLE001  whatever it is, it is compared
            results.append((type(error), str(error)))
    return results[0], results[1]


@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
@pytest.mark.parametrize("params", [ask(), ask(betas=[BETA])], ids=["message", "beta"])
async def test_answers_are_the_sdks(params: dict[str, Any], strict: bool, roads: Roads) -> None:
    """Every block and every trait by itself, and then many of them mixed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    answers = [message(block) for block in (*BLOCKS, *ODD_BLOCKS)] + [message(TEXT, **m) for m in (*MORE, *ODD_MORE)]
    for _ in range(60):
        blocks = dice.choices([*BLOCKS, *BLOCKS, *ODD_BLOCKS], k=dice.randrange(5))
        odd = dice.choice(ODD_MORE) if dice.random() < 0.2 else {}
        answers.append(message(*blocks, **{**dice.choice(MORE), **dice.choice(MORE), **odd}))
    async with riding(_strict_response_validation=strict, max_retries=0) as scene:
        await scene.submit(**NOW, **params)
        await scene.submit(**NOW, **params)
        for answer in answers:
            quick, slow = await both_answers(scene, json.dumps(answer).encode(), params)
            assert quick == slow, answer
            assert differences(quick, slow) == [], answer
            if isinstance(quick, anthropic.BaseModel):
                assert quick.to_dict(warnings=False) == slow.to_dict(warnings=False), answer
                assert quick.to_json(warnings=False) == slow.to_json(warnings=False), answer
        assert roads.short == len(answers) + 1


RAW_BODIES = {
    "bom": b"\xef\xbb\xbf" + json.dumps(message(TEXT)).encode(),
    "spaces": b" \n" + json.dumps(message(TEXT), indent=2).encode() + b"\n",
    "twice": json.dumps(message(TEXT)).encode()[:-1] + b', "id": "msg_2"}',
    "surrogate": json.dumps(message({**TEXT, "text": "\ud800"})).encode(),
    "infinite": json.dumps(message(BLOCKS[6]).copy()).encode().replace(b"1e+300", b"Infinity"),
    "no object": b"[]",
    "null": b"null",
    "text": b"hello",
}


@pytest.mark.parametrize("body", RAW_BODIES.values(), ids=RAW_BODIES)
async def test_bodies_are_read_as_the_sdk_reads_them(body: bytes, roads: Roads) -> None:
    async with riding(max_retries=0) as scene:
        await scene.submit(**NOW, **ask())
        quick, slow = await both_answers(scene, body, ask())
        assert differences(quick, slow) == []
        assert roads.short == 1


HEADERS = {
    "ids": ((b"request-id", b"req_1"), (b"anthropic-workspace-id", b"wrkspc_1")),
    "twice": ((b"request-id", b"req_1"), (b"request-id", b"req_2")),
    "none": (),
    "charset": ((b"content-type", b"application/json; charset=utf-8"),),
    "no json": ((b"content-type", b"text/plain"),),
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
async def test_ids_come_from_the_headers(headers: Any) -> None:
    async with riding() as scene:
        await scene.submit(**NOW, **ask())
        scene.saying.headers = headers
        quick, slow = await both_answers(scene, json.dumps(message(TEXT)).encode(), ask())
        assert differences(quick, slow) == []
        assert quick._request_id == slow._request_id


async def test_batched_answers_are_the_sdks(roads: Roads) -> None:
    async with riding() as scene:
        await scene.submit(lane="batch", **ask())
        for text in ("hello", "[tool] x", "[blocks]", "[thinking]"):
            quick, slow = await asyncio.gather(
                scene.submit(lane="batch", **ask(text)), scene.submit(lane="batch", **ask(text), **SLOW)
            )
            assert quick.id != slow.id
            assert differences(quick.model_copy(update={"id": slow.id}), slow) == []
        assert roads.short == 4


async def test_nothing_is_bought_twice_for_an_answer_that_the_sdk_makes(roads: Roads) -> None:
    async with riding() as scene:
        for _ in range(2):
            await scene.submit(**NOW, **ask())
        scene.saying.body = json.dumps(message({"type": "hologram"})).encode()
        odd = await scene.submit(**NOW, **ask())
        assert odd.content[0].type == "hologram"
        assert len(scene.log.messages) == 3
        assert roads.taken == (2, 2)


# ---------------------------------------------------------------- failures


async def failure(scene: Scene, **params: Any) -> tuple[Any, ...]:
    with pytest.raises((anthropic.APIError, CarpoolError)) as caught:
        await scene.submit(**params)
    error: Any = caught.value
    return type(error), getattr(error, "status_code", None), getattr(error, "body", None), type(error.__cause__)


@pytest.mark.parametrize("lane", ["now", "batch"])
async def test_errors_are_the_sdks(lane: str, roads: Roads) -> None:
    async with riding(max_retries=0) as scene:
        await scene.submit(lane=lane, budget="1h", **ask())
        for wrong in (ask(model="claude-unknown-1"), ask(messages=[]), ask(max_tokens=-1)):
            quick = await failure(scene, lane=lane, budget="1h", **wrong)
            slow = await failure(scene, lane=lane, budget="1h", **wrong, **SLOW)
            assert quick[0] is slow[0]
            assert quick[1] == slow[1] in (400, 404)
            assert quick[3] is slow[3]
            assert quick[2]["error"] == slow[2]["error"]
        assert roads.short == 3


async def test_an_error_is_one_whatever_its_body(roads: Roads) -> None:
    async with riding(max_retries=0) as scene:
        await scene.submit(**NOW, **ask())
        scene.saying.body, scene.saying.status = json.dumps(message(TEXT)).encode(), 418
        assert (await failure(scene, **NOW, **ask()))[:2] == (anthropic.APIStatusError, 418)
        assert roads.short == 1


async def test_failures_of_carpool_are_carpools_own(roads: Roads) -> None:
    async with riding(faulty(line_expired=1.0), replace(QUICK, max_attempts=2)) as scene:
        await scene.submit(**NOW, key="one", **ask())
        assert (await failure(scene, **NOW, key="one", **ask("another")))[0] is KeyConflict
        assert (await failure(scene, lane="batch", **ask()))[0] is CallExpired
        assert roads.taken == (2, 3)  # the SDK is told of both


async def test_a_provider_out_of_reach_is_a_connection_error(roads: Roads) -> None:
    async with riding() as scene:
        await scene.submit(**NOW, **ask())
        scene.server.provider.script("sync_cut", 1000)
        with pytest.raises(anthropic.APIConnectionError):
            await scene.submit(lane="now", budget="1s", **ask())
        assert roads.short == 1


# ---------------------------------------------------------------- threads


def test_threads_take_the_short_way_too(roads: Roads) -> None:
    with blocking() as (server, fleet), ThreadPoolExecutor(8) as pool:
        first = fleet.submit(**NOW, **ask("first"))
        told = list(pool.map(lambda i: fleet.submit(lane="batch", **ask(f"n{i}")), range(24)))
        slow = fleet.submit(**NOW, **ask("first"), **SLOW)
        again = fleet.submit(**NOW, **ask("first"))
        assert [text_of(one) for one in told] == [expected_text(ask(f"n{i}")) for i in range(24)]
        assert {type(one) for one in (first, *told)} == {Message}
        assert differences(again.model_copy(update={"id": slow.id, "_request_id": None}).content, slow.content) == []
        with pytest.raises(anthropic.NotFoundError):
            fleet.submit(**NOW, **ask(model="claude-unknown-1"))
        assert roads.short == 26
        assert len(server.provider.bill.charges) == 27
