"""All settings of the mock."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from carpool.mock.core.faults import Faults
from carpool.mock.core.latency import Constant, Latency, RequestLatencies
from carpool.mock.openai.config import DAY, OpenAIConfig

MB = 1_000_000
_AT_ONCE = Constant(0.0)
_SOON = Constant(0.05)
_NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class MockConfig:
    seed: int = 0
    # Time.
    batch_latency: Latency = _SOON
    """From creation to a request's completion."""
    per_request: bool = False
    """False: one draw per batch, whose members run in parallel. True: one per request; the slowest ends the batch."""
    batch_execution: Latency = _AT_ONCE
    """The part of that time in which a request executes: a cancel no longer stops it then."""
    sync_latency: Latency = _AT_ONCE
    request_latencies: RequestLatencies | None = None
    """In place of the three above: each request has its own."""
    first_token_share: float = 0.3
    """The share of an execution after which the response has begun, and its cache entries can be read."""
    control_latency: Latency = _AT_ONCE
    """Answer time of the batch endpoints themselves."""
    cancel_latency: Latency = _AT_ONCE
    ping_s: float = 15.0
    # Who may call.
    keys: frozenset[str] | None = None
    """Accepted credentials; None accepts any."""
    workspaces: Mapping[str, str] = field(default_factory=lambda: _NOBODY)
    """Credential to workspace; a credential not named here has its own workspace."""
    keys_without_batch: frozenset[str] = frozenset()
    # Limits.
    batch_rpm: float | None = 1000.0
    sync_rpm: float | None = None
    sync_burst: float | None = None
    """How many synchronous requests may come at once; None: a minute's worth. 1,000 of 6,000 a minute: what an account
    of 1,000 a minute has, in a minute of ten seconds."""
    queue_limit: int | None = 200_000
    max_batch_requests: int = 100_000
    max_batch_bytes: int = 256 * MB
    max_message_bytes: int = 32 * MB
    expiry_s: float = DAY
    archive_s: float = 29 * DAY
    # Answers and caches.
    mean_output_tokens: int = 200
    batch_cache_hit_rate: float = 1.0
    """The probability that a batch request finds an existing cache entry."""
    faults: Faults = field(default_factory=Faults)
    organization: str = "org_mock"
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    """Settings of the OpenAI mock only."""

    def __post_init__(self) -> None:
        if self.mean_output_tokens < 1:
            raise ValueError("mean_output_tokens must be at least 1")
        for name in ("batch_cache_hit_rate", "first_token_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1")
