"""The dialect port: the API format of a family of providers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import Any, Protocol

from msgspec import Raw

from carpool.core.model import NONCE_LETTERS, TICKET_LETTERS, CachePlan, Headers, Lane, PromptChain, Usage, Value


class RawRequest(Value, frozen=True, gc=False):
    """An HTTP request as a frontend received it. Header names in lower case."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes


class Document(Protocol):
    """A decoded body: its members decoded, and as the client sent them."""

    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def members(self) -> Mapping[str, Raw]: ...

    def canonical(self, without: str) -> bytes:
        """The body in canonical JSON, without one member. Expensive, so only stored calls need it."""


class Parsed(Value, frozen=True, gc=False):
    """A parsed request."""

    endpoint: str
    model: str
    body: bytes  # without `stream`; otherwise the client's own bytes
    stream: bool
    max_output_tokens: int
    headers: Headers  # to be sent upstream with the call
    secret: Headers  # the credential headers, as the client sent them
    unbatchable: str | None  # why this can't go into a batch
    document: Document  # the decoded body; large, so no Parsed is kept while a call waits
    retry: bool
    conversation: int | None = None  # the same for all its turns; None if the client marks nothing for the cache
    tool_turn: bool = False  # the last message carries tool results
    flexible: bool = False  # the request itself does not rule out lane `flex`
    session: str = ""  # the client's own id of its session; empty if it sends none


class Ask(Value, frozen=True, gc=False):
    """A request to the provider, before base URL and credential are added."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a provider refused: from a response with a status of 400 or more, or from a batch that failed as a whole."""

    status: int
    message: str
    retryable: bool  # the same request may succeed later
    retry_after: float | None = None
    cannot_batch: bool = False  # this credential can't use batches; with `of_model`, this model can't
    too_large: bool = False
    of_model: bool = False
    queue_full: bool = False  # the provider's queue for this model is full until running batches end
    queue_tokens: int | None = None  # the capacity of that queue, if the provider states it
    file_not_ready: bool = False  # a file that was just uploaded is not visible yet: retry the same create shortly
    of_tier: bool = False  # the provider refuses the requested service tier


@dataclass(frozen=True, slots=True)
class BatchReport:
    """A batch as the provider describes it. Times are on the provider's clock."""

    provider_id: str
    ended: bool
    cancelling: bool
    count: int
    created_at: float
    expires_at: float | None
    ended_at: float | None  # may be set before `ended`: the batch is done, but its results are not available yet
    results: tuple[str, ...] | None  # locations of its results, in reading order; None: not available (yet or any more)
    archived: bool
    nonce: str | None = None  # from its metadata; empty if not created by us; None if the provider has no metadata
    failure: Refusal | None = None  # it failed as a whole before anything was bought
    files: tuple[str, ...] = ()  # files at the provider that belong to this batch and may be deleted afterwards
    source: str | None = None  # the uploaded file that it was created from, if known


class ResultLine(Value, frozen=True, gc=False):
    """One line of a batch's results. `custom_id` is checked by the engine, not here."""

    custom_id: str
    result: str  # succeeded | errored | canceled | expired
    status: int
    body: bytes  # the message, or the provider-shaped error
    model: str  # as named in the answer; empty without an answer
    usage: Usage | None
    retryable: bool


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_count: int
    max_bytes: int
    window: float  # seconds after which the provider expires a batch
    retention: float  # seconds for which it keeps results
    pace: float | None = None  # poll interval in seconds, if the provider prescribes one


class WebhookEvent(Value, frozen=True, gc=False):
    """A webhook with a valid signature. `batch` is the id of the batch it is about, if any."""

    id: str
    batch: str | None


class Allowance(Value, frozen=True, gc=False):
    """One rate limit as stated in a response: the limit, how much of it remains, and, if stated, the seconds until it
    is fully replenished."""

    limit: int
    remaining: int
    full_in: float | None = None


class Allowances(Value, frozen=True, gc=False):
    """The rate limits of an account, as stated in a response on `now`."""

    requests: Allowance | None = None
    tokens: Allowance | None = None


class ResponseEnd(Value, frozen=True, gc=False):
    """What was read from a response by the time it ended or was cut off.

    `answered`: everything the client needs has passed, whatever happened to the connection afterwards. `final`: the
    usage is what is billed; otherwise it is only what was reported so far.
    """

    usage: Usage | None
    answered: bool
    final: bool


class UsageTap(Protocol):
    """Extracts the usage from a streamed response as it passes, without buffering it."""

    def feed(self, chunk: bytes) -> None: ...
    def usage(self) -> Usage | None:
        """The usage known so far; None before the provider reported any."""

    def end(self, whole: bool) -> ResponseEnd:
        """Ends the stream. `whole`: the body is complete, not cut off."""


class Claim(IntEnum):
    """How much in a request tells that it is for the providers of a dialect."""

    NONE = 0
    POSSIBLE = 1  # a path that several have, or any path and a key that several have
    KEY = 2  # a key that only they have
    PATH = 3  # their path, which other providers may have copied
    OWN = 4  # a path or a header that only they have


@dataclass(frozen=True, slots=True)
class Capability:
    """The capabilities of one model. None means unknown."""

    batch: bool = True
    flex: bool = False
    stream: bool = True
    context_tokens: int | None = None
    output_tokens: int | None = None
    cacheable_tokens: int | None = None  # a shorter prefix is not cached
    batch_price: float = 0.5  # price in a batch relative to `now`
    flex_price: float = 0.5  # price on `flex` relative to `now`


@dataclass(frozen=True, slots=True)
class Pricing:
    """What genai-prices lacks about the prices of a seller."""

    names: Mapping[str, str] = field(default_factory=dict)  # of models that the table maps to older ones
    free: tuple[str, ...] = ()  # globs of models; the table mentions this only in its descriptions
    tiered: bool = False  # answers state the service tier
    flex_at_now: bool = False  # flex means higher limits at the price of `now`
    batch_shares: Mapping[str, Fraction] = field(default_factory=dict)  # batch prices relative to `now`, by model
    # The same for all models. The price of cache reads is then unknown: no provider states whether the batch discount
    # and the cache discount combine.
    batch_share: Fraction | None = None


ModelTable = tuple[tuple[str, Capability], ...]  # rows of a glob of names; the first that matches applies


# ------------------------------------------------------------ optional features
# What only some providers have: an attribute of their dialect, which is None for the others.


class FlexTier(Protocol):
    """The lane `flex`: synchronous and cheaper, but the provider may have no room."""

    def requested(self, body: bytes) -> bytes:
        """The body with the lane requested: one member is set, all other bytes stay the same."""


class EditedBody(Value, frozen=True, gc=False):
    """A body with the edits of a plan; all other bytes are as they came. `edits` says what was changed, shortly."""

    body: bytes
    edits: str


class CacheEdits(Protocol):
    """What may be changed in a body for the sake of the prompt cache."""

    def edited(self, body: bytes, plan: CachePlan) -> EditedBody | None:
        """The body with as much of the plan as is allowed; None if nothing of it is."""

    def ping(self, body: bytes) -> bytes | None:
        """A request that only renews the cached prefix of this one; None if the provider would refuse it."""

    def blamed(self, status: int, body: bytes) -> bool:
        """Whether an error may be due to an edit."""


class Uploads(Protocol):
    """The lines of a batch are uploaded as a file, before a create that names it. That buys nothing."""

    def upload(self, headers: Headers, nonce: str) -> Ask:
        """Returns the request for the upload. Its body is the lines, in the dialect's `frame`."""

    def file_id(self, body: bytes) -> str:
        """The id of the uploaded file, from the response to `upload`."""

    def delete(self, headers: Headers, file_id: str) -> Ask:
        """Returns the request that deletes one of a report's `files`."""


class UploadNames(Protocol):
    """Batches carry no nonce, but the names of the uploads that they were created from do."""

    def list_files(self, headers: Headers) -> Ask: ...
    def nonces(self, body: bytes) -> dict[str, str]:
        """The nonces of uploads by file id, from the response to `list_files`."""


class ResultPages(Protocol):
    """Results come in pages instead of lines."""

    def lines(self, place: str, body: bytes) -> tuple[list[bytes], str | None]:
        """The lines of the page from `place`, and the location of the next page, if any."""


class WebhookReader(Protocol):
    """The provider posts signed events about batches."""

    def read(self, secret: str, headers: Headers, body: bytes, now: float) -> WebhookEvent:
        """Verifies the signature of a webhook and parses it; raises `KeyRefused` if the signature is invalid."""


# ------------------------------------------------------------ the dialect


class Dialect(Protocol):
    """The API format of a family of providers: pure translation between bytes and values. No I/O, no clock, no state.

    Input that can't be parsed raises `BadCall` if it is from a client, `MalformedResponse` if it is from a provider.
    Dialects inherit from this class: what it defines here is right for a provider that lacks the feature. Features
    that need requests of their own are objects, None where they are missing: ask `dialect.uploads is not None`."""

    __hash__ = object.__hash__  # type: ignore[misc]  # dialects are keys of caches
    name: str
    seller: str  # the provider whose prices apply; providers that share a dialect differ in this
    models: ModelTable = ()
    pricing: Pricing = Pricing()
    limits: BatchLimits
    key_headers: tuple[str, ...]  # the headers in which clients send their key, the usual one first
    query: str = ""  # added to every request unless the client sent it already
    mixes_models: bool = False  # whether calls of several models may share a batch
    shows_nonces: bool = False  # LIST or `upload_names` reveals the nonce of each batch: there are never suspects
    keep_alive: bytes  # what keeps a streaming client connected, and what its SDK ignores

    # optional features
    flex: FlexTier | None = None
    caching: CacheEdits | None = None
    uploads: Uploads | None = None  # None: the create carries the lines
    upload_names: UploadNames | None = None
    result_pages: ResultPages | None = None  # None: results are lines
    webhooks: WebhookReader | None = None

    # the public provider; empty if there is none
    home: str = ""  # its base URL
    key_variable: str = ""  # the environment variable from which its SDKs take the key,
    url_variable: str = ""  # and the base URL
    vendor: str = ""  # which provider it is, where compatible ones share the dialect

    # what a client without access to the whole account may do
    open_paths: frozenset[str] = frozenset()  # endpoints that answer and store nothing, by POST
    free_paths: frozenset[str] = frozenset()  # those of them that cost nothing
    models_path: str = "/v1/models"  # lists the models, for everybody
    payer_headers: frozenset[str] = frozenset()  # headers that decide who pays

    # clients
    subagent_headers: frozenset[str] = frozenset()  # clients send them with the requests of their subagents
    upgrade_paths: frozenset[str] = frozenset()  # where clients try a WebSocket, and fall back to HTTP after a 426
    usual_headers: Headers = ()  # every client sends them, so `serve --check` adds them to a body without headers

    # from clients
    def claim(self, path: str, headers: Headers) -> Claim:
        """How surely a request that names no provider is for one of this dialect."""
        ...

    def endpoint_of(self, body: Mapping[str, Any]) -> tuple[Claim, str]:
        """The endpoint of a body without a path, for `serve --check`, and how surely it is one of this dialect."""
        return Claim.NONE, ""

    def completed(self, path: str) -> str:
        """Adds the version to a path that has none because the base URLs of this dialect usually have it."""
        return path

    def handles(self, method: str, path: str) -> bool:
        """Whether `parse` understands this endpoint."""

    def parse(self, raw: RawRequest) -> Parsed: ...
    def prompt_chain(self, parsed: Parsed) -> PromptChain | None:
        """The positions at which prefixes of a prompt end that calls may share; None if this dialect can't tell."""
        return None

    def secret(self, headers: Headers) -> Headers:
        """Returns the client's credential headers, as `parse` would."""

    def key_header(self, headers: Headers) -> str:
        """Picks the one of `key_headers` that fits the client's other headers, for a key that carpool supplies."""
        return self.key_headers[0]

    def estimate_tokens(self, body: bytes) -> int:
        return (len(body) + 3) // 4

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask: ...
    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        """Returns a call as a line of a batch. The overhead over the body is the same for all calls of an endpoint."""

    def line_overhead(self, endpoint: str) -> int:
        """Bytes that a call adds to a batch beyond its body: its line with an id of carpool, and a separator."""
        return len(self.line(endpoint, "x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"")) + 1

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        """Returns what goes before, between and after the lines of the upload if there is one, else of the create."""

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        """Returns the request that buys the batch. `file_id` is the uploaded file; without an upload the lines are the
        body. `model` is the model of all its calls, if the provider does not allow several."""

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask: ...
    def retrieve(self, headers: Headers, provider_id: str) -> Ask: ...
    def cancel(self, headers: Headers, provider_id: str) -> Ask: ...
    def results_at(self, provider_id: str) -> tuple[str, ...] | None:
        """The locations of a batch's results, if they follow from its id; None if only its report has them."""
        return None

    def results(self, headers: Headers, place: str) -> Ask:
        """Returns the request for one of the locations from `results_at` or a report."""

    # from the provider
    def report(self, body: bytes) -> BatchReport: ...
    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        """The batches of the LIST page at cursor `after`, newest first, and the cursor of the next page, if any."""

    def result_line(self, line: bytes) -> ResultLine: ...
    def usage(self, body: bytes) -> Usage | None:
        """Usage of a complete answer; None if it reports none."""

    def usage_tap(self) -> UsageTap: ...
    def surcharge(self, model: str, lane: Lane, geo: str | None, speed: str | None) -> Fraction | None:
        """The factor on the price of all tokens that genai-prices lacks; None for a combination without a price."""
        return Fraction(1)

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal: ...
    def requests_per_minute(self, headers: Headers) -> int | None:
        """The account's request limit, from the headers of a batch endpoint, if stated."""
        return None

    def allowances(self, headers: Headers) -> Allowances | None:
        """The account's rate limits, from the headers of a synchronous response; None if it states none."""
        return None

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes: ...
    def stream_options(self, body: bytes) -> str:
        """What a request asks of its stream beyond the answer, as a dialect-specific token; empty for nothing. `parse`
        removes such options from the body."""
        return ""

    def replay(self, body: bytes, stream_options: str = "") -> Iterator[bytes]:
        """Yields a complete answer as the event stream that a streaming client expects, one event at a time."""

    def stream_error(self, body: bytes) -> bytes: ...
