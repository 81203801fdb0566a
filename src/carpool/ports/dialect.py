"""The port to a provider family's wire format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from carpool.model import Headers, Turn, Usage, Value


class RawRequest(Value, frozen=True, gc=False):
    """An HTTP request as a door received it. Header names in lower case."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes


class Document(Protocol):
    """A body that was decoded."""

    def canonical(self, without: str) -> bytes: ...


class Parsed(Value, frozen=True, gc=False):
    """What a dialect understood of a request."""

    endpoint: str
    model: str
    body: bytes  # without `stream`; otherwise the client's own bytes
    stream: bool
    max_output_tokens: int
    headers: Headers  # to travel with the call
    secret: Headers  # the credential headers, as the client sent them
    unbatchable: str | None  # why this may not ride a batch
    document: Document  # the decoded body; a Parsed is let go before anybody waits
    retry: bool
    turn: Turn | None = None  # None where nothing is cached, or nobody can tell
    tool_turn: bool = False  # the last message carries the results of tools

    @property
    def canonical(self) -> bytes:
        """The body in canonical JSON, without `stream`. Made when asked for: only calls that are kept need it."""
        return self.document.canonical(without="stream")


class Ask(Value, frozen=True, gc=False):
    """A request to the provider, before base URL and credential are added."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch as the provider describes it. Times are on the provider's clock."""

    provider_id: str
    ended: bool
    cancelling: bool
    count: int
    created_at: float
    expires_at: float | None
    ended_at: float | None
    results_path: str | None  # None when there are no results (yet, or any more)
    archived: bool


class ResultLine(Value, frozen=True, gc=False):
    """One line of a batch's results. `custom_id` is checked by the engine, not here."""

    custom_id: str
    result: str  # succeeded | errored | canceled | expired
    status: int
    body: bytes  # the message, or the provider-shaped error
    model: str  # as the answer names it; empty without an answer
    usage: Usage | None
    retryable: bool


@dataclass(frozen=True, slots=True)
class Limits:
    max_count: int
    max_bytes: int
    window: float  # seconds after which the provider expires a batch
    retention: float  # seconds for which it keeps results


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a provider said no, read from an answered status of 400 or more."""

    status: int
    message: str
    retryable: bool  # the same request may succeed later
    retry_after: float | None = None
    cannot_batch: bool = False  # this credential or model has no batch road
    too_large: bool = False


class Allowance(Value, frozen=True, gc=False):
    """What an answer says of one rate limit: how much it allows, how much of that is left, and in how many seconds
    all of it is there again, where it says so."""

    limit: int
    remaining: int
    full_in: float | None = None


class Allowances(Value, frozen=True, gc=False):
    """The rate limits of an account as an answer on `now` names them."""

    requests: Allowance | None = None
    tokens: Allowance | None = None


class UsageTap(Protocol):
    """Reads the usage out of a streamed answer while it passes, without holding it."""

    def feed(self, chunk: bytes) -> None: ...
    def usage(self) -> Usage | None:
        """What is known so far; None before the provider said anything."""
        ...


class Dialect(Protocol):
    """A provider family's wire format: pure translation between bytes and words. No I/O, no clock, no state.

    Whatever it can't understand of a client it raises as `BadCall`, of a provider as `Garbled`."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> Limits: ...

    # from clients
    def handles(self, method: str, path: str) -> bool:
        """Whether `parse` understands this endpoint."""
        ...

    def parse(self, raw: RawRequest) -> Parsed: ...
    def secret(self, headers: Headers) -> Headers:
        """Those of a client's headers that are its credential, as `parse` would name them."""
        ...

    def estimate_tokens(self, body: bytes) -> int: ...

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask: ...
    def line_overhead(self) -> int:
        """Bytes that a call costs in a create beyond its body."""
        ...

    def line(self, custom_id: str, body: bytes) -> bytes: ...
    def create(self, headers: Headers) -> Ask: ...
    def create_frame(self) -> tuple[bytes, bytes, bytes]:
        """What stands before, between and after the lines of a create."""
        ...

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask: ...
    def retrieve(self, headers: Headers, provider_id: str) -> Ask: ...
    def cancel(self, headers: Headers, provider_id: str) -> Ask: ...
    def results(self, headers: Headers, provider_id: str) -> Ask: ...

    # from the provider
    def report(self, body: bytes) -> BatchReport: ...
    def page(self, body: bytes) -> tuple[list[BatchReport], str | None]:
        """The batches of a LIST page, newest first, and the cursor of the next page if there is one."""
        ...

    def result_line(self, line: bytes) -> ResultLine: ...
    def usage(self, body: bytes) -> Usage | None:
        """Usage of a finished answer; None when it says none."""
        ...

    def usage_tap(self) -> UsageTap: ...
    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal: ...
    def requests_per_minute(self, headers: Headers) -> int | None:
        """The account's limit as answered by a batch endpoint, where it says so."""
        ...

    def allowances(self, headers: Headers) -> Allowances | None:
        """What the head of a synchronous answer says of the account's rate limits; None when it says nothing."""
        ...

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes: ...
    def wish(self, body: bytes) -> str:
        """What a client's request asks of its stream beyond the answer, in a word of the dialect's own; empty for none.
        Such wishes are no part of what `parse` calls the body."""
        ...

    def replay(self, body: bytes, wish: str = "") -> Iterator[bytes]:
        """A finished answer as the event stream that a streaming client expects, one event at a time."""
        ...

    def stream_error(self, body: bytes) -> bytes: ...
    def keep_alive(self) -> bytes: ...
