"""Events about batches and calls, for hooks, logs and statistics. They never contain a body or a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from carpool.core.model import Lane
from carpool.core.tracebacks import error_name

log = logging.getLogger("carpool.events")


@dataclass(frozen=True, slots=True)
class Event:
    """`credential` owns the call or batch; empty if the event concerns none, or all."""

    at: float
    credential: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class CallAdmitted(Event):
    ticket: str
    lane: Lane
    reason: str


@dataclass(frozen=True, slots=True)
class CallSettled(Event):
    ticket: str
    lane: Lane
    kind: str
    status: int
    wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class CallRescued(Event):
    ticket: str
    batch: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class BatchSubmitted(Event):
    batch: int
    provider_id: str
    count: int


@dataclass(frozen=True, slots=True)
class BatchRefused(Event):
    batch: int
    count: int
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchUnknown(Event):
    """The create may have been bought. The outcome is being reconciled."""

    batch: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchAbandoned(Event):
    batch: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchFound(Event):
    """An unfinished batch of an engine that is gone, after a restart or another's crash. It continues here."""

    batch: int
    provider_id: str
    count: int
    state: str


@dataclass(frozen=True, slots=True)
class BatchLate(Event):
    """Its first call can't wait any longer and goes on `now`. If none can wait, the batch is cancelled first."""

    batch: int
    provider_id: str
    count: int


@dataclass(frozen=True, slots=True)
class BatchEnded(Event):
    batch: int
    provider_id: str
    took_s: float


@dataclass(frozen=True, slots=True)
class BatchCollected(Event):
    batch: int
    provider_id: str
    results: dict[str, int] = field(default_factory=dict)  # succeeded, errored, expired, canceled, missing, stray


@dataclass(frozen=True, slots=True)
class BatchLost(Event):
    """The provider has lost a batch that was bought, or its results. `count` of its calls are bought again."""

    batch: int
    provider_id: str
    reason: str
    count: int = 0


@dataclass(frozen=True, slots=True)
class RetentionNear(Event):
    """The results of a batch are not collected yet, and the provider will soon drop them."""

    batch: int
    provider_id: str
    drops_at: float


@dataclass(frozen=True, slots=True)
class FailureRateHigh(Event):
    rate: float
    limit: float
    calls: int


@dataclass(frozen=True, slots=True)
class AccountSlowed(Event):
    """The provider rate limited an account. Its calls to this model wait, and resume gradually after the pause."""

    account: str
    provider: str
    model: str
    status: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """The provider failed repeatedly: it gets no requests for `pause_s`, and then one call at a time."""

    account: str
    provider: str
    pause_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class BreakerClosed(Event):
    """The provider answers again."""

    account: str
    provider: str


@dataclass(frozen=True, slots=True)
class Trouble(Event):
    """Something failed and will be retried."""

    doing: str
    reason: str


@dataclass(frozen=True, slots=True)
class TroubleBegan(Event):
    """Something stopped working, or fails in another way than before. Reported once, however often it is retried.

    `doing` is empty if the provider can't be reached at all, `provider` if the trouble is carpool's own. `then` says
    what happens to the calls."""

    doing: str
    reason: str
    since: float
    tries: int = 1
    provider: str = ""
    then: str = ""


@dataclass(frozen=True, slots=True)
class TroubleOver(Event):
    """It works again."""

    doing: str
    since: float
    tries: int
    provider: str = ""


Hook = Callable[[Event], object]


class EventHooks:
    """Passes every event to every hook. A hook that fails is logged and does no harm."""

    def __init__(self, hooks: tuple[Hook, ...] = ()) -> None:
        self._hooks = list(hooks)

    def add(self, hook: Hook) -> None:
        self._hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        self._hooks.remove(hook)

    @property
    def heard(self) -> bool:
        """Whether anybody listens. Events for every single call are built only then."""
        return bool(self._hooks) or log.isEnabledFor(logging.DEBUG)

    def tell(self, event: Event) -> None:
        log.debug("%s", event)
        for hook in self._hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001  a user's hook may raise anything, and the purchase must continue
                log.warning("A hook failed on %s: %s", type(event).__name__, error_name(error))
