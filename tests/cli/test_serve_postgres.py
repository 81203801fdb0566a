"""Several `carpool serve` on one PostgreSQL: one pool, also when one of them is killed and the database restarts."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from carpool.planners.ledger import dollars
from carpool.stores import peek
from tests.support import post_webhook as hooking
from tests.support.disconnecting import LARGE, answered, calling, lengthen
from tests.support.postgres import FAST, Server, schema_url
from tests.support.stage import ask

CONFIG = "batching: {linger_ms: 700, poll_interval_s: 0.2, rpm: 100000}\n"
NEVER = Constant(3600.0)
CALLS = 2000
DOORS = 4
HANDFUL = 8  # batches of one credential, of whatever 2,000 calls came in within about a second
PATIENCE_S = 120.0


class Door:
    """One `carpool serve`."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.port = int(url.rpartition(":")[2])
        self.url = url

    async def stats(self) -> dict[str, Any]:
        async with httpx2.AsyncClient(timeout=30) as client:
            return (await client.get(f"{self.url}/carpool/stats")).json()

    async def post(self, number: int) -> dict[str, Any] | None:
        """The answer, or None where the connection broke or it was told to come back. By hand: thousands at once must
        not be held up by their own clients."""
        body = json.dumps(ask(f"call {number}")).encode()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return None
        try:
            head = (
                f"POST /@budget=30m/v1/messages HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: k\r\ncontent-type: "
                f"application/json\r\nanthropic-version: 2023-06-01\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status, answer = await _answer(reader)
        except (OSError, asyncio.IncompleteReadError):
            return None
        finally:
            writer.close()
        return json.loads(answer) if status == 200 else None


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status = int(head.split()[1])
    if "content-length:" in head:
        return status, await reader.readexactly(int(head.split("content-length:")[1].split()[0]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return status, body


@asynccontextmanager
async def door(upstream: MockServer, store: str, folder: Path, *more: str, config: str = CONFIG) -> AsyncIterator[Door]:
    (folder / "carpool.yaml").write_text(config)
    words = ["-m", "carpool", "serve", "--port", "0", "--upstream", upstream.url, "--log-format", "off"]
    environment = {**os.environ, "CARPOOL_SECRET": "s" * 40, "CARPOOL_STORE__URL": store, **hooking.ENVIRONMENT}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words, "--config", str(folder / "carpool.yaml"), *more),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        yield Door(process, said.split(" listens on ")[1].split()[0])
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = true()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    """A server of its own, because it is restarted; and up for a while, so that it tells the dead from the silent. Not
    in pytest's folder: that is closed to the user that it runs as whenever another run begins."""
    server = Server(Path(tempfile.mkdtemp(prefix="carpool-pg-")), **FAST)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("SELECT pg_sleep(11)")
    yield server
    server.remove()


def connected(server: Server) -> int:
    with psycopg.connect(server.url) as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'carpool'"
        return int((connection.execute(query).fetchone() or (0,))[0])


def riding(upstream: MockServer) -> int:
    return sum(batch.size for batch in upstream.provider.batches)


def end_all(upstream: MockServer) -> None:
    for batch in upstream.provider.batches:
        if not batch.closed:
            upstream.provider.end_batch(batch.id)


@asynccontextmanager
async def houses(
    upstream: MockServer, store: str, folder: Path, count: int = DOORS, config: str = CONFIG
) -> AsyncIterator[list[Door]]:
    async with AsyncExitStack() as stack:
        opening = [stack.enter_async_context(door(upstream, store, folder, config=config)) for _ in range(count)]
        yield [await one for one in opening]


async def asked(doors: list[Door], number: int, answers: Counter[int]) -> None:
    """As a client that retries: at its own door as long as that is there, and then at the others."""
    tries = 0
    while True:
        at = (number + tries) % len(doors)
        answer = await doors[at].post(number)
        if answer is not None:
            assert answer["content"][0]["text"] == expected_text(ask(f"call {number}"))
            answers[at] += 1
            return
        tries += 1
        await asyncio.sleep(0.5)


async def waiting(doors: list[Door]) -> int:
    return sum([(await one.stats())["waiting"] for one in doors])


async def test_four_processes_are_one_pool_whatever_happens(postgres: Server, tmp_path: Path) -> None:
    """2,000 calls at four doors within about a second. When all ride, the leader is killed; its clients come back to
    the others. Then the database restarts. Each call is answered, and bought once."""
    store, answers = schema_url(postgres.url), Counter[int]()
    async with (
        serve(MockConfig(batch_latency=NEVER)) as upstream,
        houses(upstream, store, tmp_path) as doors,
    ):
        calls = [asyncio.create_task(asked(doors, number, answers)) for number in range(CALLS)]
        await until(lambda: riding(upstream) == CALLS)
        await until(_all_open(store))
        assert len(upstream.provider.batches) <= HANDFUL
        [leader] = [one for one in doors if (await one.stats())["leads"]]
        leader.process.kill()
        await leader.process.wait()
        living = [one for one in doors if one is not leader]
        await until(_everybody_waits(living))
        assert riding(upstream) == CALLS  # who came back found its ticket
        await asyncio.to_thread(postgres.restart)
        end_all(upstream)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*calls)
        bought = Counter(charge.fingerprint for charge in upstream.provider.bill.charges)
        assert len(bought) == CALLS
        assert set(bought.values()) == {1}
        own = DOORS * [CALLS // DOORS]
        own[doors.index(leader)] = 0
        assert all(answers[at] >= own[at] for at in range(DOORS))
        await until(_all_collected(store))
        totals, _ = await peek(store)
        assert sum(row.paid for row in totals) == upstream.provider.bill.total()


async def test_a_client_of_a_dead_process_may_hang_up_while_its_fate_is_undecided(
    postgres: Server, tmp_path: Path
) -> None:
    """Nobody knows yet whether its process lives, so its call is neither joined nor bought; and it hangs up on that,
    again and again. Who was not let in must not stand in the way of who comes back."""
    store = schema_url(postgres.url)
    async with (
        serve(MockConfig(batch_latency=NEVER)) as upstream,
        houses(upstream, store, tmp_path, 2) as (first, second),
    ):
        async with calling(first.url, ask("orphan")):
            await until(lambda: bought(store, 1))
            first.process.kill()
            await first.process.wait()
            await until(lambda: connected(postgres) == 2)  # the other's; before that, nobody can know that it is gone
        for _ in range(6):
            async with calling(second.url, ask("orphan")) as caller:
                await asyncio.sleep(0.3)  # it dies within 5 s
                caller.reset()
        back = asyncio.create_task(answered(second.url, ask("orphan")))
        await until(_waits(second))
        end_all(upstream)
        await back
        assert riding(upstream) == 1


async def test_an_answer_that_is_cut_in_the_middle_waits_at_every_door(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = schema_url(postgres.url)
    lengthen(monkeypatch, LARGE)
    async with (
        serve(MockConfig(batch_latency=Constant(0.2))) as upstream,
        houses(upstream, store, tmp_path, 2) as doors,
    ):
        for one in (*doors, *doors):
            async with calling(one.url, ask("cut")) as caller:
                await caller.reader.readexactly(50_000)
                caller.reset()
            await asyncio.sleep(0.4)  # as the SDKs wait, at the least
        await answered(doors[0].url, ask("cut"))
        assert riding(upstream) == 1


def _waits(one: Door) -> Callable[[], Any]:
    async def true() -> bool:
        return bool((await one.stats())["waiting"])

    return true


def _all_open(store: str) -> Callable[[], Any]:
    async def true() -> bool:
        _, counts = await peek(store)
        return not counts.get("batches.submitting") and not counts["tickets.queued"]

    return true


def _all_collected(store: str) -> Callable[[], Any]:
    async def true() -> bool:
        _, counts = await peek(store)
        return not any(counts.get(f"batches.{state}") for state in ("open", "ended", "submitting", "unknown"))

    return true


def _everybody_waits(doors: list[Door]) -> Callable[[], Any]:
    async def true() -> bool:
        return await waiting(doors) == CALLS

    return true


async def test_every_door_tells_what_an_answer_cost(postgres: Server, tmp_path: Path) -> None:
    """Whoever settled it, and whether it is waited for, collected at another door, or asked for again."""
    store = schema_url(postgres.url)
    async with (
        serve(MockConfig(batch_latency=Constant(0.3))) as upstream,
        houses(upstream, store, tmp_path, 2) as doors,
        httpx2.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "x-carpool-budget": "30m"}

        async def post(at: Door, text: str, **more: str) -> httpx2.Response:
            return await client.post(f"{at.url}/v1/messages", headers={**headers, **more}, json=ask(text))

        waited = await asyncio.gather(*(post(at, f"{n} at {at.port}") for at in doors for n in range(3)))
        assert {answer.status_code for answer in waited} == {200}
        told = [answer.headers.get("x-carpool-cost") for answer in waited]
        assert None not in told
        assert sorted(told) == sorted(dollars(charge.nano_usd) for charge in upstream.provider.bill.charges)
        assert all("x-carpool-saved" in answer.headers for answer in waited)

        for here, there in (doors, doors[::-1]):
            kept = {"x-carpool-key": f"key {here.port}"}
            accepted = await post(here, "later", prefer="respond-async", **kept)
            assert accepted.status_code == 202
            ticket = accepted.headers["location"]
            collected = await client.get(f"{there.url}{ticket}?wait=60s", headers={"x-api-key": "k"})
            again = await client.get(f"{here.url}{ticket}", headers={"x-api-key": "k"})
            same_key = await post(there, "later", **kept)
            costs = {one.headers.get("x-carpool-cost") for one in (collected, again, same_key)}
            assert len(costs) == 1
            assert None not in costs


async def test_a_webhook_wakes_the_leader_wherever_it_is(postgres: Server, tmp_path: Path) -> None:
    """It reaches a process that follows no batch of this account, and the answer does not wait for the next look."""
    store = schema_url(postgres.url)
    async with (
        serve(MockConfig(batch_latency=NEVER)) as upstream,
        houses(upstream, store, tmp_path, 2, hooking.config(upstream)) as (leader, other),
        httpx2.AsyncClient(timeout=PATIENCE_S) as client,
    ):
        for one in (leader, other):  # whoever sees the key first leads its account
            await hooking.add_secret(client, one.url)
            await until(lambda: _leads(leader))
        assert not await _leads(other)
        url = f"{leader.url}/@lane=batch/v1/chat/completions"
        call = asyncio.create_task(client.post(url, headers=hooking.KEY, json=hooking.CHAT))
        await until(lambda: bought(store, 1))
        [batch] = upstream.provider.batches
        upstream.provider.end_batch(batch.id)
        await hooking.tell(client, other.url, batch.id)
        assert (await call).status_code == 200


async def bought(store: str, batches: int) -> bool:
    """Whether so many batches were bought, and it is written down."""
    _, counts = await peek(store)
    return counts["batches.bought"] == batches


async def _leads(one: Door) -> bool:
    return bool((await one.stats())["leads"])


async def test_workers_share_a_database(postgres: Server, tmp_path: Path) -> None:
    """The same with one command: its processes open the database each for themselves."""
    store = schema_url(postgres.url)
    async with (
        serve(MockConfig(batch_latency=Constant(1.0))) as upstream,
        door(upstream, store, tmp_path, "--workers", "3") as one,
    ):
        answers = Counter[int]()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(asked([one], number, answers) for number in range(200)))
        assert riding(upstream) == 200
        assert len(upstream.provider.batches) <= HANDFUL
        one.process.send_signal(signal.SIGTERM)
        assert await one.process.wait() == 0
