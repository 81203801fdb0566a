"""Recorded traffic becomes the trace that it was: conversations, pauses, tokens, marks and weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from carpool.core.model import CallShape, Entry, EntryKind, Lane, Prefixes, RecordedPurchase, Usage
from carpool.mock import MockConfig
from carpool.mock.core.latency import Constant
from carpool.sim.money.formats import answer_seconds
from carpool.sim.money.model import ROOT, ClientMarks, Trace
from carpool.sim.money.record_source import RecordSource, read_record
from carpool.sim.money.recorded import RecordedCall, calls_of, conversations
from carpool.sim.money.recorded_trace import RecordHabits, recorded_trace

from .mock_fleet import HAIKU, SONNET, FleetAgent, MockFleet

T0 = 1_795_000_000.0
USED = Usage(1000, 100)
SYSTEM = "system " * 2000


def bought(
    ticket: int,
    arrived: float,
    *,
    end: int = 0,
    parent: int | None = None,
    seconds: float | None = 4.0,
    usage: Usage | None = USED,
    lane: Lane = Lane.NOW,
    weight: int = 1,
    kind: EntryKind = EntryKind.PURCHASE,
    paid: int | None = 10,
    credential: str = "c",
) -> RecordedPurchase:
    prefixes = Prefixes(7, 2000, parent, 3000, end or ticket * 1000, 4000)
    call = CallShape(ticket, arrived, "curl", False, False, arrived + 60, 100, 4100, prefixes, seconds, weight)
    purchase = -1 if lane is Lane.NOW else 5
    entry = Entry(ticket, purchase, arrived, lane, kind, "anthropic", credential, SONNET, usage, paid)
    return RecordedPurchase(call, entry, None if seconds is None else arrived + seconds)


def traced(*purchases: RecordedPurchase, as_recorded: bool = False) -> Trace:
    calls = calls_of([list(purchases)])
    return recorded_trace("t", "anthropic", conversations(calls), RecordHabits(calls), as_recorded=as_recorded)


def chains(calls: list[RecordedCall]) -> list[list[int]]:
    return [[call.ticket for call in conversation] for conversation in conversations(calls)]


# ---------------------------------------------------------------- which calls belong together


def test_a_turn_continues_the_prompt_that_it_begins_with() -> None:
    calls = calls_of([[bought(1, T0, end=11), bought(2, T0 + 10, end=12, parent=11), bought(3, T0 + 30, parent=12)]])
    assert chains(calls) == [[1, 2, 3]]


def test_a_fork_runs_beside_the_conversation_that_it_left() -> None:
    first = bought(1, T0, end=11)
    calls = calls_of([[first, bought(2, T0 + 10, parent=11), bought(3, T0 + 20, parent=11)]])
    assert chains(calls) == [[1, 2], [3]]


def test_nobody_waits_for_an_answer_that_came_later() -> None:
    assert chains(calls_of([[bought(1, T0, end=11, seconds=20.0), bought(2, T0 + 10, parent=11)]])) == [[1], [2]]


def test_equal_prompts_of_two_credentials_have_nothing_in_common() -> None:
    calls = calls_of([[bought(1, T0, end=11), bought(2, T0 + 10, parent=11, credential="d")]])
    assert chains(calls) == [[1], [2]]


def test_what_nobody_answered_is_left_out() -> None:
    assert calls_of([[bought(1, T0, usage=None, paid=0)], []]) == []


def test_all_purchases_of_a_call_are_paid_for_and_one_of_them_answered() -> None:
    batch = bought(1, T0, lane=Lane.BATCH, kind=EntryKind.DUPLICATE, usage=Usage(1, 1))
    rescue = bought(1, T0, kind=EntryKind.RESCUE, usage=Usage(1000, 100))
    [call] = calls_of([[rescue, batch]])
    assert (call.paid, call.usage, call.lane) == (20, Usage(1000, 100), Lane.NOW)
    unknown = structs.replace(batch, entry=structs.replace(batch.entry, paid=None))
    [call] = calls_of([[rescue, unknown]])
    assert call.paid is None


# ---------------------------------------------------------------- what becomes of them


def test_pauses_count_from_the_answer() -> None:
    trace = traced(bought(1, T0 + 5, end=11), bought(2, T0 + 19, parent=11), bought(3, T0 + 7))
    assert [(session.starts, [turn.think_s for turn in session.turns]) for session in trace.sessions] == [
        (0.0, [0.0, 10.0]),
        (2.0, [0.0]),
    ]
    assert {turn.sync_s for session in trace.sessions for turn in session.turns} == {4.0}


def test_tokens_come_from_the_ledger_and_prefixes_take_their_share() -> None:
    trace = traced(bought(1, T0, end=11), bought(2, T0 + 10, parent=11, usage=Usage(100, 5, 1000, 300)))
    system, first, second = trace.nodes
    assert (system.parent, system.tokens) == (ROOT, 500)  # half of the bytes of the first prompt
    assert (first.parent, first.tokens) == (0, 1000)
    assert (second.parent, second.tokens) == (1, 1400)
    assert trace.sessions[0].system == 0


def test_a_turn_whose_conversation_is_not_recorded() -> None:
    trace = traced(bought(2, T0, parent=11))
    assert [node.tokens for node in trace.nodes] == [500, 750, 1000]


def test_how_long_answers_take_is_learned_by_their_output() -> None:
    known = [bought(n, T0 + n, seconds=1.0 + 0.01 * 50 * n, usage=Usage(10, 50 * n)) for n in range(1, 12)]
    batched = bought(50, T0 + 50, seconds=None, lane=Lane.BATCH, usage=Usage(10, 1000))
    assert traced(*known, batched).sessions[-1].turns[0].sync_s == pytest.approx(11.0)
    few = traced(*known[:5], batched)
    assert few.sessions[-1].turns[0].sync_s == answer_seconds(1000)


def test_budgets_and_lanes_are_kept_where_that_is_asked() -> None:
    patient = bought(1, T0, lane=Lane.BATCH, seconds=None)
    patient = structs.replace(patient, call=structs.replace(patient.call, deadline=None))
    turns = [session.turns[0] for session in traced(patient, bought(2, T0 + 1), as_recorded=True).sessions]
    assert [(turn.budget_s, turn.lane) for turn in turns] == [(None, Lane.BATCH), (60.0, None)]
    turns = [session.turns[0] for session in traced(patient, bought(2, T0 + 1)).sessions]
    assert {(turn.budget_s, turn.lane) for turn in turns} == {(None, None)}


@pytest.mark.parametrize(
    ("usage", "marks"),
    [
        (Usage(1000, 1), ClientMarks()),
        (Usage(0, 1, 0, 1000), ClientMarks("5m", "5m")),
        (Usage(0, 1, 0, 0, 1000), ClientMarks("1h", "1h")),
        (Usage(0, 1, 0, 500, 500), ClientMarks("5m", "1h")),
        (Usage(0, 1, 1000), ClientMarks("5m", "5m")),
    ],
)
def test_marks_are_seen_by_what_they_did(usage: Usage, marks: ClientMarks) -> None:
    assert traced(bought(1, T0, usage=usage)).sessions[0].marks == marks


def test_a_system_prompt_that_nobody_read_is_not_marked() -> None:
    wrote = Usage(0, 1, 0, 1000)
    trace = traced(bought(1, T0, usage=wrote), bought(2, T0 + 20, usage=wrote))
    assert {session.marks for session in trace.sessions} == {ClientMarks("5m")}
    trace = traced(bought(1, T0, usage=wrote), bought(2, T0 + 20, usage=Usage(0, 1, 500, 500)))
    assert {session.marks for session in trace.sessions} == {ClientMarks("5m", "5m")}


# ---------------------------------------------------------------- from a store


def fleet(path: Path) -> MockFleet:
    agents = [
        FleetAgent(f"agent {number}", 20.0 * number, [0.0, 5.0, 400.0, 12.0], SYSTEM, tags={"team": "a"})
        for number in range(3)
    ]
    alone = FleetAgent("alone", 7.0, [0.0], "short", ttl=None, model=HAIKU, client="curl/8.0")
    return MockFleet(path, [*agents, alone], MockConfig(sync_latency=Constant(3.0)), None).go()


def source(path: Path, **more: object) -> RecordSource:
    return RecordSource(str(path), 0.0, 1e12, (("anthropic", "anthropic"),), **{"provider": "anthropic", **more})  # type: ignore[arg-type]


def test_a_fleet_comes_back_as_it_was(tmp_path: Path) -> None:
    run = fleet(tmp_path / "fleet.db")
    record = read_record(str(tmp_path / "fleet.db"), 0.0)
    assert sum(call.paid or 0 for call in record.calls) == run.bill
    trace = source(tmp_path / "fleet.db").read(0)
    assert [(session.client, session.model, session.tags) for session in trace.sessions] == [
        ("agent", SONNET, {"team": "a"}),
        ("curl", HAIKU, {}),
        *[("agent", SONNET, {"team": "a"})] * 2,
    ]
    paused = [turn.think_s for turn in trace.sessions[0].turns]
    assert paused == pytest.approx([0.0, 5.0, 400.0, 12.0], abs=0.01)
    assert [session.starts for session in trace.sessions] == pytest.approx([0.0, 7.0, 20.0, 40.0], abs=0.01)
    assert [session.marks for session in trace.sessions][:2] == [ClientMarks("5m", "5m"), ClientMarks()]
    totals = sorted(one.usage.total_input for one in run.mock.bill.charges)
    assert sorted(trace.nodes[turn.node].tokens for session in trace.sessions for turn in session.turns) == totals


def test_samples_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fleet.db"
    fleet(path)
    assert len(source(path, sessions=2).read(1).sessions) == 2
    assert source(path, sessions=2).read(1) == source(path, sessions=2).read(1)
    monkeypatch.setattr("carpool.engine.recording.Sample.weight", lambda *_: 3)
    path = tmp_path / "weighty.db"
    fleet(path)
    trace = source(path).read(0)
    assert len(trace.sessions) == 4 * 3
    assert len({session.turns[-1].node for session in trace.sessions}) == 12  # each said something else
    assert len({session.system for session in trace.sessions}) == 2
