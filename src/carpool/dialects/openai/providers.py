"""OpenAI-compatible providers. Each is a row (`CompatibleProvider`) in which every difference from OpenAI is data.

A row lists what differs from OpenAI; everything else is the same. What is not known for sure about a provider has the
safe value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from carpool.core.errors import ConfigError
from carpool.core.model import Headers
from carpool.core.ports import BatchLimits, Capability, ModelTable, Pricing
from carpool.dialects.openai.shapes import BatchShape, MistralShape, Shape, TogetherShape, XaiShape

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
MODERATIONS: Final = "/v1/moderations"

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
MB: Final = 1_000_000


class Paging(NamedTuple):
    """How batches are listed: the names of the query parameters and of the members of the response."""

    limit: str | None = "limit"
    cursor: str | None = "after"
    most: int = 100
    more: str = ""  # further query parameters
    items: str | None = "data"  # None: the response is the list
    next: Literal["last_id", "pagination_token", "page"] | None = "last_id"


_LIMITS: Final = BatchLimits(max_count=50_000, max_bytes=200 * MB, window=DAY, retention=30 * DAY)
_PAGING: Final = Paging()
_CREATE: Final[Mapping[str, str]] = MappingProxyType(
    {"input_file_id": "file", "endpoint": "endpoint", "completion_window": "window", "metadata": "metadata"}
)


@dataclass(frozen=True, slots=True)
class CompatibleProvider:
    name: str  # in the config
    display_name: str  # in messages
    seller: str  # in the table of prices
    home: str = ""  # its base URL
    path: str = ""  # added to a base URL without a path
    hosts: tuple[str, ...] = ()  # globs of hosts that identify it
    limits: BatchLimits = _LIMITS
    longest_window: float = DAY
    endpoints: frozenset[str] | None = None  # allowed in a batch; None: all that carpool supports
    max_line: int | None = None  # bytes of one call
    models: ModelTable = field(default=(), repr=False)
    pricing: Pricing = field(default=Pricing(), repr=False)
    headers: Headers = field(default=(), repr=False)  # on carpool's own requests
    key_headers: tuple[str, ...] = ("authorization",)  # where clients send their key, the usual one first

    # files
    uploads: str = "/v1/files"
    form: tuple[tuple[str, str], ...] = (("purpose", "batch"),)
    names_file: bool = False  # the upload form has a field for the file name, too

    # batches
    batches: str = "/v1/batches"
    cancel: str = "/cancel"
    paging: Paging = _PAGING
    plain_lines: bool = False  # a line has only an id and a body; the rest is set in the create
    create: Mapping[str, str] = field(default_factory=lambda: _CREATE)  # field of the create → its value in `Batches`
    wrapped: str | None = None  # the member of a create's response that holds the batch
    shape: type[Shape] = BatchShape
    nonce_in_file_name: bool = False  # the only place for a nonce
    pages_results: bool = False  # results are pages under the batch, not files
    api_version: str = ""  # query parameter of every request
    hooks: bool = False  # it sends signed webhooks

    # responses
    busy: frozenset[int] = frozenset()  # further statuses that mean "retry later"
    keyless: frozenset[int] = frozenset()  # further statuses of a wrong key
    reasoning_apart: bool = False  # the completion tokens don't include reasoning
    whole_calls: bool = False  # a stream sends a tool call in one piece
    closing: tuple[str, ...] = ()  # path of the usage in the last chunk of a stream, where it is always sent

    @property
    def query(self) -> str:
        return f"api-version={self.api_version}" if self.api_version else ""

    def with_window(self, seconds: float) -> CompatibleProvider:
        return replace(self, limits=replace(self.limits, window=seconds))


_FILE: Final = replace(_LIMITS, max_bytes=100 * MB)

_GPT: Final = Capability(context_tokens=922_000, output_tokens=128_000, cacheable_tokens=1024, flex=True)
_LONG_GPT: Final = replace(_GPT, context_tokens=1_050_000)
_OLDER_GPT: Final = Capability(cacheable_tokens=1024)
_NO_BATCH: Final = Capability(batch=False)

_MODELS: Final = (
    *((pattern, _NO_BATCH) for pattern in ("*-codex*", "*-chat-latest", "*-cyber*", "*daybreak*")),
    *((pattern, _NO_BATCH) for pattern in ("*realtime*", "*audio*", "*-transcribe*", "*-tts*")),
    *((pattern, Capability(stream=False)) for pattern in ("text-embedding-*", "*-moderation-*")),
    ("gpt-6.1-terra*", replace(_GPT, flex=False)),
    ("gpt-6*", _GPT),
    ("gpt-5.6*", _GPT),
    ("gpt-5.5*", _LONG_GPT),
    ("gpt-5.4*", _LONG_GPT),
    *((pattern, replace(_OLDER_GPT, flex=True)) for pattern in ("gpt-5*", "o3*", "o4-mini*")),
    ("gpt-4*", _OLDER_GPT),
)

OPENAI: Final = CompatibleProvider(
    "openai",
    "OpenAI",
    "openai",
    "https://api.openai.com/v1",
    hosts=("api.openai.com",),
    models=_MODELS,
    pricing=Pricing(
        free=("*-moderation-*",),
        tiered=True,
        batch_shares={f"text-embedding-3-{size}": Fraction(1, 2) for size in ("large", "small")},
    ),
    hooks=True,
)

AZURE: Final = CompatibleProvider(
    "azure",
    "Azure OpenAI",
    "azure",
    path="/openai/v1",
    hosts=("*.openai.azure.com", "*.cognitiveservices.azure.com", "*.services.ai.azure.com"),
    # Its docs say both 100,000 and 50,000 calls; jobs don't expire, and polls should be a minute apart.
    limits=BatchLimits(max_count=50_000, max_bytes=200 * MB, window=DAY, retention=14 * DAY, pace=60.0),
    endpoints=frozenset({CHAT, RESPONSES}),
    # Flex is a preview for some kinds of deployment: off unless the config enables it.
    models=tuple((pattern, replace(row, flex=False)) for pattern, row in _MODELS),
    pricing=Pricing(tiered=True),
    key_headers=("api-key", "authorization"),
    # A resource has room for 500 files, and for 10,000 that expire.
    form=(("purpose", "batch"), ("expires_after[seconds]", "1209600"), ("expires_after[anchor]", "created_at")),
)

GROQ: Final = CompatibleProvider(
    "groq",
    "Groq",
    "groq",
    "https://api.groq.com/openai/v1",
    "/openai/v1",
    ("api.groq.com",),
    limits=_FILE,
    longest_window=7 * DAY,
    endpoints=frozenset({CHAT}),
    models=(("*", Capability(flex_price=1.0)),),
    pricing=Pricing(flex_at_now=True, batch_share=Fraction(1, 2)),
    paging=Paging(limit=None),
    busy=frozenset({498}),
    closing=("x_groq", "usage"),
)

TOGETHER: Final = CompatibleProvider(
    "together",
    "Together",
    "together",
    "https://api.together.ai/v1",
    hosts=("api.together.ai", "api.together.xyz"),
    limits=replace(_FILE, pace=30.0),
    endpoints=frozenset({CHAT}),
    max_line=10 * MB,
    # A batch at the price of `now` has no benefit, so most models don't use one.
    models=(("meta-llama/*Llama-3.3-70B-Instruct-Turbo", Capability()), ("*", _NO_BATCH)),
    headers=(("user-agent", "Mozilla/5.0 (compatible; carpool)"),),  # other user agents may be rejected
    uploads="/v1/files/upload",
    form=(("purpose", "batch-api"),),
    names_file=True,
    paging=Paging(limit=None, cursor=None, items=None, next=None),
    plain_lines=True,
    create={"input_file_id": "file", "endpoint": "endpoint", "completion_window": "window"},
    wrapped="job",
    shape=TogetherShape,
    nonce_in_file_name=True,
)

MISTRAL: Final = CompatibleProvider(
    "mistral",
    "Mistral",
    "mistral",
    "https://api.mistral.ai/v1",
    hosts=("api.mistral.ai",),
    # Its docs say both 100,000 calls and a million; results kept for 24 hours after the end, and forever.
    limits=BatchLimits(max_count=100_000, max_bytes=512 * MB, window=DAY, retention=2 * DAY),
    longest_window=7 * DAY - HOUR,
    endpoints=frozenset({CHAT, EMBEDDINGS, MODERATIONS}),
    models=(("*-embed*", Capability(stream=False)),),
    pricing=Pricing(names={"mistral-large-latest": "mistral-large-2512"}, batch_share=Fraction(1, 2)),
    batches="/v1/batch/jobs",
    paging=Paging("page_size", "page", more="order_by=-created", next="page"),
    plain_lines=True,
    create={
        "input_files": "files",
        "endpoint": "endpoint",
        "model": "model",
        "metadata": "metadata",
        "timeout_hours": "hours",
    },
    shape=MistralShape,
    whole_calls=True,
    closing=("usage",),
)

XAI: Final = CompatibleProvider(
    "xai",
    "xAI",
    "x-ai",
    "https://api.x.ai/v1",
    hosts=("api.x.ai",),
    endpoints=frozenset({CHAT}),  # lines for Responses would be answered as chat
    max_line=25 * MB,
    models=(*((pattern, Capability(batch_price=0.8)) for pattern in ("grok-4.3*", "grok-4.20*")), ("*", _NO_BATCH)),
    cancel=":cancel",
    paging=Paging(cursor="pagination_token", items="batches", next="pagination_token"),
    create={"name": "name", "input_file_id": "file"},
    shape=XaiShape,
    pages_results=True,
    keyless=frozenset({400}),
    reasoning_apart=True,
)

COMPATIBLE_PROVIDERS: Final[Mapping[str, CompatibleProvider]] = MappingProxyType(
    {row.name: row for row in (OPENAI, AZURE, GROQ, TOGETHER, MISTRAL, XAI)}
)


def compatible_provider(base_url: str, named: str | None = None) -> CompatibleProvider:
    """The provider of that name, else the one with this base URL. An unknown one is treated like OpenAI."""
    if named is not None and named not in COMPATIBLE_PROVIDERS:
        known = ", ".join(sorted(COMPATIBLE_PROVIDERS))
        raise ConfigError(f"carpool knows no OpenAI-compatible provider {named[:40]!r}, only these: {known}.")
    if named is not None:
        return COMPATIBLE_PROVIDERS[named]
    host = (urlsplit(base_url).hostname or "").lower()
    rows = (row for row in COMPATIBLE_PROVIDERS.values() if any(fnmatchcase(host, pattern) for pattern in row.hosts))
    return next(rows, OPENAI)
