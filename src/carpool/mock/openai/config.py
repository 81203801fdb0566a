"""Settings of the OpenAI mock, in addition to those that both mocks share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from carpool.mock.core.latency import Constant, Latency
from carpool.mock.openai.providers import OPENAI, TABLE, Habits

DAY = 86_400.0
_AT_ONCE = Constant(0.0)
_NO_LIMITS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class OpenAIConfig:
    # Time.
    batch_latency: Latency | None = None
    """From creation to a request's completion; None: as in the common settings."""
    validation_latency: Latency = _AT_ONCE
    """From creation until the file was read: the batch then fails or begins."""
    finalizing_latency: Latency = _AT_ONCE
    """From the last request's end until the result files are there."""
    flex_latency: Latency | None = None
    """Of synchronous calls in the flex tier; None: as all others."""
    # Limits.
    creates_per_hour: int | None = 2000
    max_batch_requests: int = 50_000
    max_embedding_inputs: int = 50_000
    max_file_bytes: int = 200_000_000
    """A batch with a larger file fails."""
    max_upload_bytes: int = 209_715_200
    """A larger file is refused when it is uploaded."""
    enqueued_tokens: Mapping[str, int] = field(default_factory=lambda: _NO_LIMITS)
    """Prompt tokens that may be in unfinished batches, by model; `*` is for the models not named."""
    keep_files_s: float = 30 * DAY
    # OpenAI-compatible providers.
    vendor: str = "openai"
    """The provider that it imitates: a row of `providers.TABLE`."""
    windows: frozenset[str] | None = None
    """Completion windows that a create may ask for; None: those of the vendor. They are not kept: `expiry_s` says
    when a batch expires."""
    api_version: str | None = None
    """The query that every request must have, as at Azure; None: none."""
    no_batches: int | None = None
    """The status of all responses about batches, as from most servers with this API."""
    # Webhooks.
    webhook_url: str | None = None
    """None: no webhooks are sent. Can be set later, with `tell`."""
    webhook_secret: str = "whsec_Y2FycG9vbC1tb2NrLXdlYmhvb2stc2VjcmV0"  # noqa: S105 - the mock's, known to everyone
    webhook_latency: Latency = _AT_ONCE
    webhook_attempts: int = 5
    webhook_backoff_s: float = 1.0
    """Before the second attempt; doubled before each further one."""

    def __post_init__(self) -> None:
        if self.vendor not in TABLE:
            raise ValueError(f"there is no vendor {self.vendor!r}, only {', '.join(TABLE)}")

    @property
    def habits(self) -> Habits:
        return TABLE[self.vendor]

    @property
    def most_requests(self) -> int:
        chosen = self.max_batch_requests
        return self.habits.max_requests if chosen == OPENAI.max_requests else chosen

    @property
    def most_bytes(self) -> int:
        return self.habits.max_bytes if self.max_file_bytes == OPENAI.max_bytes else self.max_file_bytes

    def token_limit(self, model: str) -> int | None:
        return self.enqueued_tokens.get(model, self.enqueued_tokens.get("*"))
