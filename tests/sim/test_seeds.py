"""A fixed set of simulated worlds. `make sim SEEDS=2000` runs more, `make sim SEED=17` prints the events of one."""

from __future__ import annotations

import pytest

from carpool.sim import Fleet, Report, draw, openai, simulate
from carpool.sim import __main__ as command
from carpool.sim.hang_ups import Cut
from tests.support.deep import quick_and_deep

# Worlds that once broke a promise stay here for ever, with the fleet that they had; the rest is a plain sample.
BROKE_ONCE = (3, 15, 30, 47, 49, 77, 1028, 1082, 1806, 2324, 3006, 3038)
BROKE_AT_OPENAI = (51,)
BROKE_LATER = (150, 165, 424, 551, 1081, 2070, 2951, 5579, 6363)
SAMPLE = tuple(range(100, 124))
# They take seconds each.
SLOW = {15, 30, 47, 49, 51, 77, 102, 103, 110, 112, 116, 119, 121, 150, 1081, 1082, 1806, 2070, 2324, 3006, 3038, 5579}
SEEDS = BROKE_ONCE + BROKE_AT_OPENAI + BROKE_LATER + SAMPLE
FLEETS: dict[int, Fleet] = {**dict.fromkeys(BROKE_ONCE, "anthropic"), **dict.fromkeys(BROKE_AT_OPENAI, "openai")}


@pytest.mark.parametrize("seed", quick_and_deep(SEEDS, [seed for seed in SEEDS if seed not in SLOW]))
def test_a_world_keeps_the_promises(seed: int) -> None:
    fleet = FLEETS.get(seed)
    report = simulate(seed, fleet)
    again = f"make sim SEED={seed}" + (f' ARGS="--fleet {fleet}"' if fleet else "")
    assert not report.problems, f"{again}\n" + "\n".join(report.problems)


def test_a_seed_replays_exactly() -> None:
    assert simulate(100).log == simulate(100).log


def test_the_sample_has_everything_in_it() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    plans = [draw(seed, FLEETS.get(seed)) for seed in SEEDS]
    assert any(plan.crashes for plan in plans)
    assert any(plan.engines > 1 for plan in plans)
    assert any(plan.clock_offset for plan in plans)
    assert any(plan.fault_free for plan in plans)
    assert {tuple(plan.mocks) for plan in plans} == {("anthropic",), ("openai",), ("anthropic", "openai")}
    assert any(
        mock.faults.stranger and mock.faults.create_accepted_cut
        for plan in map(draw, range(300))
        for mock in plan.mocks.values()
    )


def test_agents_leave_and_come_back_at_any_moment() -> None:
    plans = [draw(seed) for seed in SAMPLE]
    turns = [turn for plan in plans for agent in plan.agents for turn in agent.turns]
    moves = [move for turn in turns for move in turn.hang_ups]
    waits = [move.after for move in moves if move.after is not None]
    assert min(waits) == 0.0
    assert max(waits) > 60.0
    assert {move.cut for move in moves} == {None, *Cut}
    assert {move.marked for move in moves} == {move.back for move in moves} == {True, False}
    assert any(move.away == 0.0 for move in moves)
    assert max(len(turn.hang_ups) for turn in turns) > 4
    assert any(plan.engines > 1 and not plan.stops for plan in plans)


def test_some_providers_forget_what_they_sold() -> None:
    plans = list(map(draw, range(100)))
    assert {name for plan in plans for name, mock in plan.mocks.items() if mock.faults.batch_forgotten} == {
        "anthropic",
        "openai",
    }


def test_every_fault_of_openai_is_in_some_world() -> None:
    mocks = [plan.mocks["openai"] for plan in map(draw, range(200)) if "openai" in plan.mocks]
    for name in openai.FAULTS:
        assert any(getattr(mock.faults, name) for mock in mocks), name
    assert any(mock.openai.webhook_url and mock.faults.hook_lost for mock in mocks)
    assert any(mock.openai.enqueued_tokens for mock in mocks)


def test_a_world_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is in that moment: no task of it may take the end of patience for a trouble of its own."""
    monkeypatch.setattr(command, "TIMEOUT_S", 0.3)
    report = command._run_with_timeout(85, command.RunSettings(None))  # its aftermath takes a day
    assert "does not end" in report.problems[0]


def test_a_long_run_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def world(settings: command.RunSettings, seed: int) -> Report:
        return Report(seed, (), "", 1, 1, 0.0)

    monkeypatch.setattr(command, "PROGRESS_EVERY", 2)
    monkeypatch.setattr(command.RunSettings, "world", world)
    assert command._run_seeds(range(6), command.RunSettings(None), jobs=1, first_broken=False) == 0
    told = capsys.readouterr()
    assert [line.partition(",")[0] for line in told.err.splitlines()] == ["2 of 6 seeds", "4 of 6 seeds"]
    assert "All clean." in told.out
