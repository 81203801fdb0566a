from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import Batch, Due, Lane, OpenCalls, PoolKey, TicketView
from carpool.core.ports import BatchReport
from carpool.planners.policy import RoutingPolicy
from carpool.planners.tracking import (
    ReconcilePlan,
    RescuePlan,
    early_start,
    reconcile,
    reconcile_delay,
    rescue_plan,
    retry_lane,
)

NOW = 1_800_000_000.0
DAY = 86_400.0
KEY = PoolKey("anthropic", "anthropic", "c1", "/v1/messages", (), "", "s", "8m")


# ---------------------------------------------------------------- unresolved creates


def test_a_create_in_doubt_is_looked_for_early_then_every_15_seconds_and_at_the_end_of_the_grace() -> None:
    ages, age = [], 0.0
    while age < 300:
        age += reconcile_delay(age, 90, None)
        ages.append(age)
    assert ages[:4] == [1, 3, 7, 15]
    assert any(90 <= one <= 92 for one in ages)
    assert max(after - before for before, after in pairwise(ages)) == 15


def test_an_explicit_interval_is_the_quickest_pace_of_doubt() -> None:
    assert reconcile_delay(0, 90, 5) == 5
    assert reconcile_delay(90, 90, 0.1) == 0.1
    assert reconcile_delay(0, 90, 300) == 300
    assert reconcile_delay(-500, 90, None) == 1  # the clock was set back


# ---------------------------------------------------------------- rescue


def a_batch(state: BatchState = BatchState.OPEN, **changes: object) -> Batch:
    batch = Batch(7, 1, KEY, "nonce00000", state, "me", 3, 300, NOW - 600, sent_at=NOW - 600, resolved_at=NOW - 599)
    return replace(batch, **changes)  # type: ignore[arg-type]


def due(ticket: int, rescue_in: float, deadline_in: float | None = None) -> Due:
    deadline = None if deadline_in is None else NOW + deadline_in
    return Due(ticket, TicketState.BOARDED, Lane.BATCH, 7, NOW + rescue_in, deadline)


def rescued(batch: Batch, calls: list[Due], left: OpenCalls, early: float = 0.0) -> RescuePlan:
    return rescue_plan(batch, calls, left, NOW, 20, early=early)


def all_due(*rescue_in: float) -> OpenCalls:
    return OpenCalls(len(rescue_in), 0, NOW + max(rescue_in))


def test_a_batch_whose_calls_all_come_due_is_cancelled_first() -> None:
    calls = [due(1, 20), due(2, 19)]
    assert rescued(a_batch(), calls, all_due(20, 19)) == RescuePlan(True, (), NOW + 19)


def test_it_is_not_cancelled_too_early() -> None:
    plan = rescued(a_batch(), [due(1, 15)], all_due(15, 25))
    assert plan == RescuePlan(False, (), NOW + 5)


def test_it_is_not_cancelled_while_somebody_has_no_hurry() -> None:
    left = OpenCalls(3, 1, NOW + 5)
    assert rescued(a_batch(), [due(1, 5), due(2, 5)], left) == RescuePlan(False, (), NOW + 5)


def test_only_some_are_resent_blind_when_their_time_comes() -> None:
    left = OpenCalls(3, 1, NOW + 500)
    assert rescued(a_batch(), [due(1, 0), due(2, 5)], left) == RescuePlan(False, (1,), NOW + 5)


def test_while_cancelling_the_calls_wait_until_their_time() -> None:
    cancelling = a_batch(BatchState.CANCELLING)
    assert rescued(cancelling, [due(1, 8)], all_due(8)) == RescuePlan(False, (), NOW + 8)
    assert rescued(cancelling, [due(1, 0)], all_due(0)) == RescuePlan(False, (1,), None)


def test_overdue_calls_are_resent_and_the_batch_still_stopped() -> None:
    assert rescued(a_batch(), [due(1, -9), due(2, -10)], all_due(-9, -10)) == RescuePlan(True, (2, 1), None)


@pytest.mark.parametrize("state", [state for state in BatchState if state not in (BatchState.ENDED, BatchState.OPEN)])
def test_a_call_whose_time_has_come_is_resent_whatever_the_batch_does(state: BatchState) -> None:
    assert rescued(a_batch(state), [due(1, 0)], all_due(0)) == RescuePlan(False, (1,), None)


def test_an_ended_batch_gets_a_little_time_to_be_collected() -> None:
    ended = a_batch(BatchState.ENDED)
    assert rescued(ended, [due(1, 0, 11)], all_due(0)) == RescuePlan(False, (), NOW + 5.5)
    assert rescued(ended, [due(1, -5.5, 5.5)], all_due(0)).resend == (1,)
    assert rescued(ended, [due(1, 0)], all_due(0)).wake == NOW + 2
    assert rescued(ended, [due(1, 0, 600)], all_due(0)).wake == NOW + 30


@given(st.floats(-100, 20), st.floats(0, 700))
def test_the_grace_ends_before_the_deadline(rescue_in: float, room: float) -> None:
    call = due(1, rescue_in, rescue_in + room)
    plan = rescued(a_batch(BatchState.ENDED), [call], all_due(rescue_in))
    assert plan.resend == (1,) or (plan.wake is not None and call.deadline is not None and plan.wake <= call.deadline)


def test_a_batch_with_nothing_open_is_left_to_end() -> None:
    assert rescued(a_batch(), [], OpenCalls(0, 0, None)) == RescuePlan(False, (), None)


def test_an_early_start_moves_everything_forward() -> None:
    assert rescued(a_batch(), [due(1, 15)], all_due(15, 50), early=15).resend == (1,)
    assert rescued(a_batch(), [], all_due(50), early=30).cancel


def test_rescues_start_early_enough_for_the_rate() -> None:
    crowd = [NOW + 1000] * 10_000
    assert early_start(crowd, NOW, None) == NOW + 1000
    assert early_start(crowd, NOW, 1000) == pytest.approx(NOW + 1000 - 9999 * 0.06)
    assert early_start([*crowd, NOW + 700], NOW, 1000) == pytest.approx(NOW + 1000 - 10_000 * 0.06)
    assert early_start([NOW + 1], NOW, 1) == NOW + 1
    assert early_start(crowd, NOW, 1) == NOW
    assert early_start([], NOW, 1000) == math.inf


@given(st.lists(st.floats(0, 500), min_size=1, max_size=50), st.integers(1, 6000))
def test_started_then_each_is_sent_by_its_time_and_not_sooner_than_needed(times: list[float], rpm: int) -> None:
    gap = 60 / rpm
    start = early_start([NOW + 10_000 + at for at in times], NOW, rpm)
    slack = [NOW + 10_000 + at - (start + gap * ahead) for ahead, at in enumerate(sorted(times))]
    assert min(slack) == pytest.approx(0, abs=1e-4)


# ---------------------------------------------------------------- reconcile


def a_report(name: str = "b1", created_in: float = -600.0, **changes: object) -> BatchReport:
    report = BatchReport(name, False, False, 3, NOW + created_in, None, None, None, False)
    return replace(report, **changes)  # type: ignore[arg-type]


UNKNOWN = a_batch(BatchState.UNKNOWN, resolved_at=NOW - 570)
ENDED = {"ended": True, "results": ("/results",)}


def reconciled(
    *listed: BatchReport,
    batch: Batch = UNKNOWN,
    known: tuple[str, ...] = (),
    suspects: dict[str, str] | None = None,
    now: float = NOW,
    offset: float = 0.0,
    grace: float = 3600.0,
) -> ReconcilePlan:
    return reconcile(batch, listed, set(known), suspects or {}, now, offset, grace=grace)


def test_a_batch_that_fits_by_count_and_time_is_a_suspect() -> None:
    plan = reconciled(a_report("fits"), a_report("other count", count=4))
    assert plan.new_suspects == ("fits",)
    assert plan.inspect == ()
    assert not plan.give_up


@pytest.mark.parametrize(
    ("created_in", "fits"), [(-661, False), (-659, True), (-580, True), (-511, True), (-509, False)]
)
def test_creation_must_fall_between_sending_and_giving_up(created_in: float, fits: bool) -> None:
    assert bool(reconciled(a_report(created_in=created_in)).new_suspects) is fits


def test_the_providers_clock_is_taken_into_account() -> None:
    assert reconciled(a_report(created_in=-600 + 7200)).new_suspects == ()
    assert reconciled(a_report(created_in=-600 + 7200), offset=7200).new_suspects == ("b1",)
    assert reconciled(a_report(), offset=7200).new_suspects == ()


def test_an_intent_whose_sending_was_never_noted_counts_from_the_intent() -> None:
    crashed = a_batch(BatchState.UNKNOWN, sent_at=None, resolved_at=None, intended_at=NOW - 100)
    assert reconciled(a_report(created_in=-150), batch=crashed).new_suspects == ("b1",)
    assert reconciled(a_report(created_in=-170), batch=crashed).new_suspects == ()
    assert reconciled(a_report(created_in=50), batch=crashed).new_suspects == ("b1",)


def test_known_batches_and_old_suspects_are_not_new() -> None:
    plan = reconciled(a_report("ours"), a_report("watched"), known=("ours",), suspects={"watched": "watched"})
    assert plan.new_suspects == ()


def test_an_ended_suspect_is_inspected_also_when_it_is_new() -> None:
    plan = reconciled(a_report("new", **ENDED), a_report("old", **ENDED), suspects={"old": "watched"})
    assert plan.new_suspects == ("new",)
    assert plan.inspect == ("new", "old")


def test_a_stranger_is_neither_inspected_nor_waited_for() -> None:
    plan = reconciled(a_report("x", **ENDED), suspects={"x": "stranger"}, grace=10)
    assert plan == ReconcilePlan((), (), True)


def test_a_suspect_that_turned_out_to_be_another_of_our_batches_is_dropped() -> None:
    plan = reconciled(a_report("x", **ENDED), known=("x",), suspects={"x": "watched"}, grace=10)
    assert plan == ReconcilePlan((), (), True)


def test_without_a_suspect_it_is_given_up_after_the_grace() -> None:
    assert reconciled(grace=571).give_up is False
    assert reconciled(grace=570) == ReconcilePlan((), (), True)


def test_a_suspect_is_watched_beyond_the_grace() -> None:
    plan = reconciled(suspects={"b1": "watched"}, grace=1)
    assert not plan.give_up


def test_a_suspect_that_never_ends_is_not_watched_for_ever() -> None:
    assert reconciled(suspects={"b1": "watched"}, now=NOW + 26 * 3600).give_up


def test_a_suspect_without_results_can_prove_nothing() -> None:
    assert reconciled(a_report(ended=True), grace=1) == ReconcilePlan(("b1",), (), True)
    assert reconciled(a_report(**ENDED, archived=True), grace=1).inspect == ()


def test_proof_that_is_one_request_away_is_fetched_first() -> None:
    plan = reconciled(a_report(**ENDED), grace=1)
    assert plan.inspect == ("b1",)
    assert not plan.give_up


def test_an_abandoned_batch_is_watched_for_a_day() -> None:
    abandoned = replace(UNKNOWN, state=BatchState.ABANDONED)
    plan = reconciled(a_report("late", **ENDED), batch=abandoned, grace=1)
    assert plan.new_suspects == plan.inspect == ("late",)
    assert not plan.give_up
    assert not reconciled(batch=abandoned, grace=1, now=NOW - 570 + DAY - 1).give_up
    assert reconciled(batch=abandoned, grace=1, now=NOW - 570 + DAY).give_up
    assert not reconciled(batch=abandoned, suspects={"b1": "watched"}, now=NOW - 570 + DAY).give_up
    assert reconciled(batch=abandoned, suspects={"b1": "watched"}, now=NOW - 570 + DAY + 3600).give_up


# ---------------------------------------------------------------- retry


def retried(attempts: int = 1, deadline_in: float | None = None, *, awaited: bool = True) -> Lane | None:
    deadline = None if deadline_in is None else NOW + deadline_in
    rescue_at = None if deadline is None else deadline - 10.0
    view = TicketView(1, TicketState.BOARDED, attempts - 1, rescue_at, deadline, awaited)
    return retry_lane(view, RoutingPolicy(max_attempts=3), NOW)


def test_attempts_are_bounded() -> None:
    assert [retried(attempts) for attempts in (1, 2, 3, 4)] == [Lane.BATCH, Lane.BATCH, None, None]


def test_time_decides_between_the_lanes() -> None:
    assert retried() is Lane.BATCH
    assert retried(deadline_in=131) is Lane.BATCH
    assert retried(deadline_in=130) is Lane.NOW
    assert retried(deadline_in=1) is Lane.NOW
    assert retried(deadline_in=0) is None


def test_a_call_that_nobody_waits_for_takes_the_cheap_lane() -> None:
    assert retried(deadline_in=30, awaited=False) is Lane.BATCH
    assert retried(deadline_in=-30, awaited=False) is Lane.BATCH


def test_what_a_batch_gives_back_that_was_cancelled_for_its_calls_is_not_batched_again() -> None:
    view = TicketView(1, TicketState.BOARDED, 0, NOW + 500, NOW + 520, awaited=True)
    assert retry_lane(view, RoutingPolicy(), NOW) is Lane.BATCH
    assert retry_lane(view, RoutingPolicy(), NOW, pressed=True) is Lane.NOW
    assert retry_lane(replace(view, awaited=False), RoutingPolicy(), NOW, pressed=True) is Lane.BATCH
