"""The record of calls of a store as a source of traces, and what it says if there is nothing in it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter

from msgspec import structs

from carpool import dialects
from carpool.core.errors import ConfigError
from carpool.core.model import Lane, TimedBatch
from carpool.sim.money.billing import PriceTable
from carpool.sim.money.model import Trace
from carpool.sim.money.recorded import Conversation, RecordedCall, calls_of, conversations
from carpool.sim.money.recorded_trace import RecordHabits, recorded_trace
from carpool.sim.money.traces import PauseMode, longest_pause
from carpool.stores import open_record, shown

COPIES_S = 60.0  # a conversation that stands for several is replayed so often, within this time


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a store has recorded since some time."""

    calls: Sequence[RecordedCall]
    batches: Sequence[TimedBatch]


def read_record(store: str, since: float, until: float = float("inf")) -> Recorded:
    with open_record(store) as record:
        calls = [call for call in calls_of(record.pages(since)) if call.arrived < until]
        batches = record.timed_batches(since)
    if not calls:
        raise ConfigError(
            f"{shown(store)} has no recorded call in that time. carpool serve and FleetDispatcher record calls unless "
            "`recording: {enabled: false}` (in Python: record_calls=False) is set; a call is there a few seconds after "
            "its answer. Send some, ask for a longer time with --since, or name another store with --store."
        )
    return Recorded(calls, batches)


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Where sessions come from: the calls of one dialect in a store, recorded in that time. `dialect_names` has the
    dialect of each provider in the config."""

    store: str
    since: float
    until: float
    dialect_names: tuple[tuple[str, str], ...]
    provider: str
    mode: PauseMode = "attended"
    sessions: int | None = None
    model: str | None = None  # in place of the recorded ones

    @property
    def name(self) -> str:
        return "recorded"

    def read(self, seed: int) -> Trace:
        calls = read_record(self.store, self.since, self.until).calls
        found = conversations(self._usable(calls))
        sampled = _sample(found, self.sessions, random.Random(f"sessions {seed}"))  # noqa: S311  the same every time
        trace = recorded_trace(self.name, self.provider, sampled, RecordHabits(calls))
        return self._changed(trace)

    def _usable(self, calls: Sequence[RecordedCall]) -> list[RecordedCall]:
        """The calls of this dialect whose model has the prices that every policy needs."""
        names, table, dialect = dict(self.dialect_names), PriceTable(), dialects.get(self.provider)
        own = [call for call in calls if dialect_of(call, names) == self.provider]
        if not own:
            there = Counter(str(dialect_of(call, names) or call.provider) for call in calls)
            listed = ", ".join(f"{count:,} of {name}" for name, count in there.most_common())
            raise ConfigError(f"The record has no calls of {self.provider}; it has {listed}. Name one with --provider.")
        if self.model is not None:
            return own
        priced = {
            model
            for model in {call.model for call in own}
            if all(table.card(dialect, model, lane) is not None for lane in (Lane.NOW, Lane.BATCH))
        }
        usable = [call for call in own if call.model in priced]
        if not usable:
            models = ", ".join(sorted({call.model for call in own})[:5])
            raise ConfigError(f"Nobody knows what the recorded models cost ({models}): name one with --model.")
        return usable

    def _changed(self, trace: Trace) -> Trace:
        most = longest_pause(self.mode)
        sessions = tuple(
            replace(
                session,
                model=self.model or session.model,
                turns=tuple(replace(turn, think_s=min(turn.think_s, most)) for turn in session.turns),
            )
            for session in trace.sessions
        )
        return replace(trace, name=f"{trace.name}-{self.mode}", sessions=sessions)


def dialect_of(call: RecordedCall, names: Mapping[str, str]) -> str | None:
    """The dialect of the provider that answered a call; None if the config does not say it."""
    name = names.get(call.provider, call.provider)
    return name if name in dialects.DIALECTS else None


# ------------------------------------------------------------ samples


def _sample(found: Sequence[Conversation], most: int | None, rng: random.Random) -> list[Conversation]:
    """So many conversations, or all. One that stands for several counts as often, each time a little later and with
    prompts of its own, because the others said something else."""
    upto = list(accumulate(conversation[0].weight for conversation in found))
    total = upto[-1]
    numbers = range(total) if most is None or most >= total else sorted(rng.sample(range(total), most))
    sampled: list[Conversation] = []
    position, copies = 0, 0
    for number in numbers:
        while upto[position] <= number:
            position, copies = position + 1, 0
        sampled.append(found[position] if not copies else _copy(found[position], copies, rng))
        copies += 1
    return sorted(sampled, key=lambda conversation: attrgetter("arrived", "ticket")(conversation[0]))


def _copy(conversation: Conversation, number: int, rng: random.Random) -> Conversation:
    """Another one like it. What it shares with others, tools and system prompt, it shares too."""
    later = rng.random() * COPIES_S
    return [_copied(call, number, later) for call in conversation]


def _copied(call: RecordedCall, number: int, later: float) -> RecordedCall:
    found = call.prefixes
    if found is not None:
        parent = None if found.parent is None else hash((found.parent, number))
        found = structs.replace(found, parent=parent, end=hash((found.end, number)))
    answered = None if call.answered is None else call.answered + later
    return replace(call, arrived=call.arrived + later, answered=answered, prefixes=found)
