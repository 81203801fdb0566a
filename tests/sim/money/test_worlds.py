"""Latencies belong to calls, whatever was drawn before."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.core.errors import ConfigError
from carpool.sim.money.coding import coding_fleet
from carpool.sim.money.worlds import WORLDS, Latencies, Slowdown, find_world, measured

TRACE = coding_fleet(60, 30)
PLACES = [(number, turn) for number, session in enumerate(TRACE.sessions) for turn in range(len(session.turns))]


def drawn(name: str, seed: int = 0, at: float = 0.0) -> list[float]:
    latencies = Latencies(find_world(name), TRACE, seed)
    return [latencies.batch_s(*place, at) for place in PLACES]


@pytest.mark.parametrize("name", WORLDS)
def test_a_call_has_the_same_latency_in_every_order(name: str) -> None:
    latencies = Latencies(find_world(name), TRACE, 7)
    mixed = list(range(len(PLACES)))
    random.Random(1).shuffle(mixed)
    by_place = {PLACES[index]: latencies.batch_s(*PLACES[index], 0.0) for index in mixed}
    assert [by_place[place] for place in PLACES] == drawn(name, 7) != drawn(name, 8)
    assert latencies.batch_s(0, 0, 0.0, attempt=1) != latencies.batch_s(0, 0, 0.0)


def test_the_published_latencies_have_the_published_quantiles() -> None:
    times = sorted(drawn("anthropic"))
    assert 270 < times[len(times) // 2] < 330
    assert 3000 < times[len(times) * 9 // 10] < 4300
    assert times[0] == 60.0
    assert 0 < sum(one > 86_400 for one in times) / len(times) < 0.01


def test_a_share_of_the_calls_is_stuck() -> None:
    stuck = sum(one == math.inf for one in drawn("stuck"))
    assert 0.01 < stuck / len(PLACES) < 0.03


def test_a_drift_lasts_from_its_start_to_its_end() -> None:
    before, during, after = drawn("drifting"), drawn("drifting", at=3600.0), drawn("drifting", at=3 * 3600.0)
    assert during == [8 * one for one in before]
    assert after == before
    slow = replace(find_world("quick"), slow_sync=Slowdown(10.0, 20.0, 3.0))
    latencies, usual = Latencies(slow, TRACE, 0), TRACE.sessions[0].turns[0].sync_s
    assert [latencies.sync_s(0, 0, at) for at in (9.0, 10.0, 20.0)] == [usual, 3 * usual, usual]


def test_refusals_are_as_frequent_as_they_are_meant() -> None:
    latencies = Latencies(replace(find_world("quick"), refusal=0.25), TRACE, 0)
    refused = [latencies.refused(*place, attempt) for place in PLACES for attempt in (1, 2)]
    assert 0.2 < sum(refused) / len(refused) < 0.3
    assert refused == [latencies.refused(*place, attempt) for place in PLACES for attempt in (1, 2)]


def test_measured_latencies_are_drawn_as_they_were_measured(tmp_path: Path) -> None:
    lines, by_model = tmp_path / "lines", tmp_path / "by_model"
    lines.write_text("10\n30.5\n20\n")
    by_model.write_text('{"claude-opus*": [1], "*": [2, 2]}')
    assert set(_draws(lines)) == {10.0, 20.0, 30.5}
    assert set(_draws(by_model)) == {2.0}


def _draws(path: Path) -> list[float]:
    latencies = Latencies(measured(path), TRACE, 0)
    return [latencies.batch_s(*place, 0.0) for place in PLACES]


@pytest.mark.parametrize("text", ["", "soon", "[]", '{"*": []}', '{"*": ["1"]}', "-1", "NaN", "[1,", '{"*": 3}'])
def test_latencies_that_can_not_be_read_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times"
    path.write_text(text)
    with pytest.raises(ConfigError, match="times"):
        measured(path)


def test_a_model_without_latencies_is_named(tmp_path: Path) -> None:
    path = tmp_path / "times"
    path.write_text('{"gpt-*": [1]}')
    with pytest.raises(ConfigError, match="no batch latency for claude-sonnet-4-5"):
        _draws(path)


def test_an_unknown_world_is_named() -> None:
    with pytest.raises(ConfigError, match="'calm' is not a world: known are economics"):
        find_world("calm")
