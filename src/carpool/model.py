"""The words of carpool: plain, frozen values that every layer speaks.

Times are epoch seconds, money is integer nano-dollars.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as hidden
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from msgspec import Struct, field

from carpool.errors import BadCall
from carpool.lifecycle import BatchState, TicketState

Headers = tuple[tuple[str, str], ...]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no look-alikes, safe in a custom_id
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
# As Python writes numbers to the base of 32; what is no letter of ours is no digit either.
_DIGITS = bytes(b"0123456789abcdefghijklmnopqrstuv!"[_ALPHABET.find(chr(code))] for code in range(256))
TICKET_LETTERS = 13
NONCE_LETTERS = 10


class Lane(StrEnum):
    NOW = "now"
    FLEX = "flex"
    BATCH = "batch"
    MERGE = "merge"


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    ERRORED = "errored"  # the provider's error, with the provider's status
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    LOST = "lost"
    DEADLINE = "deadline"  # nothing arrived in time, and nothing can any more


class EntryKind(StrEnum):
    PURCHASE = "purchase"
    RESCUE = "rescue"  # a deliberate second purchase beside a batch that may be billed too
    DUPLICATE = "duplicate"  # bought, but another purchase gave the answer


def base32(number: int, letters: int) -> str:
    """Two letters at a time: every call is named several times, and one by one takes thrice as long."""
    pairs = [_PAIRS[(number >> shift) & 1023] for shift in range(10 * ((letters - 1) // 2), -1, -10)]
    return "".join(pairs)[-letters:]


def ticket_text(ticket: int) -> str:
    """A ticket as people and providers see it."""
    return (
        f"{_beginning(ticket >> 25)}{_PAIRS[ticket >> 15 & 1023]}{_PAIRS[ticket >> 5 & 1023]}{_ALPHABET[ticket & 31]}"
    )


@lru_cache(maxsize=64)  # tickets rise with time: those of one moment begin alike
def _beginning(number: int) -> str:
    return base32(number, TICKET_LETTERS - 5)


def ticket_number(text: str) -> int:
    try:
        number = int(text.encode().translate(_DIGITS), 32) if len(text) == TICKET_LETTERS else -1
    except ValueError:
        number = -1
    if number < 0:
        raise BadCall(f"{text[:40]!r} is not a ticket: a ticket has {TICKET_LETTERS} letters and digits.")
    if number >= 1 << 63:
        raise BadCall(f"{text!r} is not a ticket: none was ever given that number.")
    return number


def custom_id(nonce: str, ticket: int) -> str:
    """What a call is named inside a batch: the nonce proves whose batch it is, the ticket whose call."""
    return f"{nonce}-{ticket_text(ticket)}"


def discreet(value: Struct) -> str:
    """A value as a crash report or a log may show it: of bodies, headers and secrets only how much there is."""
    shown = []
    for name in value.__struct_fields__:
        one = getattr(value, name)
        if isinstance(one, bytes) or name in _UNSHOWN:
            one = f"<{len(one)}>" if hasattr(one, "__len__") else "<…>"
        shown.append(f"{name}={one if name in _UNSHOWN or isinstance(one, str) else repr(one)}")
    return f"{type(value).__name__}({', '.join(shown)})"


_UNSHOWN = frozenset({"body", "document", "headers", "secret"})


class Value(Struct, frozen=True, gc=False):
    """A value that every call needs several of: quick to make, and no work for the garbage collector.

    It holds other values only, never what holds it, so there is nothing to collect.
    """

    def __repr__(self) -> str:
        return discreet(self)


class Usage(Value, frozen=True, gc=False):
    """Tokens of one answer. `input_tokens` is the uncached remainder; total input is the sum of the four."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_5m_tokens: int = 0
    cache_write_1h_tokens: int = 0
    web_searches: int = 0
    inference_geo: str | None = None
    speed: str | None = None

    @property
    def total_input(self) -> int:
        return self.input_tokens + self.cache_read_tokens + self.cache_write_5m_tokens + self.cache_write_1h_tokens


class Turn(Value, frozen=True, gc=False):
    """Where a call stands in a conversation whose beginning the provider caches."""

    conversation: int  # of its model, system prompt, tools and first message
    cache_life: float  # seconds for which what this turn caches lives
    opening: bool  # nothing was answered before it


class Call(Value, frozen=True, gc=False):
    """One model request as a client made it. `body` is what the client sent, without `stream`."""

    ticket: int
    provider: str
    dialect: str
    endpoint: str
    body: bytes
    headers: Headers  # goes upstream with the call: version, betas, extra headers; never a credential
    credential: str  # the keyed hash of the secret; the secret itself lives in the Keyring only
    model: str
    arrived: float
    deadline: float | None = None
    stream: bool = False
    max_output_tokens: int = 0
    unbatchable: str | None = None  # why this call may not ride a batch, as a sentence
    lane: Lane | None = None  # a lane that the client insists on
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    fingerprint: int = 0  # of credential, endpoint, headers and canonical body: what adoption compares
    retry: bool = False  # the client says itself that it comes back
    turn: Turn | None = None  # None where nothing is cached
    insists: bool = True  # on `lane`; False where a rule asks for it, and then what can't take it goes on `now`
    note: str = ""  # what a rule says about the lane, as a sentence
    on_disconnect: Literal["keep", "cancel"] | None = None  # when its client hangs up; None: as the door does it
    flexible: bool = False  # it leaves the service tier open

    @property
    def budget(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.arrived


class PoolKey(Value, frozen=True, gc=False):
    """What calls must have in common to share a batch. Equal keys pool together, unequal ones never do."""

    provider: str
    dialect: str
    credential: str
    endpoint: str
    headers: Headers
    model: str  # empty where the provider mixes models in a batch
    size_class: str
    deadline_class: str


class Admission(Value, frozen=True, gc=False):
    """A call on its way into the store. `lane` is the road it waits for; `awaiter` the engine whose door holds it."""

    call: Call
    pool: PoolKey
    lane: Lane
    rescue_at: float | None
    awaiter: str | None
    reason: str


class Outcome(Value, frozen=True, gc=False):
    """The final answer of a call. `body` is the provider's JSON, for successes and errors alike."""

    kind: OutcomeKind
    status: int
    body: bytes
    at: float
    lane: Lane
    reason: str = ""
    headers: Headers = ()
    batch: str | None = None  # the provider's batch id


class Admitted(Value, frozen=True, gc=False):
    """What admission came to: a fresh ticket, or one that was here before (same key, or adopted)."""

    ticket: int
    fresh: bool
    state: TicketState
    lane: Lane
    deadline: float | None = None
    outcome: Outcome | None = None
    entry: Entry | None = None  # the ledger line of the purchase that brought the outcome, where there is one


@dataclass(frozen=True, slots=True)
class PoolView:
    """The calls that wait in one pool, summed up."""

    pool: int
    key: PoolKey
    count: int
    bytes: int
    oldest: float
    newest: float
    earliest_rescue: float | None


@dataclass(frozen=True, slots=True)
class Intent:
    """A batch about to be made: claim at most so many of the pool's calls, the most pressing first. With an `account`
    only while the owner leads it."""

    pool: int
    nonce: str
    max_count: int
    max_bytes: int
    owner: str
    at: float
    account: str | None = None
    unsent: bool = False  # whoever makes it says before the create goes out that it does


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch row. `count` and `bytes` are what was claimed; `sent_*` bracket the create on our clock."""

    id: int
    pool: int
    key: PoolKey
    nonce: str
    state: BatchState
    owner: str
    count: int
    bytes: int
    intended_at: float
    sent_at: float | None = None
    resolved_at: float | None = None  # when the create's fate became known, or was declared unknown
    provider_id: str | None = None
    expires_at: float | None = None
    ended_at: float | None = None
    clock_offset: float = 0.0  # the provider's clock minus ours when the create went out
    abandoned: bool = False  # its calls went elsewhere: what it still brings is a duplicate
    note: str = ""
    unsent: bool = False  # its create is known not to have gone out: nothing was bought


@dataclass(frozen=True, slots=True)
class Due:
    """An open call whose rescue time has come."""

    ticket: int
    state: TicketState
    lane: Lane
    batch: int | None
    rescue_at: float
    deadline: float | None
    awaiter: str | None = None


@dataclass(frozen=True, slots=True)
class TicketView:
    """Where an open call stands: what decides whether, and how, it is tried again."""

    ticket: int
    state: TicketState
    requeues: int  # how often a batch gave it back
    rescue_at: float | None
    deadline: float | None
    awaited: bool


@dataclass(frozen=True, slots=True)
class CallRow:
    """A kept call as people see it in a list: everything but its body and its answer."""

    ticket: int
    provider: str
    credential: str
    endpoint: str
    model: str
    state: TicketState
    lane: Lane
    arrived: float
    deadline: float | None
    settled_at: float | None
    delivered_at: float | None
    awaited: bool
    bytes: int
    batch: str | None  # the provider's batch id
    reason: str
    tags: Mapping[str, str]
    kind: OutcomeKind | None  # of its outcome, once it is settled
    status: int | None
    paid: int | None  # so far, over all its purchases
    would_have_paid: int | None


@dataclass(frozen=True, slots=True)
class Parcel:
    """Everything that is needed to send an open call on `now`."""

    ticket: int
    key: PoolKey
    body: bytes = hidden(repr=False)
    model: str
    requeues: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """What is still open in a batch: how many calls, how many of them nobody presses, and the latest rescue time."""

    count: int
    unpressed: int
    latest_rescue: float | None


class Entry(Value, frozen=True, gc=False):
    """One line of the ledger: one purchase. `paid` None means unknown, never free.

    (ticket, purchase) is its identity: the batch's id, or minus the number of the attempt on `now`.
    """

    ticket: int
    purchase: int
    at: float
    lane: Lane
    kind: EntryKind
    provider: str
    credential: str
    model: str
    usage: Usage | None = None
    paid: int | None = None
    would_have_paid: int | None = None
    reason: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


class Settled(Value, frozen=True, gc=False):
    """A ticket that has its outcome, and the ledger line of the purchase that brought it, where there was one."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None


class Settlement(Value, frozen=True, gc=False):
    """What becomes of one ticket in one transaction: an outcome, or a return to the queue; and its ledger line."""

    ticket: int
    outcome: Outcome | None = None
    entry: Entry | None = None
    requeue: Lane | None = None  # back to the pool (`batch`) or due at once on `now`
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """The ledger summed up, one row per lane and kind."""

    lane: Lane
    kind: EntryKind
    purchases: int
    unknown: int
    paid: int
    would_have_paid: int
