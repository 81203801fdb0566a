"""What happens to batches and calls, as values, for hooks, logs and statistics. Never a body, never a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from carpool.crashes import named
from carpool.model import Lane

log = logging.getLogger("carpool.events")


@dataclass(frozen=True, slots=True)
class Event:
    """`credential` names whose call or batch it is; empty where it is nobody's, or everybody's."""

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
    """The create may have been bought. Its fate is being reconciled."""

    batch: int
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class BatchAbandoned(Event):
    batch: int
    count: int
    reason: str


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
    batch: int
    provider_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RetentionNear(Event):
    """A batch's results are not collected, and the provider will soon drop them."""

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
    """The provider asked an account for less; its calls to this model wait, and go on gradually after the pause."""

    account: str
    provider: str
    model: str
    status: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class BreakerOpened(Event):
    """The provider failed again and again: it is left alone for so long, and then asked by one call at a time."""

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
    """Something did not work and will be tried again."""

    doing: str
    reason: str


Hook = Callable[[Event], object]


class Bulletin:
    """Tells every hook what happened. A hook that fails is logged and does no harm."""

    def __init__(self, hooks: tuple[Hook, ...] = ()) -> None:
        self._hooks = list(hooks)

    def add(self, hook: Hook) -> None:
        self._hooks.append(hook)

    def remove(self, hook: Hook) -> None:
        self._hooks.remove(hook)

    @property
    def heard(self) -> bool:
        """Whether anybody listens: what happens to every single call is only then put into words."""
        return bool(self._hooks) or log.isEnabledFor(logging.DEBUG)

    def tell(self, event: Event) -> None:
        log.debug("%s", event)
        for hook in self._hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001  a user's hook may raise anything; the purchase must go on
                log.warning("A hook failed on %s: %s", type(event).__name__, named(error))
