"""The knobs of the stand-in for OpenAI, beside those that both stand-ins share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from carpool.mock.latency import Constant, Latency

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
    # Relatives.
    windows: frozenset[str] = frozenset({"24h"})
    """Completion windows that a create may ask for. They are not kept: `expiry_s` says when a batch expires."""
    azure: bool = False
    """Batches look as Azure shows them, and every one leaves an error file, if an empty one."""
    # Webhooks.
    webhook_url: str | None = None
    """None: nobody is told. Can be set later, with `tell`."""
    webhook_secret: str = "whsec_Y2FycG9vbC1tb2NrLXdlYmhvb2stc2VjcmV0"  # noqa: S105 - a stand-in's, known to everyone
    webhook_latency: Latency = _AT_ONCE
    webhook_attempts: int = 5
    webhook_backoff_s: float = 1.0
    """Before the second attempt; doubled before each further one."""

    def token_limit(self, model: str) -> int | None:
        return self.enqueued_tokens.get(model, self.enqueued_tokens.get("*"))
