"""The differences of OpenAI-compatible providers, as their documentation and captures have them: one row for each.

A row is data and a few small functions of `views` and `orders`; what it does not mention is as at OpenAI.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from carpool.mock.core.errors import ApiError
from carpool.mock.openai import orders, views
from carpool.mock.openai.errors import error_body, flat_body, flat_status, status_of, text_body, text_status
from carpool.mock.openai.orders import Order

MB = 1_000_000
CHAT = "/v1/chat/completions"
EVERYTHING = frozenset({CHAT, "/v1/responses", "/v1/embeddings", "/v1/completions", "/v1/moderations"})

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Habits:
    # Batches.
    endpoints: frozenset[str] = EVERYTHING
    windows: frozenset[str] = frozenset({"24h"})
    max_requests: int = 50_000
    max_bytes: int = 200 * MB
    max_line: int | None = None
    plain_lines: bool = False
    """A line has neither method nor URL."""
    # Paths.
    uploads: str = "/v1/files"
    batches: str = "/v1/batches"
    cancel: str = "/cancel"
    # Vocabulary.
    purpose: str = "batch"
    asks_file_name: bool = False
    """The form must have a field with the file's name, which is the one that counts."""
    asks_browser: bool = False
    """The batch endpoints refuse clients that do not look like a browser."""
    order: Callable[[Any, frozenset[str], frozenset[str]], Order] = orders.openai
    view: Callable[[View], View] = views.openai
    created: Callable[[View], tuple[View, int]] = views.bare
    listed: Callable[[list[View], bool, str | None], Any] = views.page
    line: Callable[[str, str, Any, Any], View | None] = views.line
    """None if the provider does not document such a request."""
    status: Callable[[ApiError], int] = status_of
    error: Callable[[ApiError], View] = error_body
    pages_results: bool = False
    error_file_always: bool = False
    # Answers.
    also: frozenset[str] = frozenset()
    """Parameters of chat in addition to OpenAI's."""
    whole_calls: bool = False
    """Streamed tool calls come in one piece."""
    closing: tuple[str, ...] = ()
    """Whether the last chunk of every stream has the usage."""
    reasoning_apart: bool = False
    flex_full: int = 429
    # Prices.
    batch_percent: int = 50
    prices_cached_in_batches: bool = True
    """False: cached input costs the same in a batch as elsewhere."""


OPENAI = Habits()
TABLE: Mapping[str, Habits] = MappingProxyType(
    {
        "openai": OPENAI,
        "azure": Habits(
            endpoints=EVERYTHING - {"/v1/embeddings"},
            view=views.azure,
            error_file_always=True,
        ),
        "groq": Habits(
            endpoints=frozenset({CHAT}),
            windows=frozenset({"24h", *(f"{days}d" for days in range(1, 8))}),
            max_bytes=100 * MB,
            flex_full=498,
            closing=("x_groq", "usage"),
            prices_cached_in_batches=False,
        ),
        "together": Habits(
            endpoints=frozenset({CHAT}),
            max_bytes=100 * MB,
            max_line=10 * MB,
            plain_lines=True,
            uploads="/v1/files/upload",
            purpose="batch-api",
            asks_file_name=True,
            asks_browser=True,
            order=orders.together,
            view=views.together,
            created=views.wrapped,
            listed=views.array,
            line=views.together_line,
        ),
        "mistral": Habits(
            endpoints=frozenset({CHAT, "/v1/embeddings", "/v1/moderations"}),
            max_requests=100_000,
            max_bytes=512 * MB,
            plain_lines=True,
            batches="/v1/batch/jobs",
            order=orders.mistral,
            view=views.mistral,
            listed=views.numbered,
            line=views.ran_line,
            status=flat_status,
            error=flat_body,
            also=frozenset({"safe_prompt", "random_seed", "prompt_mode", "guardrails"}),
            whole_calls=True,
            closing=("usage",),
        ),
        "xai": Habits(
            endpoints=frozenset({CHAT}),
            max_line=25 * MB,
            cancel=":cancel",
            order=orders.xai,
            view=views.xai,
            listed=views.tokened,
            line=views.xai_line,
            status=text_status,
            error=text_body,
            pages_results=True,
            reasoning_apart=True,
            batch_percent=80,
        ),
    }
)
