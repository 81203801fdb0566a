"""Traces: what agents sent, in sizes and times only.

What counts for a prompt cache is which earlier prompt a prompt begins with. So every prompt ends at a *node* of a tree:
the path from the root to the node is its content, and two prompts share what their paths share. A node is a place where
the provider can store the prefix (a breakpoint: the end of the tools and the system prompt, or the end of a prompt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from carpool.core.model import Lane

ROOT = -1
BYTES_PER_TOKEN: Final = 4

Ttl = Literal["5m", "1h"]
LIVES: Final[Mapping[Ttl | None, float]] = {None: 0.0, "5m": 300.0, "1h": 3600.0}
TTLS: Final[Mapping[float, Ttl | None]] = {life: ttl for ttl, life in LIVES.items()}
PurchaseKind = Literal["purchase", "rescue", "duplicate", "ping", "leader", "probe"]


@dataclass(frozen=True, slots=True)
class Node:
    """A prefix. `parent` is the longest proper prefix of it that is a node, `tokens` counts from the root."""

    parent: int  # index into `Trace.nodes`, or ROOT
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One model request.

    `think_s` is the time from the answer of the turn before (in a session's first turn: from the session's start) to
    this request. `sync_s` is how long the answer takes on `now`.
    """

    node: int  # where its prompt ends; its input is the tokens of that node
    output_tokens: int
    think_s: float
    sync_s: float
    tool_turn: bool = False
    budget_s: float | None = None  # its own, in place of the run's
    lane: Lane | None = None  # asked for
    body_bytes: int | None = None  # of its request, where that is known: what the engine takes its tokens from


@dataclass(frozen=True, slots=True)
class ClientMarks:
    """What a client marks for the cache: the end of its prompts, and the end of tools and system prompt."""

    ttl: Ttl | None = None
    system_ttl: Ttl | None = None


@dataclass(frozen=True, slots=True)
class TraceSession:
    """Turns that follow each other (closed loop). An independent call is a session of one turn."""

    name: str
    starts: float  # seconds after the start of the trace
    model: str
    turns: tuple[TraceTurn, ...]
    tags: Mapping[str, str] = field(default_factory=dict)
    client: str = ""  # kind of agent: the client's name, with `/subagent` for a subagent
    system: int = ROOT  # the node where tools and system prompt end, if it is known
    max_output_tokens: int = 4096
    marks: ClientMarks | None = None  # None: not recorded


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    nodes: Sequence[Node]
    sessions: tuple[TraceSession, ...]
    provider: str = "anthropic"

    @property
    def calls(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


@dataclass(frozen=True, slots=True)
class RunPurchase:
    """One request that a provider answered and bills, in a run. Times are seconds after the start of the trace.

    A run first decides *when* what is sent and with which cache marks; `billing` then prices its purchases, in the
    order of their start, for as many price tables as wanted.
    """

    session: int
    turn: int
    lane: Lane
    kind: PurchaseKind
    starts: float  # the provider begins to execute it: what is readable then is read, and lifetimes count from here
    begins: float  # its response has begun: what it wrote can be read
    ends: float
    node: int
    output_tokens: int
    ttl: Ttl | None = None  # the mark at the end of the prompt; None: no mark
    system_ttl: Ttl | None = None  # the mark at the end of tools and system prompt
    system: int = ROOT
    batch: int | None = None  # its number in the run


MissReason = Literal[
    "its answer takes longer",  # even at once
    "no time for a rescue",
    "the batch was late",
    "the provider refused",
    "the provider had no room",
    "the task ran out of time",
]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one turn went: asked, answered, and what it had time for. `miss` says why it was late."""

    session: int
    turn: int
    asked: float
    answered: float
    deadline: float | None
    lane: Lane  # of the purchase that gave the answer
    rescued: bool = False
    miss: MissReason | None = None
    wait_s: float = 0.0  # beyond what `now` would have taken


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What happened in one run, before prices. Purchases are ordered by their start."""

    policy: str
    seed: int
    purchases: Sequence[RunPurchase]
    answers: Sequence[Answer]
    batches: int  # bought
    api_calls: int  # requests to the batch API: creates, polls, results, cancels
