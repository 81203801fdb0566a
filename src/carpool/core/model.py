"""The domain model: plain, frozen values that all layers share.

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

from carpool.core.errors import BadCall
from carpool.core.lifecycle import BatchState, TicketState

Headers = tuple[tuple[str, str], ...]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no look-alikes, safe in a custom_id
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]
# Maps our alphabet to the digits that `int(text, 32)` accepts; any other byte becomes an invalid digit.
_DIGITS = bytes(b"0123456789abcdefghijklmnopqrstuv!"[_ALPHABET.find(chr(code))] for code in range(256))
TICKET_LETTERS = 13
NONCE_LETTERS = 10


class Lane(StrEnum):
    NOW = "now"
    FLEX = "flex"
    BATCH = "batch"


class CachingMode(StrEnum):
    OFF = "off"
    OBSERVE = "observe"  # nothing is changed
    PLAN = "plan"  # cache marks may be added, and their lives extended


class OutcomeKind(StrEnum):
    SUCCEEDED = "succeeded"
    ERRORED = "errored"  # the provider's error and status
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    LOST = "lost"
    DEADLINE = "deadline"  # no answer arrived in time, and none can any more


class EntryKind(StrEnum):
    PURCHASE = "purchase"
    RESCUE = "rescue"  # a deliberate second purchase; the batch that carries the call may be billed too
    DUPLICATE = "duplicate"  # bought, but another purchase provided the answer


def base32(number: int, letters: int) -> str:
    """Encodes two letters at a time: every call is encoded several times, and one by one takes three times as long."""
    pairs = [_PAIRS[(number >> shift) & 1023] for shift in range(10 * ((letters - 1) // 2), -1, -10)]
    return "".join(pairs)[-letters:]


def ticket_text(ticket: int) -> str:
    """Returns the text form of a ticket, as shown to people and sent to providers."""
    return f"{_prefix(ticket >> 25)}{_PAIRS[ticket >> 15 & 1023]}{_PAIRS[ticket >> 5 & 1023]}{_ALPHABET[ticket & 31]}"


@lru_cache(maxsize=64)  # tickets increase with time, so recent ones share a prefix
def _prefix(number: int) -> str:
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
    """Returns the id of a call inside a batch: the nonce proves whose batch it is, the ticket which call."""
    return f"{nonce}-{ticket_text(ticket)}"


def safe_repr(value: Struct) -> str:
    """Formats a value for a crash report or a log: bodies, headers and secrets only by their size."""
    parts = []
    for name in value.__struct_fields__:
        content = getattr(value, name)
        if isinstance(content, bytes) or name in _UNSHOWN:
            content = f"<{len(content)}>" if hasattr(content, "__len__") else "<…>"
        parts.append(f"{name}={content if name in _UNSHOWN or isinstance(content, str) else repr(content)}")
    return f"{type(value).__name__}({', '.join(parts)})"


_UNSHOWN = frozenset({"body", "document", "headers", "positions", "secret"})


class Value(Struct, frozen=True, gc=False):
    """Base class of values that every call needs several of: quick to create, and not tracked by the garbage collector.

    A value refers only to other values and never forms a cycle, so there is nothing to collect.
    """

    def __repr__(self) -> str:
        return safe_repr(self)


class Usage(Value, frozen=True, gc=False):
    """Token counts of one answer. `input_tokens` excludes cached tokens; total input is the sum of the four."""

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


class CacheMark(Value, frozen=True, gc=False):
    """A block that the client marks for the provider's cache."""

    position: int  # index of the block's position in the chain
    ttl: str  # as the client wrote it; empty if it left it open


class PromptChain(Value, frozen=True, gc=False):
    """A prompt as the chain of its positions. Each is the end of a block, and stands for all content before: its size
    in bytes, then 32 bits of checksum. Equal positions mean, nearly always, equal prefixes, whatever is marked."""

    positions: tuple[int, ...]  # the first one: only settings, no content yet
    marks: tuple[CacheMark, ...]  # in the order of their positions
    root: int  # index of the last position of tools and system prompt
    parent: int | None  # index of the position where the prompt of the turn before ended; None: this is a first turn
    conversation: int  # the same for all turns of a conversation
    implicit: bool = False  # the provider caches it without marks

    def size(self, index: int) -> int:
        """Bytes of content up to a position."""
        return self.positions[index] >> 32


class Prefixes(Value, frozen=True, gc=False, array_like=True):
    """The prefixes of a prompt that calls may share, each as a keyed hash of everything up to its end, and its size in
    bytes. Equal hashes mean equal prefixes at one provider with one credential; without the store's secret they say
    nothing about the content."""

    root: int  # ends with the tools and the system prompt
    root_bytes: int
    parent: int | None  # ends where the prompt of the turn before probably ended; None: this is a first turn
    parent_bytes: int
    end: int  # the whole prompt
    end_bytes: int


class CallShape(Value, frozen=True, gc=False, array_like=True):
    """What is recorded of a call besides its ledger entries: sizes and times, no content."""

    ticket: int
    arrived: float
    client: str  # the kind of client, such as `claude-code/subagent`
    stream: bool
    tool_turn: bool  # the last message carries tool results
    deadline: float | None
    max_output_tokens: int
    bytes: int  # of its body
    prefixes: Prefixes | None = None  # None where the dialect can't tell
    seconds: float | None = None  # how long its answer took, if it went straight to `now` or `flex`
    weight: int = 1  # it stands for so many calls: under heavy load only a sample is recorded


class TaskTerms(Value, frozen=True, gc=False):
    """What was asked for the task of a call. If nothing was, its task only named or not, all of it is None."""

    budget: float | None = None  # seconds from the first call of the task that brings one
    deadline: float | None = None  # absolute; replaces the task's deadline
    longest: float | None = None  # seconds that this call may take at most, whatever the task's deadline


class CachePlan(Value, frozen=True, gc=False):
    """What to change in a request for the prompt cache. A client's own marks are never removed or moved."""

    ttl: str = ""  # life of the marks in the messages, and of all before them; empty: as the client says
    root_ttl: str = ""  # life of the marks of tools and system prompt
    mark_root: bool = False  # mark the end of tools and system prompt, unless the client marks something there
    mark_end: bool = False  # mark the end of the last message, unless the client marks something in the messages
    one_shot: bool = False  # the prompt will not be read again, so an implicit cache need not be written
    key: str = ""  # steers requests with the same prefix to the same cache, unless the client has one


class Call(Value, frozen=True, gc=False):
    """One model request as received from a client. `body` is what the client sent, without `stream`."""

    ticket: int
    provider: str
    dialect: str
    endpoint: str
    body: bytes
    headers: Headers  # sent upstream with the call: version, betas, extra headers; never a credential
    credential: str  # the keyed hash of the secret; only the Keyring holds the secret itself
    model: str
    arrived: float
    deadline: float | None = None
    stream: bool = False
    max_output_tokens: int = 0
    unbatchable: str | None = None  # why this call can't go into a batch, as a sentence
    lane: Lane | None = None  # the lane that was asked for
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    fingerprint: int = 0  # hash of credential, endpoint, headers and canonical body; adoption compares it
    retry: bool = False  # the client marks this request as a retry
    conversation: int | None = None  # hash of model, system prompt, tools and first message; None if nothing is marked
    insists: bool = True  # the client chose `lane`; False if a rule did: a call that can't take it then goes on `now`
    note: str = ""  # what a rule says about the lane, as a sentence
    on_disconnect: Literal["keep", "cancel"] | None = None  # when the client disconnects; None: the frontend's default
    flexible: bool = False  # the request leaves the service tier open
    payer: str = ""  # hash of the secret in the form in which it was sent; empty: the same as `credential`
    shape: CallShape | None = None  # to be recorded; None if nothing is
    caching: CachingMode | None = None  # what may be done for the prompt cache; None: what the policy says
    prompt: PromptChain | None = None  # the positions of its prompt, while they are needed
    agent: str = ""  # the kind of client that sent it, such as `claude-code/subagent`
    task: str = ""  # the name of its task; empty if nothing tells it
    task_terms: TaskTerms | None = None  # None: its client asked nothing for the task, so the task does not bind it
    task_deadline: float | None = None  # when the task that binds it must be done

    @property
    def budget(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.arrived


class PoolKey(Value, frozen=True, gc=False):
    """The properties that calls must share to go into the same batch. Only calls with equal keys are pooled."""

    provider: str
    dialect: str
    credential: str  # depends on the form in which the secret is sent: one key in two headers makes two batches
    endpoint: str
    headers: Headers
    model: str  # empty if the provider allows several models in a batch
    size_class: str
    deadline_class: str


class Admission(Value, frozen=True, gc=False):
    """A call to be stored. `lane` is the lane it waits for; `awaiter` the engine whose frontend holds the client.
    `pressed`: the call has no time to wait until it is known whether another engine is alive."""

    call: Call
    pool: PoolKey
    lane: Lane
    rescue_at: float | None
    awaiter: str | None
    reason: str
    pressed: bool = False


class Outcome(Value, frozen=True, gc=False):
    """The final outcome of a call. `body` is the provider's JSON, for successes and errors alike."""

    kind: OutcomeKind
    status: int
    body: bytes
    at: float
    lane: Lane
    reason: str = ""
    headers: Headers = ()
    batch: str | None = None  # the provider's batch id


class Admitted(Value, frozen=True, gc=False):
    """The result of an admission: a new ticket, or an existing one (same key, or adopted)."""

    ticket: int
    fresh: bool
    state: TicketState
    lane: Lane
    deadline: float | None = None
    outcome: Outcome | None = None
    entry: Entry | None = None  # the ledger entry of the purchase that provided the outcome, if there is one


@dataclass(frozen=True, slots=True)
class PoolView:
    """Summary of the calls that wait in one pool."""

    pool: int
    key: PoolKey
    count: int
    bytes: int
    oldest: float
    newest: float
    earliest_rescue: float | None


@dataclass(frozen=True, slots=True)
class Intent:
    """A batch about to be created: claims up to `max_count` calls of the pool, the most urgent first. With an
    `account`, only while the owner leads that account."""

    pool: int
    nonce: str
    max_count: int
    max_bytes: int
    owner: str
    at: float
    account: str | None = None
    unsent: bool = False  # the batch stays `unsent` until `depart` records that its create is about to be sent


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch row. `count` and `bytes` sum up the claimed calls."""

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
    resolved_at: float | None = None  # when the result of the create became known, or was declared unknown
    provider_id: str | None = None
    expires_at: float | None = None
    ended_at: float | None = None
    clock_offset: float = 0.0  # the provider's clock minus ours when the create was sent
    abandoned: bool = False  # its calls went elsewhere; results that still arrive are duplicates
    note: str = ""
    unsent: bool = False  # its create was provably not sent: nothing was bought


@dataclass(frozen=True, slots=True)
class Due:
    """An open call whose rescue time has been reached."""

    ticket: int
    state: TicketState
    lane: Lane
    batch: int | None
    rescue_at: float
    deadline: float | None
    awaiter: str | None = None


@dataclass(frozen=True, slots=True)
class TicketView:
    """The state of an open call, as needed to decide whether and how to retry it."""

    ticket: int
    state: TicketState
    requeues: int  # how often a batch returned it to the queue
    rescue_at: float | None
    deadline: float | None
    awaited: bool


@dataclass(frozen=True, slots=True)
class CallRow:
    """A stored call as shown in lists: everything except its body and its answer."""

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
    kind: OutcomeKind | None  # kind of its outcome, once settled
    status: int | None
    paid: int | None  # so far, over all its purchases
    would_have_paid: int | None
    purchases: int  # number of its ledger entries


@dataclass(frozen=True, slots=True)
class SendableCall:
    """All data needed to send an open call on `now`."""

    ticket: int
    key: PoolKey
    body: bytes = hidden(repr=False)
    model: str
    requeues: int
    reason: str


@dataclass(frozen=True, slots=True)
class OpenCalls:
    """The open calls of a batch: how many, how many of them have no time pressure, and the latest rescue time."""

    count: int
    unpressed: int
    latest_rescue: float | None


class Entry(Value, frozen=True, gc=False):
    """One ledger entry: one purchase. `paid` None means unknown, never free.

    (ticket, purchase) is its identity. `purchase` is the batch's id, or the negated number of the attempt on `now`.
    0 means no purchase: nothing was sent, and the entry is not stored.
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

    @property
    def sent(self) -> bool:
        return self.purchase != 0


class RecordedPurchase(Value, frozen=True, gc=False):
    """One purchase of a recorded call: what was asked, and what was bought. `answered` is None if it is not known: the
    answer never came, or is not kept any more."""

    call: CallShape
    entry: Entry
    answered: float | None


class TimedBatch(Value, frozen=True, gc=False):
    """How long a batch took, from its purchase until it was seen to have ended. `whole`: it ended by itself; otherwise
    it was cancelled, or its purchase was in doubt, and it would have taken at least so long."""

    provider: str
    credential: str
    model: str  # empty if its pool holds several models
    count: int
    seconds: float
    whole: bool


class Settled(Value, frozen=True, gc=False):
    """A settled ticket with its outcome and, if there is one, the ledger entry of the purchase that provided it."""

    ticket: int
    outcome: Outcome
    entry: Entry | None = None


class Settlement(Value, frozen=True, gc=False):
    """The changes to one ticket in one transaction: an outcome or a requeue, and its ledger entry."""

    ticket: int
    outcome: Outcome | None = None
    entry: Entry | None = None
    requeue: Lane | None = None  # back to the pool (`batch`), or due immediately (`now`)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Ledger totals, one row per lane and kind."""

    lane: Lane
    kind: EntryKind
    purchases: int
    unknown: int
    paid: int
    would_have_paid: int
