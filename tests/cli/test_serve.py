"""`carpool serve` as a process of its own: it starts, stops, is killed, and starts again on the same store."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic, InternalServerError

from carpool.cli.stats import states_line
from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from carpool.stores import peek
from tests.support.stage import ask

CONFIG = "batching: {linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}\n"


class Child:
    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    def client(self, options: str = "") -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url + options, api_key="k", max_retries=0)

    async def stop(self, number: int = signal.SIGTERM, within: float = 10.0) -> tuple[int, str]:
        """Its exit code, and what it had to complain about."""
        self.process.send_signal(number)
        async with asyncio.timeout(within):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()


@asynccontextmanager
async def child(upstream: MockServer, folder: Path, *options: str) -> AsyncIterator[Child]:
    (folder / "carpool.yaml").write_text(CONFIG)
    command = ["-m", "carpool", "serve", "--port", "0", "--upstream", upstream.url]
    command += ["--store", str(folder / "carpool.db"), "--config", str(folder / "carpool.yaml"), *options]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        assert "listens on http://127.0.0.1:" in said, (said, await process.stderr.read())  # type: ignore[union-attr]
        yield Child(process, said.split(" listens on ")[1].split()[0])
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def batches_of(upstream: MockServer, count: int) -> None:
    async with asyncio.timeout(10):
        while len(upstream.provider.batches) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_it_serves_and_stops(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(0.1))) as upstream, child(upstream, tmp_path) as one:
        async with one.client("/@budget=30m") as client:
            batched = await client.messages.create(**ask("batched"))
        async with one.client() as client, client.messages.stream(**ask("streamed")) as stream:
            streamed = await stream.get_final_message()
        assert batched.content[0].text == expected_text(ask("batched"))
        assert streamed.content[0].text == expected_text(ask("streamed"))
        _, counts = await peek(tmp_path / "carpool.db")  # beside the running process
        assert "Calls: settled 1" in states_line(counts)
        assert await one.stop(within=3) == (0, "")
        totals, _ = await peek(tmp_path / "carpool.db")
        assert sum(row.paid for row in totals) == upstream.provider.bill.total()


async def test_a_stop_lets_calls_on_now_finish(tmp_path: Path) -> None:
    async with serve(MockConfig(sync_latency=Constant(1.0))) as upstream, child(upstream, tmp_path) as one:
        async with one.client() as client, asyncio.TaskGroup() as group:
            whole = group.create_task(client.messages.create(**ask("whole")))
            await asyncio.sleep(0.5)
            stopped = group.create_task(one.stop(signal.SIGINT))
        assert whole.result().content[0].text == expected_text(ask("whole"))
        assert stopped.result() == (0, "")
        totals, _ = await peek(tmp_path / "carpool.db")
        assert sum(row.paid for row in totals) == upstream.provider.bill.total() > 0


async def test_a_stop_loses_no_batched_call(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(1.5))) as upstream:
        async with child(upstream, tmp_path, "--drain", "0.2") as one, one.client("/@budget=30m") as client:
            waiting = asyncio.gather(client.messages.create(**ask("kept")), return_exceptions=True)
            await batches_of(upstream, 1)
            assert await one.stop(within=4) == (0, "")
            (error,) = await waiting
            assert isinstance(error, InternalServerError)
            assert error.status_code == 503
            assert "kept in the store" in error.message
        async with child(upstream, tmp_path) as two, two.client("/@budget=30m") as client:
            answer = await client.messages.create(**ask("kept"))
        assert answer.content[0].text == expected_text(ask("kept"))
        assert len(upstream.provider.bill.charges) == 1


async def test_a_kill_loses_no_batched_call(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(1.0))) as upstream:
        async with child(upstream, tmp_path) as one, one.client("/@budget=30m") as client:
            waiting = asyncio.gather(client.messages.create(**ask("kept")), return_exceptions=True)
            await batches_of(upstream, 1)
            await one.stop(signal.SIGKILL)
            await waiting
        async with child(upstream, tmp_path) as two, two.client("/@budget=30m") as client:
            answer = await client.messages.create(**ask("kept"))
        assert answer.content[0].text == expected_text(ask("kept"))
        assert len(upstream.provider.bill.charges) == 1


@pytest.mark.parametrize("options", ["", "/@budget=30m"])
async def test_a_stop_breaks_begun_streams(tmp_path: Path, options: str) -> None:
    slow = MockConfig(batch_latency=Constant(60), sync_latency=Constant(60), first_token_share=0.001)
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    async with serve(slow) as upstream, child(upstream, tmp_path, "--drain", "0.1") as one:
        url, body = f"{one.url}{options}/v1/messages", ask(stream=True)
        async with httpx2.AsyncClient() as http, http.stream("POST", url, json=body, headers=headers) as response:
            assert response.status_code == 200
            code, said = await one.stop(within=4)
            with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
                await response.aread()
        assert code == 0
        assert "A response breaks off after its head" in said
        assert "Traceback" not in said


def test_states_line_without_calls() -> None:
    empty: dict[str, Any] = {}
    assert states_line(empty) == "No calls yet."
