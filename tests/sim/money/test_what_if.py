"""Which calls a question concerns, what is left out, and how the answers are summed up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carpool.core.errors import CarpoolError, ConfigError
from carpool.core.model import Lane, Usage
from carpool.sim.money.recorded import Conversation, RecordedCall, calls_of, conversations
from carpool.sim.money.recorded_trace import RecordHabits
from carpool.sim.money.what_if import ReplayedAccount, WhatIf, accounts, parse_what_if, replays, sampled
from carpool.sim.money.what_if_report import NONE, answer, group_of, replayed_share
from carpool.sim.money.worlds import WORLDS

from .test_recorded import T0, bought

QUICK = WORLDS["quick"]
NAMES = {"anthropic": "anthropic", "openai": "openai", "local": "openai"}


def call(ticket: int, at: float = 0.0, **changes: object) -> RecordedCall:
    [one] = calls_of([[bought(ticket, T0 + at, usage=Usage(100_000, 1000), paid=315_000_000)]])
    return replace(one, budget_s=None, **changes)  # type: ignore[arg-type]


def account(*found: Conversation, dialect: str = "anthropic") -> tuple[ReplayedAccount, RecordHabits]:
    return ReplayedAccount(dialect, found, QUICK), RecordHabits([one for own in found for one in own])


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("budget=20m", (1200.0, False)),
        ("caching=plan", (None, True)),
        ("budget=1.5h, caching=plan", (5400.0, True)),
    ],
)
def test_questions(text: str, asked: tuple[float | None, bool]) -> None:
    found = parse_what_if(text)
    assert (found.budget_s, found.plans_cache) == asked


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not known. Write budget=20m"),
        ("lane=batch", "is not known"),
        ("caching=off", "is not known"),
        ("budget=1m,budget=2m", "is not known"),
        ("budget=soon", "'soon' is not a budget"),
    ],
)
def test_what_is_no_question(text: str, why: str) -> None:
    with pytest.raises(CarpoolError, match=why):
        parse_what_if(text)


# ---------------------------------------------------------------- what is replayed


def test_what_can_not_be_priced_is_left_out() -> None:
    calls = [
        call(1),
        call(2, model="nobody-knows", weight=3),
        call(3, provider="elsewhere"),
        call(4, paid=None),
        call(5, provider="local", model="gpt-5"),
    ]
    found, left_out = accounts(conversations(calls), NAMES, lambda _: QUICK)
    assert [(one.dialect, len(one.conversations)) for one in found] == [("anthropic", 1), ("openai", 1)]
    assert dict(left_out) == {
        "nobody knows what nobody-knows costs": 3,
        "the config does not name their provider elsewhere": 1,
        "what was paid for them is unknown": 1,
    }


def test_a_budget_moves_calls_into_batches_at_half_the_price() -> None:
    [one] = replays(*account([call(1)]), WhatIf("", 3600.0), 0)
    assert (one.lane, one.cost) == (Lane.BATCH, one.call.paid // 2)  # type: ignore[operator]
    assert one.wait_s > 5


@pytest.mark.parametrize("changes", [{"lane": Lane.FLEX}, {"model": "claude-2.1"}])
def test_calls_that_can_not_move_stay_as_they_were(changes: dict[str, object]) -> None:
    [one] = replays(*account([call(1, **changes)]), WhatIf("", 3600.0), 0)
    assert (one.lane, one.cost, one.wait_s) == (one.call.lane, one.call.paid, 0.0)


def talk(number: int, pause: float, turns: int = 6) -> Conversation:
    """A conversation on `now`, marked for 5 minutes, that pauses for so long."""
    purchases, at = [], T0 + 7000 * number
    for turn in range(turns):
        end, tokens = 100 * number + turn + 1, 50_000 + 1000 * turn
        warm = turn and pause < 290
        usage = Usage(0, 100, tokens - 1000, 1000) if warm else Usage(0, 100, 0, tokens)
        purchases.append(bought(end, at, end=end, parent=end - 1 if turn else None, usage=usage, paid=1000))
        at += 4.0 + pause
    [found] = conversations(calls_of([purchases]))
    return [replace(one, budget_s=None) for one in found]


@pytest.mark.parametrize(("pause", "cheaper"), [(20.0, False), (1500.0, True)])
def test_longer_lives_are_planned_where_conversations_pause(pause: float, cheaper: bool) -> None:
    found, habits = account(*(talk(number, pause) for number in range(1, 5)))
    planned = sum(one.cost for one in replays(found, habits, WhatIf("", None, plans_cache=True), 0))
    kept = sum(one.cost for one in replays(found, habits, WhatIf("", None), 0))
    assert (planned < 0.5 * kept) is cheaper
    assert (planned == kept) is not cheaper


def test_nobody_learns_from_a_conversation_of_its_own() -> None:
    found, habits = account(talk(1, 1500.0))
    planned = [one.cost for one in replays(found, habits, WhatIf("", None, plans_cache=True), 0)]
    assert planned == [one.cost for one in replays(found, habits, WhatIf("", None), 0)]


# ---------------------------------------------------------------- sums


def test_groups() -> None:
    one = call(1, tags={"team": "a", "run": "7"}, client="curl")
    names = {by: group(one) for by in ("team", "model", "client", "tag", "tag.run") if (group := group_of(by))}
    assert names == {"team": "a", "model": one.model, "client": "curl", "tag": "run=7, team=a", "tag.run": "7"}
    team = group_of("team")
    assert team is not None
    assert team(call(2)) == NONE
    assert group_of(None) is None
    with pytest.raises(ConfigError, match="--by 'colour' is not known"):
        group_of("colour")


def test_a_sampled_call_stands_for_several() -> None:
    found, habits = account([call(1, weight=10)], [call(2, 1.0, tags={"team": "b"})])
    said = answer([found], habits, WhatIf("", 3600.0), group_of("team"))
    assert [(group.name, group.calls, group.saved_share) for group in said.groups] == [(NONE, 10, 0.5), ("b", 1, 0.5)]
    assert (said.total.calls, said.total.paid, said.total.by_batch) == (11, 11 * 315_000_000, 11)
    assert replayed_share([found], habits) == pytest.approx(1.0)


def test_much_is_thinned_and_still_adds_up() -> None:
    calls = [[call(number, float(number))] for number in range(3000)]
    assert sampled(calls, 3000) == (calls, 1)
    kept, one_in = sampled(calls, 500)
    assert one_in == 6
    assert sum(one.weight for own in kept for one in own) == pytest.approx(3000, rel=0.15)
    assert sampled(calls, 500) == (kept, one_in)
