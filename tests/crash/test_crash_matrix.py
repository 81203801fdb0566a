"""A fleet is killed at every named point on the way of a call. Started again, it answers all and buys nothing twice."""

from __future__ import annotations

import ast
import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import carpool.engine
from carpool.core.model import EntryKind
from carpool.mock import expected_openai_text, openai_fingerprint
from tests.support.crash import (
    LIST_LAG_S,
    Call,
    Child,
    Children,
    Ledger,
    World,
    check_all_done,
    check_answers,
    check_books,
    check_bought_once,
    children,
    groups,
    make_call,
    world,
)
from tests.support.deep import quick_and_deep

AT_ONCE = 10  # scenarios that run side by side; they mostly wait
BATCHES = 4  # that the calls of `groups` make
BIG = 1001  # results that are settled in three chunks


@dataclass(frozen=True)
class Stop:
    """Where the process is killed: at the `at`th time that it comes to the point. From the `first` time on, whoever
    comes there waits; with `first == at`, the earlier ones have gone on."""

    point: str
    at: int
    first: int
    unfinished: int = 0  # batches that are not finished at this moment, at least
    drain: bool = False  # whoever was answered before has heard it
    alone: bool = False  # of the batches, only one has ended

    def job(self, by_key: bool) -> dict[str, Any]:
        return {"point": self.point, "at": self.at, "from": self.first, "drain": self.drain and not by_key}


@dataclass(frozen=True)
class Scenario:
    name: str
    point: str
    run: Callable[[World, Any], Awaitable[None]]
    detail: Any = None


# ---------------------------------------------------------------- points on the way through a batch

ON_THE_WAY = (
    Stop("admitted", at=1, first=1),
    Stop("admitted", at=12, first=12),
    Stop("admitted", at=13, first=13, unfinished=BATCHES),  # a late one, while four batches are open
    Stop("admitted", at=16, first=13, unfinished=BATCHES),
    Stop("intended", at=1, first=1),
    Stop("intended", at=4, first=1, unfinished=BATCHES),
    Stop("intended", at=4, first=4, unfinished=BATCHES),
    Stop("checked", at=1, first=1),
    Stop("checked", at=4, first=1, unfinished=BATCHES),
    Stop("checked", at=4, first=4, unfinished=BATCHES),
    Stop("created", at=1, first=1),
    Stop("created", at=4, first=1, unfinished=BATCHES),
    Stop("created", at=4, first=4, unfinished=BATCHES),
    Stop("bought", at=1, first=1),
    Stop("bought", at=4, first=1, unfinished=BATCHES),
    Stop("bought", at=4, first=4, unfinished=BATCHES),
    Stop("polled", at=1, first=1),
    Stop("polled", at=5, first=5, unfinished=BATCHES),
    Stop("ended", at=1, first=1, unfinished=BATCHES),
    Stop("ended", at=4, first=4),
    Stop("settled", at=1, first=1, unfinished=BATCHES),
    Stop("settled", at=4, first=1, unfinished=BATCHES, drain=True),
    Stop("settled", at=4, first=4, drain=True),
    Stop("collected", at=1, first=1, unfinished=3, drain=True, alone=True),
    Stop("collected", at=4, first=1, drain=True),
    Stop("collected", at=4, first=4, drain=True),
)
AFTER_THE_CREATE = ("created", "bought")
AFTER_THE_END = ("ended", "settled", "collected")


def workload(stop: Stop) -> list[Call]:
    late = [make_call(100 + number, number, late=True) for number in range(4)] if stop.at > 12 else []
    return groups() + late


async def through_a_batch(made: World, detail: tuple[Stop, bool]) -> None:
    stop, by_key = detail
    calls = [call.keyed() if by_key else call for call in workload(stop)]
    first = made.start(calls, stop=stop.job(by_key), late_count=BATCHES)
    if stop.point in AFTER_THE_END:
        await first.reaches("bought", BATCHES)
        if stop.alone:
            made.provider.end_batch(made.own_batches[0].id)
        else:
            made.flow()
    await killed_at(made, first, stop)
    ledger = await come_back(made, calls, by_key, first)
    if (stop.point in AFTER_THE_CREATE and stop.first < stop.at) or stop.point in AFTER_THE_END:
        assert not ledger.abandoned


async def killed_at(made: World, child: Child, stop: Stop) -> None:
    await child.reaches(stop.point, stop.at)
    await child.kill()
    counts = await made.counts()
    left = ("submitting", "unknown", "open", "ended")
    assert sum(counts.get(f"batches.{state}", 0) for state in left) >= stop.unfinished


async def come_back(made: World, calls: list[Call], by_key: bool, *lives: Child) -> Ledger:
    """Started again, it submits the same calls: all of them by key; without one, those that nobody has an answer to."""
    made.flow()
    known = {number for life in lives for number in life.answers}
    again = [call for call in calls if by_key or call.number not in known]
    last = made.start(again, late_count=0)
    last_calls = {call.number for call in again}
    await last.finish()
    assert last.answers.keys() == last_calls
    check_answers(calls, *lives, last)
    check_bought_once(made, calls)
    ledger = await made.ledger()
    check_books(made, ledger)
    assert ledger.purchases(EntryKind.PURCHASE) == len(calls)
    return ledger


async def in_a_large_batch(made: World, detail: tuple[Stop, bool]) -> None:
    stop, by_key = detail
    calls = [make_call(number) for number in range(BIG)]
    calls += [make_call(BIG + number, 1 + number % 3) for number in range(6)]
    calls = [call.keyed() if by_key else call for call in calls]
    # Full, the large batch goes at once, the small ones after the window. It ends first and alone, so that its chunks
    # are the ones that are counted.
    policy = {"batch_window_ms": 8000, "batch_max_size": BIG}
    first = made.start(calls, stop=stop.job(by_key), policy=policy)
    await first.reaches("bought", BATCHES)
    large = next(batch for batch in made.provider.batches if batch.size == BIG)
    made.provider.end_batch(large.id)
    await killed_at(made, first, stop)
    await come_back(made, calls, by_key, first)


# ---------------------------------------------------------------- points of a purchase on `now`

RESCUED = 3
RESCUES = (
    Stop("attempted", at=1, first=1, unfinished=RESCUED),
    Stop("attempted", at=3, first=1, unfinished=RESCUED),
    Stop("resent", at=1, first=1, unfinished=RESCUED),
    Stop("resent", at=3, first=1, unfinished=RESCUED),
    Stop("resettled", at=1, first=1, unfinished=RESCUED),
    Stop("resettled", at=3, first=3, unfinished=RESCUED),
)


def pressing(number: int) -> bool:
    return number < RESCUED


async def in_a_rescue(made: World, detail: tuple[Stop, bool]) -> None:
    """Three batches are stuck, each with one call that can't wait; the crash comes while those are bought on `now`."""
    stop, by_key = detail
    calls = []
    for number in range(3 * RESCUED):
        budget = 11_000 if pressing(number) else 110_000  # 9 s of it are set aside for the rescue
        call = make_call(number, lane="batch", latency_budget_ms=budget)
        calls.append(Call(number, {**call.params, "betas": [f"beta-{number % RESCUED}"]}, call.options))
    calls = [call.keyed() if by_key else call for call in calls]
    first = made.start(calls, stop=stop.job(by_key))
    await killed_at(made, first, stop)
    assert not made.provider.canceled
    known = set(first.answers)
    again = [call for call in calls if by_key or call.number not in known]
    last = made.start(again)
    wanted = {call.number for call in again if pressing(call.number)}
    await last.until("its rescues", lambda: wanted <= last.answers.keys())
    assert len(made.own_batches) == RESCUED  # rescued, although no batch has ended
    made.flow()
    await last.finish()
    check_answers(calls, first, last)
    check_bought_once(made, calls)
    await check_rescues(made, stop, first, last)


async def check_rescues(made: World, stop: Stop, *lives: Child) -> None:
    """Who was rescued has its rescue in the ledger, what the crash cut short stands there as unknown, the batch's own
    answer as a duplicate; and the bill has nothing else."""
    ledger = await made.ledger()
    check_all_done(made, ledger)
    told = {message for life in lives for message, _ in life.answers.values()}
    unheard = [charge for charge in made.sync_charges() if charge.message_id not in told]
    assert len(unheard) <= ledger.unknown
    assert made.provider.bill.total() - ledger.paid == sum(charge.nano_usd for charge in unheard)
    assert len(made.sync_charges()) - len(unheard) == RESCUED
    assert ledger.purchases(EntryKind.DUPLICATE) == RESCUED
    assert ledger.purchases(EntryKind.RESCUE) == RESCUED + ledger.unknown
    attempts = [entry for lines in ledger.entries.values() for entry in lines if entry.purchase == -1]
    assert len(attempts) == RESCUED
    assert sum(entry.paid is None for entry in attempts) == ledger.unknown
    if stop.first < stop.at:  # all of them were stopped there
        assert (ledger.unknown, len(unheard)) == {"attempted": (3, 0), "resent": (3, 3)}[stop.point]
    elif stop.point == "resettled" and stop.at == RESCUED:
        assert ledger.unknown == 0


ON_NOW = (
    Stop("admitted", at=13, first=13, unfinished=BATCHES),
    Stop("attempted", at=1, first=1, unfinished=BATCHES),
    Stop("resent", at=1, first=1, unfinished=BATCHES),
    Stop("resettled", at=1, first=1, unfinished=BATCHES),
)
ON_NOW_EXPECTED = {"admitted": (0, 1), "attempted": (1, 1), "resent": (1, 2), "resettled": (0, 1)}


async def under_a_key_on_now(made: World, stop: Stop) -> None:
    """A call on `now` with a key, while four batches are open."""
    calls = [call.keyed() for call in groups()]
    urgent = make_call(50, late=True, force_sync=True).keyed()
    first = made.start([*calls, urgent], stop=stop.job(by_key=True), late_count=BATCHES)
    await killed_at(made, first, stop)
    made.flow()
    last = made.start([*calls, urgent], late_count=0)
    await last.finish()
    assert len(last.answers) == len(calls) + 1
    check_answers([*calls, urgent], first, last)
    check_bought_once(made, calls)
    ledger = await made.ledger()
    check_all_done(made, ledger)
    unheard = [charge for charge in made.sync_charges() if charge.message_id != last.answers[urgent.number][0]]
    assert (ledger.unknown, len(made.sync_charges())) == ON_NOW_EXPECTED[stop.point]
    assert made.provider.bill.total() - ledger.paid == sum(charge.nano_usd for charge in unheard)


# ---------------------------------------------------------------- creates that nobody answered, and other bad luck


async def while_unknown(made: World, detail: tuple[str, bool]) -> None:
    """The creates were cut, and right after that the process dies."""
    fault, by_key = detail
    calls = [call.keyed() if by_key else call for call in groups()]
    made.provider.script(fault, BATCHES)
    made.provider.script("list_lag", BATCHES)
    made.grace_s = 4 * LIST_LAG_S
    strange = [made.provider.add_stranger("k", 3) for _ in range(2)]
    # None is cut before all are made: as long as one is unknown, no other has its size.
    together = {"point": "intended", "count": BATCHES}
    first = made.start(calls, stop=Stop("BatchUnknown", at=BATCHES, first=BATCHES).job(by_key), together=together)
    await killed_at(made, first, Stop("BatchUnknown", at=BATCHES, first=BATCHES, unfinished=BATCHES))
    assert made.provider.faults_struck[fault] == BATCHES
    ledger = await come_back(made, calls, by_key, first)
    if "accepted" in fault:
        assert len(made.own_batches) == BATCHES
    assert ledger.abandoned == (0 if "accepted" in fault else len(calls))
    assert len(made.provider.strangers_bill.charges) == sum(batch.size for batch in strange)


async def while_the_create_hangs(made: World, by_key: bool) -> None:
    """The provider has accepted and says nothing; there the process dies."""
    calls = [call.keyed() if by_key else call for call in groups()]
    made.provider.script("create_accepted_hang", BATCHES)
    first = made.start(calls)
    await first.reaches("checked", BATCHES)
    await made.accepted(BATCHES)
    await first.kill()
    await come_back(made, calls, by_key, first)
    assert len(made.own_batches) == BATCHES


async def while_queued(made: World, by_key: bool) -> None:
    """Nothing was flushed yet: the window is long."""
    calls = [call.keyed() if by_key else call for call in groups()]
    stop = Stop("admitted", at=12, first=12)
    first = made.start(calls, stop=stop.job(by_key), policy={"batch_window_ms": 60_000})
    await killed_at(made, first, stop)
    assert not made.own_batches
    assert (await made.counts())["tickets.queued"] == 12
    await come_back(made, calls, by_key, first)


async def twice(made: World, detail: tuple[Stop, Stop, bool]) -> None:
    """The second life is killed as well, in the middle of making good."""
    one, two, by_key = detail
    calls = [call.keyed() if by_key else call for call in groups()]
    first = made.start(calls, stop=one.job(by_key))
    await killed_at(made, first, one)
    if two.point in AFTER_THE_END:
        made.flow()
    known = set(first.answers)
    second = made.start([call for call in calls if by_key or call.number not in known], stop=two.job(by_key))
    await killed_at(made, second, two)
    await come_back(made, calls, by_key, first, second)


TWICE = (
    (Stop("created", at=4, first=1), Stop("polled", at=1, first=1, unfinished=BATCHES)),
    (Stop("intended", at=4, first=1), Stop("created", at=4, first=1, unfinished=BATCHES)),
    (Stop("created", at=4, first=4), Stop("settled", at=1, first=1, unfinished=BATCHES)),
)


async def during_an_upload(made: World, detail: tuple[Stop, bool]) -> None:
    """OpenAI's lines go first, in a file; until the create goes out nothing can have been bought, and nothing is in
    doubt."""
    stop, by_key = detail
    calls = [talk(number) for number in range(12)]
    calls = [call.keyed() if by_key else call for call in calls]
    first = made.start(calls, stop=stop.job(by_key), openai=True)
    await killed_at(made, first, stop)
    assert not made.own_batches
    made.flow()
    last = made.start(calls, openai=True)
    await last.finish()
    assert {call.number: last.answers[call.number][1] for call in calls} == {
        call.number: expected_openai_text(call.params) for call in calls
    }
    assert made.batch_charges() == Counter(openai_fingerprint(call.params) for call in calls)
    ledger = await made.ledger()
    check_books(made, ledger)
    assert (ledger.unknown, ledger.purchases(EntryKind.PURCHASE)) == (0, len(calls))


def talk(number: int) -> Call:
    model = ("gpt-4o-mini", "gpt-4.1", "gpt-4.1-mini", "gpt-5.2")[number % BATCHES]
    return Call(number, {"model": model, "messages": [{"role": "user", "content": f"{number}: how are you?"}]})


UPLOADS = (
    Stop("uploaded", at=1, first=1, unfinished=1),
    Stop("uploaded", at=4, first=1, unfinished=BATCHES),
    Stop("intended", at=4, first=1, unfinished=BATCHES),
)


# ---------------------------------------------------------------- the plan

WAYS = {"by key": True, "by adoption": False}
FAULTS = ("create_accepted_cut", "create_accepted_500", "create_cut")


def name_of(stop: Stop) -> str:
    return f"{stop.point} {stop.at}{' all' if stop.first < stop.at else ''}"


def plan() -> Iterator[Scenario]:
    for way, by_key in WAYS.items():
        for stop in RESCUES:
            yield Scenario(f"in a rescue, {name_of(stop)}, {way}", stop.point, in_a_rescue, (stop, by_key))
        for stop in ON_THE_WAY:
            yield Scenario(f"{name_of(stop)}, {way}", stop.point, through_a_batch, (stop, by_key))
        for stop in UPLOADS:
            yield Scenario(f"upload, {name_of(stop)}, {way}", stop.point, during_an_upload, (stop, by_key))
        for fault in FAULTS:
            yield Scenario(f"unknown after {fault}, {way}", "", while_unknown, (fault, by_key))
        yield Scenario(f"while the create hangs, {way}", "", while_the_create_hangs, by_key)
        yield Scenario(f"while queued, {way}", "", while_queued, by_key)
        for one, two in TWICE:
            name = f"twice, {name_of(one)} and {name_of(two)}, {way}"
            yield Scenario(name, "", twice, (one, two, by_key))
    for stop in ON_NOW:
        yield Scenario(f"on now, {name_of(stop)}, by key", stop.point, under_a_key_on_now, stop)


def large() -> Iterator[Scenario]:
    for way, by_key in WAYS.items():
        at = 2 if by_key else 3
        stop = Stop("settled", at=at, first=at, unfinished=BATCHES, drain=True)
        yield Scenario(f"in a large batch, {name_of(stop)}, {way}", "settled", in_a_large_batch, (stop, by_key))


def one_of_each(kind: Callable[[Scenario], Hashable]) -> list[Scenario]:
    """One scenario of each kind, in turn the first, by key, and the last, mostly by adoption."""
    kinds: dict[Hashable, list[Scenario]] = {}
    for scenario in plan():
        kinds.setdefault(kind(scenario), []).append(scenario)
    return [scenarios[-(at % 2)] for at, scenarios in enumerate(kinds.values())]


SCENARIOS = {scenario.name: scenario for scenario in (*plan(), *large())}
QUICK = {scenario.name for scenario in one_of_each(lambda scenario: scenario.point or scenario.run)}


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Runs every scenario that is asked for, many at a time, and keeps what went wrong with each."""
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if getattr(item, "originalname", "") == test_killed.__name__ and hasattr(item, "callspec")
    ]
    return asyncio.run(run_all(asked, tmp_path_factory.mktemp("crash")))


async def run_all(names: list[str], folder: Path) -> dict[str, str | None]:
    return dict(zip(names, await run_each([SCENARIOS[name] for name in names], folder), strict=True))


async def run_each(
    scenarios: Sequence[Scenario],
    folder: Path,
    new_store: Callable[[], str | None] = lambda: None,
    at_once: int = AT_ONCE,
) -> list[str | None]:
    gate = asyncio.Semaphore(at_once)
    async with children(folder / "children.log") as family:
        runs = [run_one(one, folder / f"{at}", family, gate, new_store()) for at, one in enumerate(scenarios)]
        return await asyncio.gather(*runs)


async def run_one(
    scenario: Scenario, folder: Path, family: Children, gate: asyncio.Semaphore, store: str | None
) -> str | None:
    async with gate:
        try:
            async with world(folder, family, store) as made:
                await scenario.run(made, scenario.detail)
        except Exception:  # noqa: BLE001  shown by the scenario's own test
            return f"{traceback.format_exc()}\n(the children's errors are in {folder.parent / 'children.log'})"
    return None


@pytest.mark.parametrize("name", quick_and_deep(SCENARIOS, QUICK))
def test_killed(name: str, outcomes: dict[str, str | None]) -> None:
    trouble = outcomes[name]
    if trouble is not None:
        pytest.fail(trouble, pytrace=False)


def named_points() -> set[str]:
    """The argument of every `reached(...)` in the engine; it must be spelled out."""
    found = set()
    for file in Path(carpool.engine.__file__).parent.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reached":
                [point] = node.args
                assert isinstance(point, ast.Constant), f"{file.name}:{node.lineno} hides the name of its point"
                found.add(point.value)
    return found


def test_every_named_point_is_in_the_matrix() -> None:
    assert named_points() == {scenario.point for scenario in SCENARIOS.values()} - {""}
    assert named_points() == {SCENARIOS[name].point for name in QUICK} - {""}
