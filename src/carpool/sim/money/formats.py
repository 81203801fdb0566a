"""The formats of traces, and how each becomes sessions on a tree of prefixes.

What a trace says of shared prefixes differs, so each reader has its rule. All of them only count on prefixes that end
where the provider could store one: at the end of an earlier prompt, or of tools and system prompt. A prompt that leaves
an earlier one in its middle shares what the last such place before that covers, which is a little less than recorded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import msgspec

from carpool.core.errors import ConfigError
from carpool.sim.money.model import ROOT, Node, TraceSession, TraceTurn

BLOCK: Final = 64  # tokens: Claude Code's sessions count shared prefixes in blocks of this size
EARLIER: Final = 60  # requests with which they compared each one
MOONCAKE_BLOCK: Final = 512
CLAUDE_CODE_OUTPUT: Final = 32_000  # the limit that Claude Code sets

FIRST_ANSWER_S: Final = 2.0
TOKENS_PER_S: Final = 58.0

Sample = Callable[[Sequence[Any]], Sequence[Any]]


def answer_seconds(output_tokens: int) -> float:
    """How long an answer takes on `now` where that was not recorded: a fit of the 33,551 recorded answers of Claude
    Code's sessions (medians by size: 4.4 s for 142 tokens, 19.9 s for 1,049, 37.7 s for 2,114)."""
    return FIRST_ANSWER_S + output_tokens / TOKENS_PER_S


@dataclass(slots=True)
class TraceFile:
    """A file that is being read, what was asked of its reader, and the nodes found so far."""

    path: str
    text: str
    longest_pause: float
    model: str
    keep_models: bool
    spread_s: float
    rng: random.Random
    sample: Sample
    stretch: Sample
    nodes: list[Node] = field(default_factory=list)

    def lines(self) -> Iterator[tuple[int, str]]:
        return ((number, line) for number, line in enumerate(self.text.splitlines(), 1) if line.strip())

    def wrong(self, line: int, why: object) -> ConfigError:
        return ConfigError(f"{self.path}, line {line}, is not as its format says: {why}.")

    def node(self, parent: int, tokens: int) -> int:
        """The node of a prompt. A prompt that adds nothing to its prefix ends at the node of that."""
        if parent != ROOT and self.nodes[parent].tokens >= tokens:
            return parent
        self.nodes.append(Node(parent, tokens))
        return len(self.nodes) - 1

    def turn(self, node: int, output: int, think: float, sync_s: float | None, *, tool: bool = False) -> TraceTurn:
        seconds = answer_seconds(output) if sync_s is None else sync_s
        return TraceTurn(node, output, min(max(0.0, think), self.longest_pause), seconds, tool)

    def start(self) -> float:
        return self.rng.random() * self.spread_s


# ------------------------------------------------------------ sessions of Claude Code

_Request = tuple[float, int, int, int, float | None, float | None, str]


class _Subagent(msgspec.Struct):
    t: float
    sub: list[_Request]
    tool_tokens: int
    system_tokens: int


class _Recorded(msgspec.Struct):
    id: str
    models: list[str]
    tool_tokens: int
    system_tokens: int
    requests: list[_Request | _Subagent]


_recorded = msgspec.json.Decoder(_Recorded)


def read_claude_code(file: TraceFile) -> tuple[TraceSession, ...]:
    sessions: list[TraceSession] = []
    for line, text in file.sample(list(file.lines())):
        try:
            recorded = _recorded.decode(text)
        except msgspec.DecodeError as error:
            raise file.wrong(line, error) from error
        sessions += _with_subagents(file, recorded)
    return tuple(sessions)


def _with_subagents(file: TraceFile, recorded: _Recorded) -> Iterable[TraceSession]:
    """A subagent is a session of its own, which starts as long after its parent as recorded, however long the turns of
    the parent take."""
    starts = file.start()
    main = [request for request in recorded.requests if not isinstance(request, _Subagent)]
    model = _model(file, recorded.models)
    system = recorded.tool_tokens + recorded.system_tokens
    if main:
        yield _session(file, recorded.id, starts, model, "claude-code", system, main)
    subagents = [request for request in recorded.requests if isinstance(request, _Subagent)]
    for number, sub in enumerate(one for one in subagents if one.sub):
        name, tokens = f"{recorded.id}/{number}", sub.tool_tokens + sub.system_tokens
        yield _session(file, name, starts + sub.t, model, "claude-code/subagent", tokens, sub.sub)


def _model(file: TraceFile, models: Sequence[str]) -> str:
    """One model for the session, because requests don't name theirs. The small ones only do side jobs."""
    if not file.keep_models or not models:
        return file.model
    return next((model for model in models if "haiku" not in model), models[0])


def _session(
    file: TraceFile, name: str, starts: float, model: str, client: str, system: int, requests: Sequence[_Request]
) -> TraceSession:
    place = _Places(file, system)
    turns = []
    ended, called = 0.0, False
    for number, (t, tokens, shared, output, api_time, think, stop) in enumerate(requests):
        pause = (t - ended if number else 0.0) if think is None else think
        turn = file.turn(place.node(tokens, shared), output, pause, api_time, tool=called)
        turns.append(turn)
        ended, called = t + turn.sync_s, stop == "tool_use"
    return TraceSession(name, starts, model, tuple(turns), {}, client, place.system, CLAUDE_CODE_OUTPUT)


class _Places:
    """Finds the node of each prompt of a session from the tokens that it shares with an earlier one.

    The shared tokens are rounded down to blocks, so they reach an earlier prompt's end if they cover its whole blocks.
    The latest prompt that they reach exactly is the parent. Otherwise they end in the middle of one: then it is the
    deepest node before that, on the path of the latest prompt that is longer.
    """

    def __init__(self, file: TraceFile, system: int) -> None:
        self._file = file
        self._history: list[int] = []
        self.system = file.node(ROOT, system) if system > 0 else ROOT

    def node(self, tokens: int, shared: int) -> int:
        node = self._file.node(self._within(self._parent(shared), tokens), tokens)
        self._history.append(node)
        return node

    def _parent(self, shared: int) -> int:
        nodes, earlier = self._file.nodes, self._history[: -EARLIER - 1 : -1]
        if not self._history:
            return self.system  # its own tools and system prompt, which nothing has stored yet
        for node in earlier:
            if _reaches(shared, nodes[node].tokens) and shared <= nodes[node].tokens:
                return node
        longer = next((node for node in earlier if nodes[node].tokens > shared), ROOT)
        while longer != ROOT and not _reaches(shared, nodes[longer].tokens):
            longer = nodes[longer].parent
        return longer

    def _within(self, parent: int, tokens: int) -> int:
        nodes = self._file.nodes
        while parent != ROOT and nodes[parent].tokens > tokens:
            parent = nodes[parent].parent
        return parent


def _reaches(shared: int, tokens: int) -> bool:
    return shared >= tokens - tokens % BLOCK


# ------------------------------------------------------------ Mooncake


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_mooncake = msgspec.json.Decoder(_Mooncake)


def read_mooncake(file: TraceFile) -> tuple[TraceSession, ...]:
    """Independent calls. Equal block hashes are equal prefixes, so a trie over the whole blocks finds the longest
    earlier prompt that a prompt begins with; the last block of a prompt is seldom whole and does not count."""
    steps: dict[tuple[int, int], int] = {}  # trie: (place, hash) → place
    ends: dict[int, int] = {}  # place in the trie → node of the last prompt that ended there
    sessions = []
    for line, text in file.stretch(list(file.lines())):
        try:
            row = _mooncake.decode(text)
        except msgspec.DecodeError as error:
            raise file.wrong(line, error) from error
        place, parent = 0, ROOT
        for hashed in row.hash_ids[: row.input_length // MOONCAKE_BLOCK]:
            place = steps.setdefault((place, hashed), len(steps) + 1)
            found = ends.get(place, ROOT)
            if found != ROOT and file.nodes[found].tokens <= row.input_length:
                parent = found
        ends[place] = file.node(parent, row.input_length)
        turn = file.turn(ends[place], row.output_length, 0.0, None)
        sessions.append(TraceSession(f"call {line}", row.timestamp / 1000, file.model, (turn,)))
    return _from_zero(sessions)


# ------------------------------------------------------------ Azure


def read_azure(file: TraceFile) -> tuple[TraceSession, ...]:
    """Independent calls that share nothing."""
    rows = list(file.lines())[1:]
    sessions = []
    for line, text in file.stretch(rows):
        try:
            at, context, generated = text.split(",")
            starts = datetime.fromisoformat(at.strip()[:26]).timestamp()
            turn = file.turn(file.node(ROOT, int(context)), int(generated), 0.0, None)
        except ValueError as error:
            raise file.wrong(line, error) from error
        sessions.append(TraceSession(f"call {line}", starts, file.model, (turn,)))
    return _from_zero(sessions)


def _from_zero(sessions: Iterable[TraceSession]) -> tuple[TraceSession, ...]:
    ordered = sorted(sessions, key=lambda session: session.starts)
    zero = ordered[0].starts if ordered else 0.0
    return tuple(
        TraceSession(one.name, one.starts - zero, one.model, one.turns, one.tags, one.client, one.system)
        for one in ordered
    )


# ------------------------------------------------------------ tau-bench

_tau = msgspec.json.Decoder(list[list[tuple[int, int]]])


def read_tau(file: TraceFile) -> tuple[TraceSession, ...]:
    """Agents whose context only grows: each prompt begins with the one before. Their tools answer at once."""
    try:
        agents = list(enumerate(_tau.decode(file.text), 1))
    except msgspec.DecodeError as error:
        raise file.wrong(1, error) from error
    sessions = []
    for number, rows in file.sample(agents):
        node, turns = ROOT, []
        for context, output in rows:
            longer = node != ROOT and file.nodes[node].tokens <= context
            node = file.node(node if longer else ROOT, context)
            turns.append(file.turn(node, output, 0.0, None, tool=True))
        if turns:
            sessions.append(TraceSession(f"agent {number}", file.start(), file.model, tuple(turns), {}, "tau"))
    return tuple(sessions)
