"""OpenAI's relatives: providers that speak its wire with habits of their own. Each difference is data in one row.

A row says what differs from OpenAI; whatever it does not mention is as there. What is not known for sure about a
provider has the value that is safe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, Literal, NamedTuple
from urllib.parse import urlsplit

from carpool.dialects.openai.shapes import MistralShape, OpenAIShape, Shape, TogetherShape, XaiShape
from carpool.model import Headers
from carpool.ports import Limits

CHAT: Final = "/v1/chat/completions"
RESPONSES: Final = "/v1/responses"
EMBEDDINGS: Final = "/v1/embeddings"
MODERATIONS: Final = "/v1/moderations"

HOUR: Final = 3600.0
DAY: Final = 24 * HOUR
MB: Final = 1_000_000


class Paging(NamedTuple):
    """How batches are listed: the names of the query's parts, and what the answer calls its own."""

    limit: str | None = "limit"
    cursor: str | None = "after"
    most: int = 100
    more: str = ""  # asked for as well
    items: str | None = "data"  # None: the answer is the list
    next: Literal["last_id", "pagination_token", "page"] | None = "last_id"


_LIMITS: Final = Limits(max_count=50_000, max_bytes=200 * MB, window=DAY, retention=30 * DAY)
_PAGING: Final = Paging()
_CREATE: Final[Mapping[str, str]] = MappingProxyType(
    {"input_file_id": "file", "endpoint": "endpoint", "completion_window": "window", "metadata": "metadata"}
)


@dataclass(frozen=True, slots=True)
class Relative:
    name: str  # as the config has it
    said: str  # as sentences have it
    seller: str  # as the tables of prices and of capabilities have it
    home: str = ""  # its base URL
    path: str = ""  # below a host that stands alone in the config
    hosts: tuple[str, ...] = ()  # of base URLs by which it is known
    limits: Limits = _LIMITS
    longest_window: float = DAY
    endpoints: frozenset[str] | None = None  # that may ride a batch; None: whatever is understood
    max_line: int | None = None  # bytes of one call
    headers: Headers = field(default=(), repr=False)  # on all that carpool asks by itself

    # files
    uploads: str = "/v1/files"
    form: tuple[tuple[str, str], ...] = (("purpose", "batch"),)
    names_file: bool = False  # the form has a field for the file's name, too

    # batches
    batches: str = "/v1/batches"
    cancel: str = "/cancel"
    paging: Paging = _PAGING
    plain_lines: bool = False  # a line is an id and a body: the batch says the rest
    create: Mapping[str, str] = field(default_factory=lambda: _CREATE)  # what a create says, as `Batches` words it
    wrapped: str | None = None  # the member of the answer to a create in which the batch stands
    shape: type[Shape] = OpenAIShape
    nonce_in_file_name: bool = False  # and nowhere else
    pages_results: bool = False  # which lie under the batch's own id, and not in files
    api_version: str = ""  # on every request, as a query
    hooks: bool = False  # it posts signed webhooks

    # answers
    busy: frozenset[int] = frozenset()  # statuses beyond everybody's that mean "later"
    keyless: frozenset[int] = frozenset()  # statuses of a wrong key beyond everybody's
    reasoning_apart: bool = False  # what was thought is not part of the completion's tokens
    whole_calls: bool = False  # in streams, a tool call comes in one piece
    closing: tuple[str, ...] = ()  # where the last chunk of a stream has the usage, without being asked for it

    @property
    def query(self) -> str:
        return f"api-version={self.api_version}" if self.api_version else ""

    def with_window(self, seconds: float) -> Relative:
        return replace(self, limits=replace(self.limits, window=seconds))


_FILE: Final = replace(_LIMITS, max_bytes=100 * MB)

OPENAI: Final = Relative(
    "openai", "OpenAI", "openai", "https://api.openai.com/v1", hosts=("api.openai.com",), hooks=True
)

AZURE: Final = Relative(
    "azure",
    "Azure OpenAI",
    "azure",
    path="/openai/v1",
    hosts=("*.openai.azure.com", "*.cognitiveservices.azure.com", "*.services.ai.azure.com"),
    # Its pages say 100,000 calls and 50,000; jobs do not expire, and looks are asked to be a minute apart.
    limits=Limits(max_count=50_000, max_bytes=200 * MB, window=DAY, retention=14 * DAY, pace=60.0),
    endpoints=frozenset({CHAT, RESPONSES}),
    # A resource has room for 500 files, and for 10,000 that expire.
    form=(("purpose", "batch"), ("expires_after[seconds]", "1209600"), ("expires_after[anchor]", "created_at")),
)

GROQ: Final = Relative(
    "groq",
    "Groq",
    "groq",
    "https://api.groq.com/openai/v1",
    "/openai/v1",
    ("api.groq.com",),
    limits=_FILE,
    longest_window=7 * DAY,
    endpoints=frozenset({CHAT}),
    paging=Paging(limit=None),
    busy=frozenset({498}),
    closing=("x_groq", "usage"),
)

TOGETHER: Final = Relative(
    "together",
    "Together",
    "together",
    "https://api.together.ai/v1",
    hosts=("api.together.ai", "api.together.xyz"),
    limits=replace(_FILE, pace=30.0),
    endpoints=frozenset({CHAT}),
    max_line=10 * MB,
    headers=(("user-agent", "Mozilla/5.0 (compatible; carpool)"),),  # others may be turned away at its door
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

MISTRAL: Final = Relative(
    "mistral",
    "Mistral",
    "mistral",
    "https://api.mistral.ai/v1",
    hosts=("api.mistral.ai",),
    # Its pages say 100,000 calls and a million; results for 24 hours after the end, and for ever.
    limits=Limits(max_count=100_000, max_bytes=512 * MB, window=DAY, retention=2 * DAY),
    longest_window=7 * DAY - HOUR,
    endpoints=frozenset({CHAT, EMBEDDINGS, MODERATIONS}),
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

XAI: Final = Relative(
    "xai",
    "xAI",
    "x-ai",
    "https://api.x.ai/v1",
    hosts=("api.x.ai",),
    endpoints=frozenset({CHAT}),  # lines of Responses would be answered as chat
    max_line=25 * MB,
    cancel=":cancel",
    paging=Paging(cursor="pagination_token", items="batches", next="pagination_token"),
    create={"name": "name", "input_file_id": "file"},
    shape=XaiShape,
    pages_results=True,
    keyless=frozenset({400}),
    reasoning_apart=True,
)

RELATIVES: Final[Mapping[str, Relative]] = MappingProxyType(
    {one.name: one for one in (OPENAI, AZURE, GROQ, TOGETHER, MISTRAL, XAI)}
)


def recognised(base_url: str) -> Relative:
    """Whose base URL this is; one that nobody is known by is taken to be as OpenAI is."""
    host = (urlsplit(base_url).hostname or "").lower()
    known = (one for one in RELATIVES.values() if any(fnmatchcase(host, pattern) for pattern in one.hosts))
    return next(known, OPENAI)
