"""Creates that nobody answered, with strangers' batches of the same size beside them and a LIST that lags.

All is answered, bought once or entered as what it was, and what belongs to strangers stays theirs.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic

import carpool.engine.batch.buy
import carpool.engine.batch.follow
from carpool import FleetDispatcher, RoutingPolicy
from carpool.core.model import EntryKind, Lane
from carpool.mock import Constant, Faults, MockAnthropic, MockConfig, fingerprint, serve
from tests.support.crash import PATIENCE_S, POLICY, Call, World, check_books, groups, make_call
from tests.support.deep import quick_and_deep

GRACE_S = 3.0
CREATE_IDLE_TIMEOUT_S = 1.0
SHORT_LAG_S = 1.0
HIDDEN = 3600.0  # a lag that ends when the test says so
AT_ONCE = 14  # cases that run side by side; they mostly wait
SIZE = 3  # calls in every batch, ours and the strangers'
STRUCK = 2  # creates that go wrong, of four
PRESSED = 4  # calls that can't wait, one in each batch

AFTER = ("create_accepted_cut", "create_accepted_500", "create_accepted_529", "create_accepted_hang")
BEFORE = ("create_cut", "create_500", "create_529", "create_hang")


@dataclass(frozen=True)
class Case:
    fault: str
    lag_s: float = 0.0
    offset_s: float = 0.0  # the provider's clock minus ours
    pressed: bool = False  # some calls can't wait until the fate of their batch is known
    open_stranger: bool = False  # a stranger's batch of our size does not end
    strangers: bool = True

    @property
    def name(self) -> str:
        lag = "hidden" if self.lag_s == HIDDEN else f"lag {self.lag_s}" if self.lag_s else ""
        words = [self.fault, lag, f"clock {self.offset_s:+.0f}"]
        words += ["pressed" if self.pressed else "", "open stranger" if self.open_stranger else ""]
        words += ["" if self.strangers else "no strangers"]
        return ", ".join(filter(None, words))

    @property
    def config(self) -> MockConfig:
        faults = Faults(list_lag_s=self.lag_s, clock_offset_s=self.offset_s)
        return MockConfig(batch_latency=Constant(0.4), batch_rpm=None, faults=faults)

    @property
    def duplicates(self) -> int:
        """Calls whose batch surfaced only after they were bought anew."""
        return STRUCK * SIZE if self.lag_s == HIDDEN and not self.open_stranger else 0


def cases() -> Iterator[Case]:
    for fault in AFTER:
        yield Case(fault, open_stranger=True)
        yield Case(fault, SHORT_LAG_S, 3600.0)
        yield Case(fault, SHORT_LAG_S, strangers=False)  # nothing but the grace time keeps it from being bought anew
        yield Case(fault, HIDDEN, -3600.0)
        yield Case(fault, HIDDEN, pressed=True, open_stranger=True)
    for fault in BEFORE:
        yield Case(fault)
        yield Case(fault, SHORT_LAG_S, 3600.0)
        yield Case(fault, offset_s=-3600.0, open_stranger=True)


CASES = {case.name: case for case in cases()}
QUICK = [[case.name for case in cases() if case.fault == fault][at % 3] for at, fault in enumerate(AFTER + BEFORE)]


class Office:
    """A fleet in this process, and what it was told."""

    def __init__(self, made: World, fleet: FleetDispatcher, events: Counter[str]) -> None:
        self.made = made
        self.fleet = fleet
        self.events = events

    async def ask(self, call: Call) -> tuple[str, str]:
        message = await self.fleet.submit(**call.options, **call.params)
        return message.id, message.content[0].text

    def surface(self) -> None:
        """What LIST kept back is there now."""
        for batch in self.made.own_batches:
            batch.listed_from = 0.0

    async def settled(self, abandoned: bool) -> None:
        """Every batch has come to its end; abandoned ones too, where they are known to surface."""
        assert self.fleet._engine is not None
        store = self.fleet._engine._context.store
        busy = ("submitting", "unknown", "open", "ended", *(("abandoned",) if abandoned else ()))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                counts = await store.counts()
                if not any(counts.get(f"batches.{state}") for state in busy):
                    break
                await asyncio.sleep(0.05)
        assert self.fleet._engine.failures == 0


@asynccontextmanager
async def office(case: Case, folder: Path) -> Any:
    await asyncio.to_thread(folder.mkdir)
    provider = MockAnthropic(case.config)
    events: Counter[str] = Counter()
    async with (
        serve(provider=provider) as server,
        AsyncAnthropic(base_url=server.url, api_key="k") as client,
    ):
        made = World(provider, server.url, folder)
        fleet = FleetDispatcher(
            client,
            store=made.store,
            policy=RoutingPolicy(**POLICY),
            hooks=[lambda event: events.update([type(event).__name__])],
        )
        async with fleet:
            yield Office(made, fleet, events)


def workload(case: Case) -> list[Call]:
    if not case.pressed:
        return groups(SIZE)
    calls = []
    for number in range(4 * SIZE):
        # 9 s of it are set aside for the rescue; the rest must suffice to buy its batch on a busy machine
        budget = 14_000 if number < PRESSED else 110_000
        call = make_call(number, lane="batch", latency_budget_ms=budget)
        calls.append(Call(number, {**call.params, "betas": [f"beta-{number % 4}"]}, call.options))
    return calls


async def run_case(case: Case, folder: Path) -> None:
    async with office(case, folder) as desk:
        provider = desk.made.provider
        provider.script(case.fault, STRUCK)
        provider.script("stranger", 4 if case.strangers else 0)
        if case.lag_s:
            provider.script("list_lag", STRUCK)
        theirs = [provider.add_stranger("k", SIZE) for _ in range(2 if case.strangers else 0)]
        if case.open_stranger:
            provider.hold_batch(theirs[0].id)
        calls = workload(case)
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            asked = [group.create_task(desk.ask(call)) for call in calls]
            if case.open_stranger and case.fault in BEFORE:
                await wait_for_the_stranger(desk, theirs[0].id)
            if case.lag_s == HIDDEN:
                await asyncio.wait(asked[:PRESSED] if case.pressed else asked)
                desk.surface()
        answers = [task.result() for task in asked]
        await desk.settled(abandoned=bool(case.duplicates))
    await check(case, desk, calls, answers)


async def wait_for_the_stranger(desk: Office, stranger: str) -> None:
    """While a batch that could be ours is open, nothing is bought anew; its end shows that it is not ours."""
    while desk.events["BatchUnknown"] < STRUCK:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(GRACE_S + 0.5)
    assert not desk.events["BatchAbandoned"]
    desk.made.provider.release_batch(stranger)


async def check(case: Case, desk: Office, calls: list[Call], answers: list[tuple[str, str]]) -> None:
    made, provider = desk.made, desk.made.provider
    assert provider.faults_struck[case.fault] == STRUCK
    assert desk.events["BatchUnknown"] == STRUCK
    assert [text for _, text in answers] == [call.text for call in calls]
    assert {message for message, _ in answers} <= {charge.message_id for charge in provider.bill.charges}
    bought = made.batch_charges()
    assert bought.keys() == {fingerprint(call.body) for call in calls}
    assert bought.total() == len(calls) + case.duplicates
    assert set(bought.values()) <= ({1, 2} if case.duplicates else {1})
    ledger = await made.ledger()
    check_books(made, ledger)
    assert ledger.abandoned == (STRUCK * SIZE if case.fault in BEFORE else 0)
    assert sum(row.purchases for row in ledger.totals if row.lane is Lane.NOW) == len(made.sync_charges())
    # Every second purchase stands as such: as a duplicate, or as the rescue that a batch outran on a busy machine.
    late = [
        line
        for lines in ledger.entries.values()
        for line in lines
        if line.paid is not None and line.would_have_paid is None
    ]
    assert len(late) == len(provider.bill.charges) - len(calls)
    assert {line.kind for line in late} <= {EntryKind.DUPLICATE, EntryKind.RESCUE}
    assert ledger.purchases(EntryKind.DUPLICATE) == sum(line.kind is EntryKind.DUPLICATE for line in late)
    for lines in ledger.entries.values():
        assert sum(line.kind is EntryKind.PURCHASE and line.paid is not None for line in lines) <= 1
    if case.pressed:
        assert len(made.sync_charges()) >= STRUCK  # one in each batch whose fate was unknown
        assert ledger.purchases(EntryKind.RESCUE) >= STRUCK
    else:
        assert not made.sync_charges()


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Runs every case that is asked for, all at the same time, and keeps what went wrong with each."""
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_create.__name__ and hasattr(item, "callspec")
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(carpool.engine.batch.buy, "CREATE_IDLE_TIMEOUT_S", CREATE_IDLE_TIMEOUT_S)
        patch.setattr(carpool.engine.batch.follow, "GRACE_S", GRACE_S)
        patch.setattr(carpool.engine.batch.follow, "watch_pace", lambda age: 0.3)
        return asyncio.run(run_all(asked, tmp_path_factory.mktemp("faults")))


async def run_all(names: list[str], folder: Path) -> dict[str, str | None]:
    gate = asyncio.Semaphore(AT_ONCE)
    runs = [run_one(CASES[name], folder / f"{at}", gate) for at, name in enumerate(names)]
    return dict(zip(names, await asyncio.gather(*runs), strict=True))


async def run_one(case: Case, folder: Path, gate: asyncio.Semaphore) -> str | None:
    async with gate:
        try:
            await run_case(case, folder)
        except Exception:  # noqa: BLE001  shown by the case's own test
            return traceback.format_exc()
    return None


@pytest.mark.parametrize("name", quick_and_deep(CASES, QUICK))
def test_create(name: str, outcomes: dict[str, str | None]) -> None:
    trouble = outcomes[name]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)
