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
    flexible: bool = False  # may take the lane `flex`, as far as it is up to the request

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
class Refusal:
    """Why a provider said no: read from an answered status of 400 or more, or from a batch that failed as a whole."""

    status: int
    message: str
    retryable: bool  # the same request may succeed later
    retry_after: float | None = None
    cannot_batch: bool = False  # this credential has no batch road; with `of_model`, this model has none
    too_large: bool = False
    of_model: bool = False
    crowded: bool = False  # the queue for this model is full: there is room again when batches have ended
    queue_tokens: int | None = None  # how much that queue holds, where the provider says so
    unseen: bool = False  # a file that was just uploaded can't be seen yet: the same create works in a moment
    of_tier: bool = False  # the service tier that was asked for is what the provider refuses


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch as the provider describes it. Times are on the provider's clock."""

    provider_id: str
    ended: bool
    cancelling: bool
    count: int
    created_at: float
    expires_at: float | None
    ended_at: float | None  # may be there before `ended` is: its results are promised, and not named yet
    results: tuple[str, ...] | None  # where its results lie, to be read in this order; None: not (yet, or any more)
    archived: bool
    nonce: str | None = None  # from its metadata, empty for a stranger's; None where the provider has no such thing
    failure: Refusal | None = None  # it ended as a whole before anything was bought
    files: tuple[str, ...] = ()  # what lies at the provider because of this batch, and may be deleted after it
    source: str | None = None  # the upload that it was made of, where it says so


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
    pace: float | None = None  # seconds between two looks at a batch, where the provider asks for it


class News(Value, frozen=True, gc=False):
    """A webhook whose signature is good. `batch` names the batch that it speaks of, if it does."""

    id: str
    batch: str | None


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
    def seller(self) -> str:
        """Whose models and prices these are: providers of one dialect differ in that."""
        ...

    @property
    def query(self) -> str:
        """What stands behind the path of every request, unless the client said it already; mostly nothing."""
        ...

    @property
    def limits(self) -> Limits: ...
    @property
    def mixes_models(self) -> bool:
        """Whether calls of several models may share a batch."""
        ...

    @property
    def tells_nonces(self) -> bool:
        """Whether a LIST, with the help of `naming`, says of each batch which nonce it was created with: then nobody is
        ever a suspect."""
        ...

    @property
    def pages_results(self) -> bool:
        """Whether results come in pages, for `result_page` to read, and not in lines."""
        ...

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
    def flexed(self, body: bytes) -> bytes:
        """A body as it asks for the lane `flex`: one member is set, every other byte stays."""
        ...

    def line_overhead(self, endpoint: str) -> int:
        """Bytes that a call costs in a create beyond its body."""
        ...

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        """A call as a batch carries it: as many bytes more than its body for every call of an endpoint."""
        ...

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        """What stands before, between and after the lines: of the upload where there is one, else of the create."""
        ...

    def upload(self, headers: Headers, nonce: str) -> Ask | None:
        """The request that brings the lines to the provider before anything is bought; None where the create itself
        carries them."""
        ...

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        """The purchase. `file_id` names what was uploaded; without an upload the lines are the body. `model` is that of
        all its calls, where the provider does not mix them."""
        ...

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask: ...
    def naming(self, headers: Headers) -> Ask | None:
        """Asks for the uploads, where only their names carry the nonce; None where batches tell it themselves."""
        ...

    def retrieve(self, headers: Headers, provider_id: str) -> Ask: ...
    def cancel(self, headers: Headers, provider_id: str) -> Ask: ...
    def results_at(self, provider_id: str) -> tuple[str, ...] | None:
        """Where the results of a batch lie, as far as its id tells; None where only its report does."""
        ...

    def results(self, headers: Headers, place: str) -> Ask:
        """One of the places that `results_at` or a report named."""
        ...

    def forget(self, headers: Headers, file_id: str) -> Ask | None:
        """Deletes one of a report's `files`; None where there are none to delete."""
        ...

    # from the provider
    def uploaded(self, body: bytes) -> str:
        """The id of what was uploaded."""
        ...

    def report(self, body: bytes) -> BatchReport: ...
    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        """The batches of the LIST page at the cursor `after`, newest first, and the cursor of the next page if there is
        one."""
        ...

    def nonces(self, body: bytes) -> dict[str, str]:
        """The nonces of uploads, by their ids, from what `naming` asked for."""
        ...

    def result_page(self, place: str, body: bytes) -> tuple[list[bytes], str | None]:
        """The lines of one page of results, and the place of the next page if there is one."""
        ...

    def result_line(self, line: bytes) -> ResultLine: ...
    def usage(self, body: bytes) -> Usage | None:
        """Usage of a finished answer; None when it says none."""
        ...

    def usage_tap(self) -> UsageTap: ...
    def news(self, secret: str, headers: Headers, body: bytes, now: float) -> News:
        """What a webhook says, once its signature is found to be good: `KeyRefused` where it is not."""
        ...

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
