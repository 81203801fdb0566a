"""A synthetic fleet of coding agents, for runs that need no recorded trace.

Its sizes follow what was measured on 526 recorded sessions of Claude Code: prompts of 43k / 105k / 236k tokens (10th,
50th and 90th percentile), of which 96 % were sent before; 720 fresh tokens a turn in the median and 4,671 at the 90th
percentile; answers of 216 and 899 tokens; pauses of 10 s in the median and 166 s at the 90th percentile. Unlike
recorded sessions, which come from different people, the agents of this fleet share one prefix of tools and system
prompt, and start within a few minutes of each other: a fleet that a team runs.

Everything is drawn from the seed, and each agent from the seed and its number: a larger fleet begins with the smaller.
"""

from __future__ import annotations

import math
import random
from typing import Final

from carpool.sim.money.formats import CLAUDE_CODE_OUTPUT, answer_seconds
from carpool.sim.money.model import ROOT, Node, Trace, TraceSession, TraceTurn
from carpool.sim.money.traces import DEFAULT_MODEL, PauseMode, longest_pause

SYSTEM_TOKENS: Final = 15_000
LONGEST_CONTEXT: Final = 180_000  # then the agent compacts its context and goes on
COMPACTED: Final = 12_000  # what remains of it beyond tools and system prompt
WITHIN_S: Final = 600.0  # in which the agents start
SUBAGENTS: Final = 0.02  # the chance that a turn starts one
SUBAGENT_SYSTEM: Final = 6_000
PEOPLE: Final = 0.2  # share of the turns before which a person is asked


def coding_fleet(
    agents: int = 200,
    turns: int = 30,
    seed: int = 0,
    *,
    mode: PauseMode = "attended",
    model: str = DEFAULT_MODEL,
) -> Trace:
    fleet = _Fleet(seed, model, longest_pause(mode))
    for number in range(agents):
        fleet.add(number, turns)
    return Trace(f"coding-{mode}", fleet.nodes, tuple(fleet.sessions))


class _Fleet:
    def __init__(self, seed: int, model: str, longest: float) -> None:
        self._seed = seed
        self._longest = longest
        self._model = model
        self.nodes = [Node(ROOT, SYSTEM_TOKENS), Node(ROOT, SUBAGENT_SYSTEM)]
        self.sessions: list[TraceSession] = []

    def add(self, number: int, turns: int) -> None:
        rng = random.Random(f"coding {self._seed} {number}")  # noqa: S311  a fleet must be the same every time
        starts, tags = rng.random() * WITHIN_S, {"team": rng.choice(("api", "web", "data"))}
        first = int(_lognormal(rng, 20_000, 0.8))
        self._session(f"agent {number}", rng, starts, turns, 0, first, "claude-code", tags)
        elapsed = 0.0
        for turn in self.sessions[-1].turns:
            elapsed += turn.think_s + turn.sync_s
            if rng.random() < SUBAGENTS:
                name, count = f"agent {number}/{turn.node}", rng.randint(3, 12)
                task = int(_lognormal(rng, 2_000, 0.6))
                self._session(name, rng, starts + elapsed, count, 1, task, "claude-code/subagent", tags)

    def _session(
        self,
        name: str,
        rng: random.Random,
        starts: float,
        count: int,
        system: int,
        first: int,
        client: str,
        tags: dict[str, str],
    ) -> None:
        subagent = system == 1
        turns: list[TraceTurn] = []
        node, context = system, self.nodes[system].tokens + first
        for _ in range(count):
            if context > LONGEST_CONTEXT:
                node, context = system, self.nodes[system].tokens + COMPACTED
            self.nodes.append(Node(node, context))
            node = len(self.nodes) - 1
            output = min(CLAUDE_CODE_OUTPUT, 20 + int(_lognormal(rng, 200, 1.15)))
            asked = not subagent and rng.random() < PEOPLE
            pause = _lognormal(rng, 180.0, 1.6) if asked else _lognormal(rng, 8.0, 0.9)
            sync_s = answer_seconds(output) * _lognormal(rng, 1.0, 0.3)
            turns.append(
                TraceTurn(
                    node,
                    output,
                    min(pause, self._longest) if turns else 0.0,
                    sync_s,
                    tool_turn=bool(turns) and not asked,
                )
            )
            context += output + int(_lognormal(rng, 700, 1.4))
        self.sessions.append(
            TraceSession(name, starts, self._model, tuple(turns), tags, client, system, CLAUDE_CODE_OUTPUT)
        )


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(sigma * rng.gauss(0.0, 1.0))
