"""A trace of recorded conversations: prefixes become nodes, times become pauses, usage becomes marks.

- **Tokens** are those of the ledger. Of a prefix that is not a recorded prompt itself (tools and system prompt, or a
  turn that was not recorded) only the bytes are known: its share of the prompt's bytes counts as its share of tokens.
- **Times.** A conversation's next turn starts as long after the answer as it did. How long an answer takes on `now` is
  recorded for those that came from there; for others it is learned from these, by their output.
- **Marks** are seen by what they did: a client whose prompts write to the cache for 5 minutes or for 1 hour, or read
  from it, marks them so. Whether it marks tools and system prompt, too, shows where a first turn could have read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, linear_regression, median
from typing import Final

from carpool.core.model import Lane, ticket_text
from carpool.sim.money.formats import answer_seconds
from carpool.sim.money.model import ROOT, ClientMarks, Node, Trace, TraceSession, TraceTurn
from carpool.sim.money.recorded import Conversation, RecordedCall

LEARNED_FROM: Final = 10  # answers of a model, from which its times are learned by their output
SHORT_LIFE_S: Final = 300.0


class RecordHabits:
    """What all recorded calls, by arrival, teach about those that are replayed."""

    def __init__(self, calls: Sequence[RecordedCall]) -> None:
        self.times = _AnswerTimes(calls)
        self.systems = _SystemMarks(calls)


def recorded_trace(
    name: str, provider: str, recorded: Sequence[Conversation], habits: RecordHabits, *, as_recorded: bool = False
) -> Trace:
    """The trace of these conversations, a session for each of them in their order. `as_recorded`: calls keep their
    budgets, and those without one their lanes; otherwise neither is in the trace."""
    nodes = _PrefixNodes()
    zero = min((conversation[0].arrived for conversation in recorded), default=0.0)
    sessions = []
    for conversation in recorded:
        first, turns = conversation[0], tuple(_turns(conversation, nodes, habits, as_recorded))
        session = TraceSession(
            name=ticket_text(first.ticket),
            starts=first.arrived - zero,
            model=first.model,
            turns=turns,
            tags=first.tags,
            client=first.client,
            system=nodes.system_of(first),
            max_output_tokens=max(call.max_output_tokens for call in conversation),
            marks=habits.systems.marks(conversation),
        )
        sessions.append(session)
    return Trace(name, nodes.nodes, tuple(sessions), provider)


def _turns(
    conversation: Conversation, nodes: _PrefixNodes, habits: RecordHabits, as_recorded: bool
) -> Iterator[TraceTurn]:
    answered = conversation[0].arrived
    for call in conversation:
        seconds = habits.times.seconds(call)
        budget, lane = (call.budget_s, _asked_lane(call)) if as_recorded else (None, None)
        pause = max(0.0, call.arrived - answered)
        answered = call.arrived + seconds if call.answered is None else call.answered
        yield TraceTurn(nodes.end_of(call), call.usage.output_tokens, pause, seconds, call.tool_turn, budget, lane)


def _asked_lane(call: RecordedCall) -> Lane | None:
    if call.budget_s is not None:
        return None
    return Lane.BATCH if call.lane is Lane.BATCH else Lane.NOW


# ------------------------------------------------------------ times


class _AnswerTimes:
    """How long answers take on `now`: as recorded, or by model and output as it was for others."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        known: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for call in calls:
            if call.now_s is not None:
                known[call.model].append((call.usage.output_tokens, call.now_s))
        self._lines = {model: _line(points) for model, points in known.items() if len(points) >= LEARNED_FROM}

    def seconds(self, call: RecordedCall) -> float:
        if call.now_s is not None:
            return call.now_s
        if call.model not in self._lines:
            return answer_seconds(call.usage.output_tokens)
        first, per_token = self._lines[call.model]
        return first + per_token * call.usage.output_tokens


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds to begin with, and seconds per token of output."""
    outputs, seconds = [float(output) for output, _ in points], [taken for _, taken in points]
    if len(set(outputs)) > 1:
        slope, intercept = linear_regression(outputs, seconds)
        if slope > 0 and intercept >= 0:
            return intercept, slope
        if slope > 0:
            return 0.0, fmean(seconds) / fmean(outputs)
    return median(seconds), 0.0


# ------------------------------------------------------------ prefixes


class _PrefixNodes:
    """The nodes of a trace, found by the hashes of prefixes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_hash: dict[tuple[str, str, int], int] = {}

    def end_of(self, call: RecordedCall) -> int:
        """The node where a call's prompt ends."""
        found, tokens = call.prefixes, call.usage.total_input
        if found is None:
            return self._new(ROOT, tokens)
        per_byte = tokens / max(1, found.end_bytes)
        before = ROOT
        if found.root_bytes:
            before = self._node(call, found.root, before, round(found.root_bytes * per_byte))
        if found.parent is not None:
            before = self._node(call, found.parent, before, round(found.parent_bytes * per_byte))
        return self._node(call, found.end, before, tokens)

    def system_of(self, call: RecordedCall) -> int:
        """The node where its tools and system prompt end, if it has any."""
        if call.prefixes is None or not call.prefixes.root_bytes:
            return ROOT
        return self._by_hash[_key(call, call.prefixes.root)]

    def _node(self, call: RecordedCall, prefix: int, parent: int, tokens: int) -> int:
        key = _key(call, prefix)
        if key not in self._by_hash:
            self._by_hash[key] = self._new(parent, tokens)
        return self._by_hash[key]

    def _new(self, parent: int, tokens: int) -> int:
        """A prompt that adds nothing to its prefix ends where that does."""
        if parent != ROOT and self.nodes[parent].tokens >= tokens:
            return parent
        self.nodes.append(Node(parent, tokens))
        return len(self.nodes) - 1


def _key(call: RecordedCall, prefix: int) -> tuple[str, str, int]:
    return call.provider, call.credential, prefix


# ------------------------------------------------------------ marks


class _SystemMarks:
    """Whose tools and system prompts are marked: where the first turn of a conversation came soon after another one
    with the same beginning, it read from the cache or not."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self._could: dict[tuple[str, str, int], int] = defaultdict(int)
        self._did: dict[tuple[str, str, int], int] = defaultdict(int)
        begun: dict[tuple[str, str, int], RecordedCall] = {}
        for call in calls:
            if call.prefixes is None or call.lane is Lane.BATCH:
                continue
            root = _key(call, call.prefixes.root)
            before = begun.get(root)
            begun[root] = call
            if before is None or call.prefixes.parent is not None:
                continue
            if (before.answered or call.arrived) < call.arrived < before.arrived + SHORT_LIFE_S:
                self._could[root] += 1
                self._did[root] += call.usage.cache_read_tokens > 0

    def marks(self, conversation: Conversation) -> ClientMarks:
        short = any(call.usage.cache_write_5m_tokens for call in conversation)
        long = any(call.usage.cache_write_1h_tokens for call in conversation)
        read = any(call.usage.cache_read_tokens for call in conversation)
        if not (short or long or read):
            return ClientMarks()
        if not self._marked(conversation[0]):
            return ClientMarks("1h" if long else "5m")
        return ClientMarks("5m" if short or not long else "1h", "1h" if long else "5m")

    def _marked(self, call: RecordedCall) -> bool:
        """Where nothing was seen, tools and system prompt count as marked, as most clients do it."""
        if call.prefixes is None:
            return False
        root = _key(call, call.prefixes.root)
        return 2 * self._did[root] >= self._could[root]
