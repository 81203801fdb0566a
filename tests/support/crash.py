"""The parent's side: the provider that keeps the bill, the children that are killed, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copy
from typing import Any

from carpool.core.model import Entry, EntryKind, Totals, ticket_number
from carpool.mock import Charge, Constant, Faults, MockAnthropic, MockConfig, expected_text, fingerprint, serve
from carpool.stores import open_store, peek

PATIENCE_S = 40.0  # nothing here takes so long unless it hangs
NEVER = Constant(3600.0)
LIST_LAG_S = 0.5
MODEL = "claude-haiku-4-5"
# Four pools of one credential: three size classes, and one with a beta of its own.
POOLS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 100},
    {"max_tokens": 2000},
    {"max_tokens": 9000},
    {"max_tokens": 100, "betas": ["context-1m-2025-08-07"]},
)
EACH = 3  # calls in every pool
POLICY: dict[str, Any] = {"linger_ms": 50, "poll_interval_s": 0.1, "batch_rpm": 1_000_000}


@dataclass(frozen=True)
class Call:
    number: int
    params: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    late: bool = False  # submitted when the others are bought

    @property
    def body(self) -> dict[str, Any]:
        return {name: value for name, value in self.params.items() if name != "betas"}

    @property
    def text(self) -> str:
        return expected_text(self.body)

    def keyed(self) -> Call:
        return replace(self, options={**self.options, "key": f"key-{self.number}"})


def make_call(number: int, pool: int = 0, late: bool = False, **options: Any) -> Call:
    messages = [{"role": "user", "content": f"{number}: what is {number} squared?"}]
    return Call(number, {"model": MODEL, "messages": messages, **POOLS[pool]}, options, late)


def groups(each: int = EACH) -> list[Call]:
    """Equal counts on purpose: whose batch is whose can't be told from its size."""
    return [make_call(number, number % len(POOLS)) for number in range(each * len(POOLS))]


# ---------------------------------------------------------------- children


class Child:
    """One process, as far as it has been heard of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pid = 0
        self.points: Counter[str] = Counter()
        self.answers: dict[int, tuple[str, str]] = {}  # call → (message id, text)
        self.words: set[str] = set()
        self.status: int | None = None
        self._news = asyncio.Condition()

    async def hear(self, word: str, rest: str) -> None:
        async with self._news:
            self.words.add(word)
            if word == "pid":
                self.pid = int(rest)
            elif word == "point":
                point, count = rest.split()
                self.points[point] = int(count)
            elif word == "answer":
                number, message, text = json.loads(rest)
                self.answers[number] = (message, text)
            elif word == "exit":
                self.status = int(rest)
            self._news.notify_all()

    async def until(self, what: str, test: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S), self._news:
                await self._news.wait_for(lambda: test() or self.status is not None)
        except TimeoutError:
            raise AssertionError(f"{self.name} never came to {what}: {dict(self.points)}, {self.words}") from None
        assert test(), f"{self.name} ended with {self.status} before {what}: {dict(self.points)}"

    async def reaches(self, point: str, count: int) -> None:
        await self.until(f"{point} {count}", lambda: self.points[point] >= count)

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await self.until("its death", lambda: self.status is not None)
        assert self.status == -signal.SIGKILL

    async def finish(self) -> None:
        await self.until("its end", lambda: self.status is not None)
        assert self.status == 0, f"{self.name} failed with {self.status}"


class Children:
    """Starts children. Those that a failed test leaves behind end with it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._children: dict[str, Child] = {}

    def start(self, **job: Any) -> Child:
        child = Child(f"child-{len(self._children)}")
        self._children[child.name] = child
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"job": child.name, **job}).encode() + b"\n")
        return child

    async def listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            name, word, *rest = line.decode().rstrip("\n").split(" ", 2)
            await self._children[name].hear(word, rest[0] if rest else "")

    async def end(self) -> None:
        for child in self._children.values():
            if child.status is None and child.pid:
                os.kill(child.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


@asynccontextmanager
async def children(log: Path) -> AsyncIterator[Children]:
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            str(Path(__file__).with_name("crash_child.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            limit=1 << 20,
        )
        family = Children(process)
        listening = asyncio.create_task(family.listen())
        try:
            yield family
        finally:
            await family.end()
            await listening


# ---------------------------------------------------------------- the world of one scenario


@dataclass
class Ledger:
    totals: list[Totals]
    counts: dict[str, int]
    entries: dict[int, list[Entry]]  # by ticket
    abandoned: int  # calls that stand as unknown, because the create of their batch was given up as unknown

    @property
    def paid(self) -> int:
        return sum(row.paid for row in self.totals)

    @property
    def unknown(self) -> int:
        return sum(row.unknown for row in self.totals)

    def purchases(self, kind: EntryKind) -> int:
        """How many of this kind are known to have been bought, or were tried on `now`."""
        return sum(row.purchases for row in self.totals if row.kind is kind) - (
            self.abandoned if kind is EntryKind.PURCHASE else 0
        )


class World:
    """A provider of its own, a store of its own, and the processes that use them one after the other."""

    def __init__(self, provider: MockAnthropic, url: str, folder: Path, family: Children | None = None) -> None:
        self.provider = provider
        self.url = url
        self.folder = folder
        self.store: str | Path = folder / "fleet.db"
        self.family = family
        self.grace_s = 0.5
        self.more: dict[str, Any] = {}  # that every child is told
        self.policy = POLICY
        self._flow: asyncio.Task[None] | None = None

    def start(self, calls: Sequence[Call], **job: Any) -> Child:
        policy = {**self.policy, **job.pop("policy", {})}
        wire = [{"number": one.number, "params": one.params, "options": one.options, "late": one.late} for one in calls]
        assert self.family is not None
        told = {"policy": policy, "calls": wire, "grace_s": self.grace_s, **self.more, **job}
        return self.family.start(url=self.url, store=str(self.store), **told)

    def flow(self) -> None:
        """From now on batches end soon after they are made; until now none ended at all."""
        if self._flow is None:
            self._flow = asyncio.create_task(self._end_batches())

    async def _end_batches(self) -> None:
        while True:
            for batch in self.provider.batches:
                if not batch.closed:
                    self.provider.end_batch(batch.id)
            await asyncio.sleep(0.05)

    async def accepted(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.own_batches) < count:  # noqa: ASYNC110  the provider has no bell to ring
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._flow is not None:
            self._flow.cancel()
            with suppress(asyncio.CancelledError):
                await self._flow

    # looking, without a trace: at a copy of the file as the dead process left it

    async def counts(self) -> dict[str, int]:
        if isinstance(self.store, str):
            return dict((await peek(self.store))[1])
        copies = self.folder / "copy"
        copies.mkdir(exist_ok=True)
        for file in self.folder.glob("fleet.db*"):
            if not file.name.endswith((".lock", "-shm")):
                copy(file, copies / file.name)
        store = await open_store(copies / "fleet.db")
        try:
            return dict(await store.counts())
        finally:
            await store.aclose()

    async def ledger(self) -> Ledger:
        store = await open_store(self.store)
        try:
            entries = {ticket: await store.entries(ticket) for ticket in self.tickets}
            doubted = [one.purchase for lines in entries.values() for one in lines if one.paid is None]
            rows = {number: await store.batch(number) for number in doubted if number > 0}
            abandoned = sum(row.count for row in rows.values() if row is not None and row.abandoned)
            return Ledger(await store.totals(), dict(await store.counts()), entries, abandoned)
        finally:
            await store.aclose()

    # what the provider knows

    @property
    def own_batches(self) -> list[Any]:
        return [batch for batch in self.provider.batches if not batch.stranger]

    @property
    def tickets(self) -> set[int]:
        """Every ticket that ever rode a batch."""
        names = (custom_id for batch in self.own_batches for custom_id in batch.custom_ids)
        return {ticket_number(name.partition("-")[2]) for name in names}

    def batch_charges(self) -> Counter[str]:
        """How often each call was billed in batches, by the fingerprint of its body."""
        return Counter(charge.fingerprint for charge in self.provider.bill.charges if charge.kind == "batch")

    def sync_charges(self) -> list[Charge]:
        return [charge for charge in self.provider.bill.charges if charge.kind == "sync"]


# On a shared store a process counts as dead when its connection is gone or its pulse has stopped, and what it had begun
# may be on its way until its lease ends: all are short here, or every crash would take minutes. The pulse is longer
# than a process of a busy machine stands still.
SHARED: dict[str, Any] = {"lease": [5.0, 3.0, 0.5], "create_silence_s": 1.0, "doubt_s": 1.0}


@asynccontextmanager
async def world(folder: Path, family: Children, postgres: str | None = None) -> AsyncIterator[World]:
    await asyncio.to_thread(folder.mkdir)
    provider = MockAnthropic(MockConfig(batch_latency=NEVER, batch_rpm=None, faults=Faults(list_lag_s=LIST_LAG_S)))
    async with serve(provider=provider) as server:
        made = World(provider, server.url, folder, family)
        if postgres is not None:
            made.store, made.more = postgres, SHARED
            # Calls of one moment may be admitted one after the other there: what makes a batch whole is its count.
            made.policy = {**POLICY, "linger_ms": 2000, "batch_max_size": EACH}
        try:
            yield made
        finally:
            await made.stop()


# ---------------------------------------------------------------- what must hold


def check_answers(calls: Iterable[Call], *lives: Child) -> None:
    """Every call has its own right answer, and no two lives were told different ones."""
    for call in calls:
        told = {life.answers[call.number] for life in lives if call.number in life.answers}
        assert told, f"call {call.number} was never answered"
        assert len(told) == 1, f"call {call.number} was answered twice, differently: {told}"
        assert told.pop()[1] == call.text


def check_bought_once(made: World, calls: Iterable[Call]) -> None:
    assert made.batch_charges() == Counter(fingerprint(call.body) for call in calls)


def check_books(made: World, ledger: Ledger) -> None:
    """Nothing is left to do, and the ledger is the provider's bill to the nano-dollar. Only a create that was given up
    without a proof stands there as unknown."""
    assert ledger.unknown == ledger.abandoned
    assert ledger.paid == made.provider.bill.total()
    assert sum(row.purchases - row.unknown for row in ledger.totals) == len(made.provider.bill.charges)
    check_all_done(made, ledger)


def check_all_done(made: World, ledger: Ledger) -> None:
    open_tickets = {name: count for name, count in ledger.counts.items() if name.startswith("tickets.") and count}
    assert open_tickets.keys() <= {"tickets.settled"}
    assert not made.provider.canceled
