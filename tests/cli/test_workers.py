"""`carpool serve --workers N` on a file: N processes with one port and one pool, which come and go."""

import asyncio
import os
import signal
import stat
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic

from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from carpool.planners.ledger import dollars
from carpool.stores import peek
from tests.support import post_webhook as hooking
from tests.support.disconnecting import LARGE, MIDDLING, answered, calling, lengthen
from tests.support.stage import ask

CONFIG = "batching: {linger_ms: 200, poll_interval_s: 0.1, rpm: 100000}\n"
CALLS = 60


class House:
    """A supervisor and its workers."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, folder: Path) -> None:
        self.process = process
        self.url = url
        self.folder = folder

    def client(self, options: str = "", key: str = "k", retries: int = 0) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url + options, api_key=key, max_retries=retries)

    def workers(self) -> set[int]:
        """The processes that it started and that live."""
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(parent) == self.process.pid and state != "Z":
                    found.add(int(folder.name))
        return found

    async def stats(self) -> dict[str, Any]:
        async with httpx2.AsyncClient() as client:
            return (await client.get(f"{self.url}/carpool/stats")).json()

    async def stop(self, number: int = signal.SIGTERM, within: float = 20.0) -> tuple[int, str]:
        self.process.send_signal(number)
        async with asyncio.timeout(within):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()


def alive(processes: set[int]) -> list[int]:
    return [process for process in processes if Path(f"/proc/{process}").exists()]


def files_with(folder: Path, word: bytes) -> list[Path]:
    return [file for file in folder.iterdir() if file.is_file() and word in file.read_bytes()]


def hubs(folder: Path) -> list[Path]:
    return list(folder.glob("carpool-*/hub"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def command(upstream: MockServer, folder: Path, *options: str, config: str = CONFIG) -> list[str]:
    (folder / "carpool.yaml").write_text(config)
    made = [sys.executable, "-m", "carpool", "serve", "--port", "0", "--upstream", upstream.url, "--log-format", "off"]
    return [*made, "--store", str(folder / "carpool.db"), "--config", str(folder / "carpool.yaml"), *options]


@asynccontextmanager
async def house(
    upstream: MockServer, folder: Path, workers: int = 3, *options: str, config: str = CONFIG
) -> AsyncIterator[House]:
    pipe = asyncio.subprocess.PIPE
    words = command(upstream, folder, "--workers", str(workers), *options, config=config)
    environment = {**os.environ, "TMPDIR": str(folder), **hooking.ENVIRONMENT}
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe, env=environment)
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        assert "listens on http://127.0.0.1:" in said, (said, await process.stderr.read())  # type: ignore[union-attr]
        made = House(process, said.split(" listens on ")[1].split()[0], folder)
        assert len(made.workers()) == workers
        yield made
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def asked(client: AsyncAnthropic, text: str) -> None:
    message = await client.messages.create(**ask(text))
    assert message.content[0].text == expected_text(ask(text))


def bought(upstream: MockServer) -> Counter[str]:
    return Counter(charge.fingerprint for charge in upstream.provider.bill.charges)


async def test_many_processes_are_one_pool(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(0.5))) as upstream, house(upstream, tmp_path) as made:
        async with made.client("/@budget=30m") as client:
            await asyncio.gather(*(asked(client, f"call {number}") for number in range(CALLS)))
        async with made.client() as client:
            await asked(client, "at once")
        assert len(upstream.provider.batches) <= 3
        assert sum(batch.size for batch in upstream.provider.batches) == CALLS
        assert set(bought(upstream).values()) == {1}
        _, counts = await peek(tmp_path / "carpool.db")
        assert counts["tickets.settled"] == CALLS
        workers = made.workers()
        assert await made.stop() == (0, "")
        assert not alive(workers)
        totals, _ = await peek(tmp_path / "carpool.db")
        assert sum(row.paid for row in totals) == upstream.provider.bill.total()


async def test_every_worker_answers_for_all(tmp_path: Path) -> None:
    """The store's figures are the same at each door; the counters are each process's own."""
    async with serve(MockConfig(batch_latency=Constant(0.2))) as upstream, house(upstream, tmp_path) as made:
        async with made.client("/@budget=30m") as client:
            await asyncio.gather(*(asked(client, f"call {number}") for number in range(20)))
        seen: dict[int, dict[str, Any]] = {}
        async with asyncio.timeout(60):
            while len(seen) < 3:
                said = await made.stats()
                seen[said["process"]] = said
        assert set(seen) == made.workers()
        assert len({said["engine"] for said in seen.values()}) == 3
        assert {said["store"]["tickets.settled"] for said in seen.values()} == {20}
        assert sum(said["leads"] for said in seen.values()) == 1
        assert sum(said["carpool.batched_calls"] for said in seen.values()) == 20
        async with httpx2.AsyncClient() as client:
            for page in ("healthz", "readyz", "calls", "batches"):
                assert (await client.get(f"{made.url}/carpool/{page}")).status_code == 200


@asynccontextmanager
async def at_one_worker(made: House) -> AsyncIterator[tuple[httpx2.AsyncClient, int]]:
    """A client that stays at one connection, and the process at its other end."""
    limits = httpx2.Limits(max_connections=1)
    async with httpx2.AsyncClient(limits=limits, timeout=60) as client:
        yield client, (await client.get(f"{made.url}/carpool/stats")).json()["process"]


async def test_every_worker_tells_what_an_answer_cost(tmp_path: Path) -> None:
    """Whoever settled it: the ledger is everybody's."""
    async with (
        serve(MockConfig(batch_latency=Constant(0.3))) as upstream,
        house(upstream, tmp_path) as made,
        AsyncExitStack() as stack,
    ):
        clients: dict[int, httpx2.AsyncClient] = {}
        async with asyncio.timeout(60):
            while len(clients) < 3:
                client, worker = await stack.enter_async_context(at_one_worker(made))
                clients.setdefault(worker, client)
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        url = f"{made.url}/@budget=30m/v1/messages"
        asking = [one.post(url, headers=headers, json=ask(f"at {at}")) for at, one in enumerate(clients.values())]
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        told = [answer.headers.get("x-carpool-cost") for answer in answers]
        assert None not in told
        assert sorted(told) == sorted(dollars(charge.nano_usd) for charge in upstream.provider.bill.charges)
        assert all("x-carpool-saved" in answer.headers for answer in answers)


async def test_a_webhook_wakes_the_leader_whichever_worker_it_reaches(tmp_path: Path) -> None:
    async with (
        serve(MockConfig(batch_latency=Constant(3600.0))) as upstream,
        house(upstream, tmp_path, config=hooking.config(upstream)) as made,
        AsyncExitStack() as stack,
    ):
        clients: dict[int, httpx2.AsyncClient] = {}
        leads: set[int] = set()
        async with asyncio.timeout(60):
            while len(clients) < 3 or not leads:
                client, worker = await stack.enter_async_context(at_one_worker(made))
                clients.setdefault(worker, client)
                await hooking.add_secret(client, made.url)
                if (await client.get(f"{made.url}/carpool/stats")).json()["leads"]:
                    leads.add(worker)
        [leader] = leads
        url = f"{made.url}/@lane=batch/v1/chat/completions"
        for number, worker in enumerate(sorted(clients)):  # at the leader, too
            call = asyncio.create_task(clients[leader].post(url, headers=hooking.KEY, json=hooking.CHAT))
            while (await peek(tmp_path / "carpool.db"))[1]["batches.bought"] <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # until it is written down
            batch = upstream.provider.batches[number]
            upstream.provider.end_batch(batch.id)
            async with httpx2.AsyncClient() as other:
                await hooking.tell(clients[worker] if worker != leader else other, made.url, batch.id, f"evt_{number}")
            assert (await call).status_code == 200


async def test_a_batch_outlives_the_worker_that_was_given_its_key(tmp_path: Path) -> None:
    """Only one worker ever saw the key. It dies; another has the key, follows the batch, and gives the answer to the
    client that comes back, which is bought once."""
    async with serve(MockConfig(batch_latency=Constant(3.0))) as upstream, house(upstream, tmp_path) as made:
        headers = {"x-api-key": "sk-passed-through", "anthropic-version": "2023-06-01"}
        url = f"{made.url}/@budget=30m/v1/messages"
        async with at_one_worker(made) as (client, worker):
            call = asyncio.create_task(client.post(url, headers=headers, json=ask("kept")))
            await until(lambda: len(upstream.provider.batches) == 1)
            await asyncio.sleep(0.2)  # written down, and the key handed on
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(httpx2.TransportError):
                await call
        async with httpx2.AsyncClient(timeout=60) as client:
            answer = await client.post(url, headers=headers, json=ask("kept"))
        assert answer.json()["content"][0]["text"] == expected_text(ask("kept"))
        assert len(upstream.provider.batches) == 1
        assert set(bought(upstream).values()) == {1}
        await until(lambda: len(made.workers()) == 3)  # and another has taken its place
        assert worker not in made.workers()
        code, said = await made.stop()
        assert code == 0
        assert "ended (signal 9). It is started again" in said
        assert not files_with(tmp_path, b"sk-passed-through")


@pytest.mark.parametrize("size", [1, MIDDLING, LARGE])
async def test_a_client_may_break_off_at_every_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In the middle of its answer where that is long, and else as soon as it has asked. It is bought once."""
    lengthen(monkeypatch, size)
    async with serve(MockConfig(batch_latency=Constant(0.5))) as upstream, house(upstream, tmp_path) as made:
        for number in range(8):
            async with calling(made.url, ask("broken off")) as caller:
                if size > 1:
                    await caller.reader.readexactly(50_000)
                elif not number:
                    await until(lambda: upstream.provider.batches)
                caller.reset()
            await asyncio.sleep(0.4)  # as the SDKs wait, at the least; the other workers are told within that
        await answered(made.url, ask("broken off"))
        assert set(bought(upstream).values()) == {1}


async def test_calls_of_a_killed_worker_are_bought_once(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(2.0))) as upstream, house(upstream, tmp_path) as made:
        async with made.client("/@budget=30m", retries=5) as client:
            calls = [asyncio.create_task(asked(client, f"call {number}")) for number in range(CALLS)]
            await until(lambda: sum(batch.size for batch in upstream.provider.batches) == CALLS)
            os.kill(min(made.workers()), signal.SIGKILL)
            await asyncio.gather(*calls)
        assert set(bought(upstream).values()) == {1}
        assert sum(batch.size for batch in upstream.provider.batches) == CALLS


async def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    async with serve() as upstream:
        words = command(upstream, tmp_path, "--workers", "3", "--host", "0.0.0.0")
        environment = {**os.environ, "CARPOOL_ADMIN_TOKEN": "t" * 32}
        process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.PIPE, env=environment)
        async with asyncio.timeout(30):
            _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode().count("nobody has a key yet") == 1


async def test_workers_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(0.5))) as upstream:
        async with house(upstream, tmp_path, 2) as made:
            workers = made.workers()
            await made.stop(signal.SIGKILL)
            await until(lambda: not alive(workers))
        async with house(upstream, tmp_path, 2) as again, again.client("/@budget=30m") as client:
            await asked(client, "after all")


async def test_the_socket_between_them_is_nobody_elses(tmp_path: Path) -> None:
    async with serve() as upstream, house(upstream, tmp_path, 2):
        [socket] = hubs(tmp_path)
        assert mode(socket) == 0o600
        assert mode(socket.parent) == 0o700
    assert not hubs(tmp_path)
