"""Reading traces: formats, pauses, samples, shared prefixes, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.core.errors import ConfigError
from carpool.sim.money.coding import SYSTEM_TOKENS, coding_fleet
from carpool.sim.money.model import ROOT, Trace, TraceTurn
from carpool.sim.money.traces import LONGEST_UNATTENDED_S, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.9799600,30,8\n"
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text, "utf-8")
    return path


def recorded(requests: list[object], system: int = 1000, **more: object) -> str:
    session = {
        "id": "one",
        "models": ["claude-haiku-4-5", "claude-opus-4-5"],
        "tool_tokens": system,
        "system_tokens": 0,
    }
    return json.dumps({**session, "requests": requests, **more})


def turns(trace: Trace) -> list[TraceTurn]:
    return [turn for session in trace.sessions for turn in session.turns]


def parents(trace: Trace) -> list[int]:
    """By turn, the tokens that its prompt shares with what could be stored before."""
    nodes = trace.nodes
    found = (nodes[turn.node].parent for turn in turns(trace))
    return [0 if parent == ROOT else nodes[parent].tokens for parent in found]


# ------------------------------------------------------------ sessions of Claude Code


def test_a_prompt_continues_the_earlier_one_that_it_shares(tmp_path: Path) -> None:
    requests = [
        [0, 2000, 0, 50, 3.0, 0.0, "tool_use"],
        [9, 2500, 1984, 60, 3.0, 6.0, "tool_use"],  # 2,000 tokens rounded down to blocks of 64
        [20, 4000, 2496, 10, 3.0, 8.0, "end_turn"],
        [90, 4200, 1984, 10, 3.0, 67.0, "end_turn"],  # back to the first prompt
        [99, 4300, 3000, 10, 3.0, 6.0, "end_turn"],  # leaves the third one in its middle, so at the second's end
        [120, 1500, 1024, 10, 3.0, 18.0, "end_turn"],  # tools and system prompt only
        [150, 1500, 500, 10, 3.0, 27.0, "end_turn"],  # not even those
    ]
    trace = read_trace(written(tmp_path, recorded(requests)), spread_s=0.0)
    assert parents(trace) == [1000, 2000, 2500, 2000, 2000, 1000, 0]
    session = trace.sessions[0]
    assert trace.nodes[session.system].tokens == 1000
    assert (session.model, session.client, session.starts) == ("claude-opus-4-5", "claude-code", 0.0)
    assert [turn.tool_turn for turn in session.turns[:4]] == [False, True, True, False]
    assert [turn.think_s for turn in session.turns] == [0.0, 6.0, 8.0, 67.0, 6.0, 18.0, 27.0]


def test_the_fifth_prompt_above_leaves_the_path_of_the_latest_longer_one(tmp_path: Path) -> None:
    requests = [[0, 2000, 0, 50, 3.0, 0.0, ""], [9, 5000, 1984, 60, 3.0, 6.0, ""], [20, 3500, 3000, 9, 3.0, 8.0, ""]]
    assert parents(read_trace(written(tmp_path, recorded(requests)))) == [1000, 2000, 2000]


def test_an_equal_prompt_ends_at_the_same_node(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, recorded([[0, 2000, 0, 5, 3.0, 0.0, ""], [9, 2000, 1984, 5, 3.0, 6.0, ""]])))
    first, second = turns(trace)
    assert first.node == second.node


def test_what_was_not_recorded_is_derived(tmp_path: Path) -> None:
    requests = [
        [0, 2000, 0, 58, None, None, ""],
        [10, 2100, 1984, 58, 4.0, None, ""],
        [12, 2200, 2048, 1, 1.0, None, ""],
    ]
    first, second, third = turns(read_trace(written(tmp_path, recorded(requests))))
    assert (first.sync_s, second.sync_s) == (3.0, 4.0)
    assert (first.think_s, second.think_s, third.think_s) == (0.0, 7.0, 0.0)


def test_a_subagent_is_a_session_of_its_own(tmp_path: Path) -> None:
    sub = {"t": 5.0, "sub": [[5, 900, 0, 9, 2.0, 0.0, ""]], "tool_tokens": 300, "system_tokens": 200}
    trace = read_trace(written(tmp_path, recorded([[0, 2000, 0, 50, 3.0, 0.0, ""], sub])), spread_s=0.0)
    assert [(one.client, one.starts) for one in trace.sessions] == [("claude-code", 0.0), ("claude-code/subagent", 5.0)]
    assert trace.nodes[trace.sessions[1].system].tokens == 500


def test_unattended_sessions_pause_for_a_minute_at_most(tmp_path: Path) -> None:
    path = written(tmp_path, recorded([[0, 2000, 0, 5, 3.0, 0.0, ""], [999, 2100, 1984, 5, 3.0, 996.0, ""]]))
    assert [turn.think_s for turn in turns(read_trace(path))] == [0.0, 996.0]
    assert [turn.think_s for turn in turns(read_trace(path, mode="unattended"))] == [0.0, LONGEST_UNATTENDED_S]


def test_a_sample_is_the_same_for_a_seed_and_another_for_another(tmp_path: Path) -> None:
    lines = [recorded([[0, 2000 + n, 0, 5, 3.0, 0.0, ""]], id=f"s{n}") for n in range(40)]
    path = written(tmp_path, "\n".join(lines))
    first, again, other = (
        [session.name for session in read_trace(path, sessions=5, seed=seed).sessions] for seed in (1, 1, 2)
    )
    assert len(first) == 5
    assert first == again != other
    assert len(read_trace(path, sessions=99).sessions) == 40


# ------------------------------------------------------------ the other formats


def test_mooncakes_calls_share_their_whole_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1700, "output_length": 5, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 3500, "input_length": 1700, "output_length": 5, "hash_ids": [1, 9, 4, 5]},
    ]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows))))
    assert parents(trace) == [0, 1100, 0]
    assert [session.starts for session in trace.sessions] == [0.0, 2.0, 2.5]
    assert all(len(session.turns) == 1 for session in trace.sessions)


def test_azures_calls_share_nothing(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, AZURE))
    assert [session.starts for session in trace.sessions] == [0.0, 2.0]
    assert [trace.nodes[turn.node].tokens for turn in turns(trace)] == [4808, 30]
    assert parents(trace) == [0, 0]


def test_taus_agents_continue_their_own_prompts(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "[[[100, 5], [150, 6], [90, 7]], [[100, 5]]]"))
    assert parents(trace) == [0, 100, 0, 0]
    assert [turn.output_tokens for turn in turns(trace)] == [5, 6, 7, 5]


def test_independent_calls_are_sampled_as_a_stretch(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:17:{second:02}.0,{second + 1},1\n" for second in range(30))
    trace = read_trace(written(tmp_path, AZURE.partition("\n")[0] + "\n" + rows), sessions=4)
    sizes = [trace.nodes[turn.node].tokens for turn in turns(trace)]
    assert sizes == list(range(sizes[0], sizes[0] + 4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a trace that carpool knows"),
        ('{"a": 1}', "is not a trace that carpool knows"),
        (AZURE + "yesterday,1,2\n", "line 4"),
        ('{"hash_ids": [1], "timestamp": 0, "input_length": 1, "output_length": 1}\n{"hash_ids": 1}', "line 2"),
        ('{"requests": []}', "line 1"),
        ("[[1]]", "line 1"),
    ],
)
def test_a_file_that_can_not_be_read_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere can't be read"):
        read_trace(tmp_path / "nowhere")


# ------------------------------------------------------------ the synthetic fleet


def test_the_coding_fleet_is_the_same_for_a_seed_and_grows_by_agents() -> None:
    assert coding_fleet(6, 8, 3) == coding_fleet(6, 8, 3) != coding_fleet(6, 8, 4)
    small, large = coding_fleet(3, 8), coding_fleet(6, 8)
    assert large.sessions[: len(small.sessions)] == small.sessions


def test_the_coding_fleet_has_the_sizes_of_recorded_sessions() -> None:
    trace = coding_fleet(100, 30)
    agents = [session for session in trace.sessions if session.client == "claude-code"]
    assert len(agents) == 100
    assert all(len(session.turns) == 30 for session in agents)
    assert {trace.nodes[session.system].tokens for session in agents} == {SYSTEM_TOKENS}
    assert len({session.system for session in agents}) == 1
    assert len(trace.sessions) > 110  # subagents
    tokens = sum(trace.nodes[turn.node].tokens for turn in turns(trace))
    assert 0.92 < sum(parents(trace)) / tokens < 0.98
    pauses = [turn.think_s for turn in turns(trace)]
    assert 0.03 < sum(pause > 300 for pause in pauses) / len(pauses) < 0.1
    assert max(turn.think_s for turn in turns(coding_fleet(20, 30, mode="unattended"))) <= LONGEST_UNATTENDED_S
