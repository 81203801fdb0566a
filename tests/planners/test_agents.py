"""What is learned of agents: gaps, turns to come, growth."""

from __future__ import annotations

import random

import pytest

from carpool.planners.agents import EDGES_S, GONE_S, HORIZONS_S, LONGEST_PAUSE_S, Agents

KIND = "claude-code"
LATER = 20_000.0  # seconds: every conversation is over


def always(_seconds: float) -> float:
    return 1.0


def outlook_after(agents: Agents, conversation: object, now: float, kind: str = KIND):  # type: ignore[no-untyped-def]
    return agents.outlook(conversation, kind, "class", always, now)


def talk(agents: Agents, gaps_of: dict[object, list[float]], *, starts: float = 0.0, growth: int = 500) -> None:
    """Conversations whose turns come after these gaps, and are answered after 5 s each. One begins every 3 s."""
    events = []
    for number, (name, gaps) in enumerate(gaps_of.items()):
        now = starts + 3 * number
        for turn, gap in enumerate([0.0, *gaps]):
            now += gap
            events.append((now, name, 10_000 + turn * growth, False))
            now += 5
            events.append((now, name, 0, True))
    for now, name, tokens, answered in sorted(events, key=lambda event: event[0]):
        if answered:
            agents.answered(name, 300, now)
        else:
            agents.asked(name, KIND, tokens, now)


def test_without_observations_a_prior_stands_in() -> None:
    found = outlook_after(Agents(), "new", 0.0)
    assert 1 < found.turns < 60
    assert 0.6 < found.back(300.0) < found.back(3600.0) < 1


def test_gaps_are_learned_as_they_are() -> None:
    seed = random.randrange(10**6)
    rng, agents = random.Random(seed), Agents()
    talk(agents, {name: [rng.choice([20.0, 20.0, 20.0, 900.0]) for _ in range(10)] for name in range(300)})
    agents.settle(LATER)
    found = outlook_after(agents, 0, LATER)
    comes = found.back(3000.0)
    assert found.back(200.0) / comes == pytest.approx(0.75, abs=0.04), f"seed {seed}"
    assert comes == pytest.approx(10 / 11, abs=0.02), f"seed {seed}"


def test_the_silent_are_not_taken_to_return() -> None:
    """Half of the conversations go on at once, the others never: with a look at the returned alone it would be 1."""
    agents = Agents()
    talk(agents, {name: [10.0] if name % 2 else [] for name in range(200)})
    agents.settle(LATER)
    assert agents.kind(KIND).back(3600.0, LATER) == pytest.approx(1 / 3, abs=0.05)  # 100 of 300 turns


def test_the_number_of_turns_is_learned_by_turn() -> None:
    agents = Agents()
    talk(agents, {name: [10.0] * (0 if name % 2 else 20) for name in range(200)})
    now = LATER
    agents.settle(now)
    kind = agents.kind(KIND)
    assert kind.turns(1, now) == pytest.approx(10, rel=0.35)
    assert kind.turns(3, now) > kind.turns(1, now)
    assert kind.turns(20, now) < 6


def test_a_bound_on_the_turns_holds_but_for_a_doubt() -> None:
    seed = random.randrange(10**6)
    rng, agents = random.Random(seed), Agents()
    lengths = [1 + int(rng.expovariate(1 / 20)) for _ in range(500)]
    talk(agents, {name: [10.0] * (length - 1) for name, length in enumerate(lengths)})
    agents.settle(LATER)
    most = agents.kind(KIND).turns_at_most(1, 0.05)
    longer = sum(length - 1 > most for length in lengths) / len(lengths)
    assert 0.005 < longer < 0.12, f"seed {seed}"


def test_who_returns_late_was_not_at_an_end() -> None:
    agents = Agents()
    talk(agents, {name: [2 * HORIZONS_S[0]] * 3 for name in range(100)})
    agents.settle(LATER)
    assert agents.kind(KIND).turns(1, LATER) == pytest.approx(3, rel=0.2)


def test_growth_and_output_follow_the_kind_and_a_new_kind_the_others() -> None:
    agents = Agents()
    talk(agents, {name: [10.0] * 5 for name in range(50)}, growth=5000)
    assert agents.kind(KIND).growth() == pytest.approx(5000, rel=0.05)
    assert agents.kind("other").growth() == pytest.approx(5000, rel=0.05)
    assert agents.kind("other").output() == pytest.approx(300, rel=0.05)


@pytest.mark.parametrize(("pause", "learns"), [(100.0, True), (400.0, False)])
def test_the_pace_on_now_is_learned(pause: float, learns: bool) -> None:
    """A turn with a long pause says nothing: its user was away."""
    agents, now = Agents(), 0.0
    for _ in range(200):
        agents.asked("talk", KIND, 1000, now)
        agents.answered("talk", 300, now + 5, 5.0)
        now += 5 + pause
    seconds = agents.turn_seconds(KIND)
    assert seconds == pytest.approx(5 + pause, rel=0.15) if learns else seconds < LONGEST_PAUSE_S / 2


def test_a_batch_makes_the_next_turn_late() -> None:
    agents = Agents()
    talk(agents, {name: [10.0] * 10 for name in range(100)})
    agents.settle(LATER)
    after_minutes = agents.outlook("new", KIND, "slow", lambda seconds: float(seconds > 600), LATER)
    assert after_minutes.back_in_batch(300.0) == 0
    assert after_minutes.back_in_batch(3600.0) == pytest.approx(after_minutes.back(100.0), abs=0.02)


def test_old_habits_are_forgotten() -> None:
    agents, a_week = Agents(), 7 * 86_400.0
    talk(agents, {name: [1000.0] for name in range(100)})
    agents.settle(LATER)
    talk(agents, {("new", name): [10.0] for name in range(100)}, starts=a_week)
    agents.settle(a_week + GONE_S * 2)
    assert agents.kind(KIND).back(60.0, a_week + GONE_S * 2) == pytest.approx(0.5, abs=0.06)


def test_conversations_and_kinds_are_bounded() -> None:
    agents = Agents()
    for name in range(60_000):
        agents.asked(name, f"kind {name % 700}", 10, float(name))
    assert agents.size <= 51_000


def test_a_gap_beyond_the_last_bin_is_no_return() -> None:
    agents = Agents()
    talk(agents, {"slow": [EDGES_S[-1] * 2]})
    assert agents.kind(KIND).back(EDGES_S[-1], LATER) < 1
