"""Stopping and dying in the middle of a batch, with clients that come back by themselves. Real processes throughout."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic

from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from tests.support.stage import ask

CONFIG = "batching: {linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}\n"
KEY = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
PIPE = asyncio.subprocess.PIPE


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Place:
    """A port and a store, on which one process follows another."""

    def __init__(self, upstream: MockServer, folder: Path) -> None:
        self.upstream = upstream
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "carpool.yaml").write_text(CONFIG)

    @asynccontextmanager
    async def running(self, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
        command = ["-m", "carpool", "serve", "--port", str(self.port), "--upstream", self.upstream.url]
        command += ["--store", str(self.folder / "s.db"), "--config", str(self.folder / "carpool.yaml"), *options]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE, stderr=PIPE)
        try:
            assert process.stdout is not None
            said = self.said = await process.stdout.readline()
            assert b" listens on http://127.0.0.1:" in said, (said, await process.stderr.read())  # type: ignore[union-attr]
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    async def end(self, process: asyncio.subprocess.Process, number: int, within: float = 10.0) -> tuple[str, str]:
        process.send_signal(number)
        async with asyncio.timeout(within):
            out, err = await process.communicate()
        assert process.returncode == (-number if number == signal.SIGKILL else 0), err
        return out.decode(), err.decode()

    def client(self, options: str = "/@budget=30m") -> AsyncAnthropic:
        """As a user has it, but more stubborn: a process takes a second or two to start."""
        return AsyncAnthropic(base_url=self.url + options, api_key="k", max_retries=8)

    async def boarded(self, count: int) -> None:
        async with asyncio.timeout(10):
            while sum(len(batch.requests) for batch in self.upstream.provider.batches) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def bought_one(self, http: httpx2.AsyncClient) -> None:
        """Wait until carpool itself knows that its batch was bought: the provider knows a moment sooner."""
        url = f"{self.url}/carpool/batches?state=open"
        async with asyncio.timeout(10):
            while not (await http.get(url, headers=KEY)).json()["batches"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @property
    def bought(self) -> int:
        return len(self.upstream.provider.bill.charges)


@asynccontextmanager
async def place(folder: Path, **config: Any) -> AsyncIterator[Place]:
    async with serve(MockConfig(**{"batch_latency": Constant(2.0), **config})) as upstream:
        yield Place(upstream, folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_successor_answers_the_sdks_own_retries_and_buys_nothing_twice(tmp_path: Path, number: int) -> None:
    calls = 8
    async with place(tmp_path) as here, here.client() as client:
        async with here.running("--drain", "0.5") as first:
            asked = [asyncio.ensure_future(client.messages.create(**ask(f"call {n}"))) for n in range(calls)]
            await here.boarded(calls)
            _, complaints = await here.end(first, number)
            assert "Traceback" not in complaints
        async with here.running():
            answers = await asyncio.gather(*asked)
        assert [answer.content[0].text for answer in answers] == [expected_text(ask(f"call {n}")) for n in range(calls)]
        assert here.bought == calls


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_calls_that_had_not_boarded_are_bought_by_the_successor(tmp_path: Path, number: int) -> None:
    async with place(tmp_path, batch_latency=Constant(0.2)) as here, here.client() as client:
        (tmp_path / "carpool.yaml").write_text("batching: {linger_ms: 60000}\n")
        async with here.running() as first, httpx2.AsyncClient() as http:
            asked = [asyncio.ensure_future(client.messages.create(**ask(f"call {n}"))) for n in range(4)]
            while (await http.get(f"{here.url}/carpool/stats")).json()["waiting"] < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await here.end(first, number)
        (tmp_path / "carpool.yaml").write_text(CONFIG)
        async with here.running():
            answers = await asyncio.gather(*asked)
        assert [answer.content[0].text for answer in answers] == [expected_text(ask(f"call {n}")) for n in range(4)]
        assert here.bought == 4


async def test_waiting_clients_are_told_to_come_back_and_nobody_else_is_waited_for(tmp_path: Path) -> None:
    async with (
        place(tmp_path, batch_latency=Constant(60)) as here,
        here.running("--drain", "60") as one,
        httpx2.AsyncClient(timeout=20) as http,
    ):
        url = f"{here.url}/@budget=30m/v1/messages"
        waiting = asyncio.ensure_future(http.post(url, json=ask("waiting"), headers=KEY))
        await here.boarded(1)
        [ticket] = (await http.get(f"{here.url}/carpool/calls")).json()["calls"]
        polling = http.get(f"{here.url}/carpool/calls/{ticket['ticket']}?wait=60s", headers=KEY)
        polled = asyncio.ensure_future(polling)
        events = asyncio.ensure_future(http.get(f"{here.url}/carpool/events"))
        await asyncio.sleep(0.2)
        await here.end(one, signal.SIGTERM, within=5)
        for answer in (await waiting, await polled):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["x-should-retry"] == "true"
            assert answer.json()["type"] == "error"
            assert "kept in the store" in answer.json()["error"]["message"]
        assert (await events).text.rstrip().endswith(": carpool is stopping.")


async def test_a_stream_on_now_ends_within_the_limit(tmp_path: Path) -> None:
    slow = {"sync_latency": Constant(1.5), "first_token_share": 0.01}
    async with place(tmp_path, **slow) as here, here.running("--drain", "10") as one, here.client("") as client:
        async with client.messages.stream(**ask("to its end")) as stream:
            await anext(aiter(stream))
            ending = asyncio.ensure_future(here.end(one, signal.SIGTERM))
            final = await stream.get_final_message()
        assert final.content[0].text == expected_text(ask("to its end"))
        out, complaints = await ending
        assert complaints == ""
        assert " 200 now " in out


async def test_a_ticket_outlives_its_process(tmp_path: Path) -> None:
    async with place(tmp_path, batch_latency=Constant(1.0)) as here, httpx2.AsyncClient(timeout=20) as http:
        async with here.running() as first:
            headers = KEY | {"prefer": "respond-async"}
            accepted = await http.post(f"{here.url}/@budget=30m/v1/messages", json=ask("later"), headers=headers)
            await here.boarded(1)
            await here.end(first, signal.SIGKILL)
        async with here.running():
            answer = await http.get(f"{here.url}{accepted.headers['location']}?wait=20s", headers=KEY)
        assert answer.json()["content"][0]["text"] == expected_text(ask("later"))
        assert here.bought == 1


async def test_lines_are_json_where_asked_for(tmp_path: Path) -> None:
    async with place(tmp_path) as here, here.client("") as client:
        (tmp_path / "carpool.yaml").write_text(CONFIG + "observability: {otlp_endpoint: 'http://127.0.0.1:9'}\n")
        async with here.running("--log-format", "json") as one:
            await client.messages.create(**ask("one"))
            async with client.messages.stream(**ask("two")) as stream:
                await stream.get_final_message()
            out, _ = await here.end(one, signal.SIGTERM)
    start = json.loads(here.said)
    assert (start["event"], start["address"], start["store"]) == ("start", here.url, str(tmp_path / "s.db"))
    assert start["found"] == {"calls": 0, "batches": 0, "answers": 0, "keyless": 0}
    note, *lines, stop = [json.loads(line) for line in out.splitlines()]
    assert (note["event"], note["message"][:6]) == ("note", "Note: ")
    assert (stop["event"], stop["left"]["calls"]) == ("stop", 0)
    assert start["at"] < lines[0]["at"] < stop["at"]
    assert [(line["event"], line["lane"], line["status"]) for line in lines] == [("call", "now", 200)] * 2
    assert all(line["client"] == "sdk AsyncAnthropic" and line["cost_usd"] > 0 for line in lines)


async def test_lines_may_be_off(tmp_path: Path) -> None:
    async with place(tmp_path) as here, here.running("--log-format", "off") as one, here.client("") as client:
        await client.messages.create(**ask("one"))
        out, complaints = await here.end(one, signal.SIGTERM)
    assert out.splitlines()[-1] == f"carpool has stopped. Nothing is left to be done in {tmp_path}/s.db."
    assert complaints == ""
    assert "claude-haiku" not in out


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
async def test_the_start_says_what_is_there_and_the_stop_what_stays(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Once, however many processes there are."""
    async with place(tmp_path, batch_latency=Constant(60)) as here, httpx2.AsyncClient(timeout=20) as http:
        async with here.running(*options) as first:
            headers = KEY | {"prefer": "respond-async"}
            await http.post(f"{here.url}/@budget=30m/v1/messages", json=ask("later"), headers=headers)
            await here.boarded(1)
            out, complaints = await here.end(first, signal.SIGINT)
        assert complaints == ""
        said = here.said.decode() + out
        assert said.count(" listens on ") == said.count("found: nothing to be done") == 1
        start = said.partition("  look at ")[0].splitlines()
        assert all(len(line) <= 80 for line in start if str(tmp_path) not in line)
        for line in (f"  store      {tmp_path}/s.db", f"ANTHROPIC_BASE_URL={here.url}", f"{here.url}/carpool/stats"):
            assert line in said
        assert said.count("carpool has stopped, and keeps 1 open call, 1 unfinished batch\n") == 1
        assert f"  to go on   carpool serve --port {here.port} " in said
        assert len(out.partition("  look at ")[0].splitlines()) < 10
        async with here.running(*options) as second:
            out, _ = await here.end(second, signal.SIGTERM)
        assert out.count("found: 1 open call, 1 unfinished batch\n") == 1
        assert "1 call has no key here: it waits until its client calls again" in out
        assert out.count("carpool has stopped, and keeps 1 open call, 1 unfinished batch\n") == 1


async def test_what_is_found_at_a_restart_has_a_line(tmp_path: Path) -> None:
    async with place(tmp_path, batch_latency=Constant(60)) as here, httpx2.AsyncClient(timeout=20) as http:
        headers = KEY | {"prefer": "respond-async"}
        async with here.running() as first:
            await http.post(f"{here.url}/@budget=30m/v1/messages", json=ask("later"), headers=headers)
            await here.bought_one(http)
            await here.end(first, signal.SIGKILL)
        async with here.running("--log-format", "json") as second:
            assert second.stdout is not None
            await http.post(f"{here.url}/@budget=30m/v1/messages", json=ask("another"), headers=headers)
            async with asyncio.timeout(20):
                while (line := json.loads(await second.stdout.readline()))["event"] != "found":
                    assert line["event"] in ("waiting", "call", "bought")
            assert (line["batch"], line["count"], line["state"]) == (1, 1, "open")


async def test_a_store_in_memory_says_that_nothing_stays(tmp_path: Path) -> None:
    async with place(tmp_path) as here, here.running("--store", ":memory:") as one:
        out, complaints = await here.end(one, signal.SIGTERM)
    assert "  store      in memory, until carpool stops\n" in out
    assert out.endswith("carpool has stopped. Its store was in memory, so nothing is kept.\n")
    assert complaints == ""
