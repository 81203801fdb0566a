"""What the engine reports: events for hooks and logs, counters since its start, and ongoing trouble.

Events never contain a body or a secret.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import dataclass_transform

from carpool.core.bounded import BoundedMap
from carpool.core.errors import NotConnected, ProviderFailing, TooBusy, error_name, plain_message
from carpool.core.model import Entry, EntryKind, Lane

log = logging.getLogger("carpool.events")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class _Frozen:
    """Each subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Event(_Frozen):
    """`credential` owns the call or batch; empty if the event concerns none, or all."""

    at: float
    credential: str = field(default="", kw_only=True)


class CallAdmitted(Event):
    ticket: str
    lane: Lane
    reason: str


class CallSettled(Event):
    ticket: str
    lane: Lane
    kind: str
    status: int


class CallRescued(Event):
    ticket: str
    batch: int | None
    reason: str


class BatchSubmitted(Event):
    batch: int
    provider_id: str
    count: int


class BatchRefused(Event):
    batch: int
    count: int
    status: int
    reason: str


class BatchUnknown(Event):
    """The create may have been bought. The outcome is being reconciled."""

    batch: int
    count: int
    reason: str


class BatchAbandoned(Event):
    batch: int
    count: int
    reason: str


class BatchFound(Event):
    """An unfinished batch of an engine that is gone, after a restart or another's crash. It continues here."""

    batch: int
    provider_id: str
    count: int
    state: str


class BatchLate(Event):
    """Its first call can't wait any longer and goes on `now`. If none can wait, the batch is cancelled first."""

    batch: int
    provider_id: str
    count: int


class BatchEnded(Event):
    batch: int
    provider_id: str
    took_s: float


class BatchCollected(Event):
    batch: int
    provider_id: str
    results: dict[str, int] = field(default_factory=dict)  # succeeded, errored, expired, canceled, missing, stray


class BatchLost(Event):
    """The provider has lost a batch that was bought, or its results. `count` of its calls are bought again."""

    batch: int
    provider_id: str
    reason: str
    count: int = 0


class RetentionNear(Event):
    """The results of a batch are not collected yet, and the provider will soon drop them."""

    batch: int
    provider_id: str
    drops_at: float


class FailureRateHigh(Event):
    rate: float
    limit: float
    calls: int


class AccountSlowed(Event):
    """The provider rate limited an account. Its calls to this model wait, and resume gradually after the pause."""

    account: str
    provider: str
    model: str
    status: int
    pause_s: float


class BreakerOpened(Event):
    """The provider failed repeatedly: it gets no requests for `pause_s`, and then one call at a time."""

    account: str
    provider: str
    pause_s: float
    reason: str


class BreakerClosed(Event):
    """The provider answers again."""

    account: str
    provider: str


class Trouble(Event):
    """Something failed and will be retried."""

    doing: str
    reason: str


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
    def has_listeners(self) -> bool:
        """Whether anybody listens. Events for every single call are built only then."""
        return bool(self._hooks) or log.isEnabledFor(logging.DEBUG)

    def emit(self, event: Event) -> None:
        log.debug("%s", event)
        for hook in self._hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001  a user's hook may raise anything, and the purchase must continue
                log.warning("A hook failed on %s: %s", type(event).__name__, error_name(error))


# ------------------------------------------------------------ counters


@dataclass(slots=True)
class Stats:
    """Calls, batches and money since this engine started. Money is in nano-dollars (`paid_usd` in dollars)."""

    sync_calls: int = 0
    flex_calls: int = 0
    flex_refused: int = 0  # and took another lane
    batched_calls: int = 0
    rescued_calls: int = 0
    returned_calls: int = 0  # found again by key or adoption
    requeued_calls: int = 0
    settled_calls: int = 0
    failed_calls: int = 0
    batches_submitted: int = 0
    batches_refused: int = 0
    batches_unknown: int = 0
    batches_abandoned: int = 0
    batches_collected: int = 0
    batches_lost: int = 0  # bought, but lost by the provider
    no_room_calls: int = 0  # were not batched, because a rescue might not have been possible in time
    sync_purchases: int = 0
    flex_purchases: int = 0
    batch_purchases: int = 0  # result lines, including unsuccessful ones
    rescue_purchases: int = 0  # of these, those in addition to a purchase that may be billed too
    duplicates: int = 0
    stray_lines: int = 0
    missing_lines: int = 0
    unknown_purchases: int = 0
    held_calls: int = 0  # had to queue before they were sent on `now`
    turned_away_calls: int = 0
    retries: int = 0  # on `now`, of calls with a budget
    slowdowns: int = 0
    breaker_openings: int = 0
    cache_expected_tokens: int = 0  # that answers were expected to read from prompt caches, where the index knows
    cache_read_tokens: int = 0  # that the same answers did read
    paid: int = 0
    would_have_paid: int = 0

    @property
    def saved(self) -> int:
        return self.would_have_paid - self.paid

    @property
    def paid_usd(self) -> float:
        return self.paid / 1e9

    @property
    def would_have_paid_usd(self) -> float:
        return self.would_have_paid / 1e9

    @property
    def saved_usd(self) -> float:
        return self.saved / 1e9

    def metrics(self, prefix: str = "carpool", split: bool = True) -> dict[str, int]:
        """All counters, named with `prefix`; without `split`, the calls of all lanes are added up."""
        values = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        if not split:
            values["calls"] = sum(values.pop(name) for name in ("sync_calls", "flex_calls", "batched_calls"))
        return {f"{prefix}.{name}": value for name, value in values.items()}

    def apart(self) -> dict[str, dict[str, int]]:
        """Calls and purchases separately, because one call may take several purchases."""
        return {
            "calls": {
                "now": self.sync_calls,
                "flex": self.flex_calls,
                "batch": self.batched_calls,
                "rescued": self.rescued_calls,
                "settled": self.settled_calls,
                "failed": self.failed_calls,
            },
            "purchases": {
                "now": self.sync_purchases,
                "flex": self.flex_purchases,
                "batch": self.batch_purchases,
                "rescues": self.rescue_purchases,
                "duplicates": self.duplicates,
                "unknown": self.unknown_purchases,
            },
        }

    def count(self, entry: Entry, used: bool) -> None:
        """Adds one finished purchase. `would_have_paid` is counted once per call, with its answer."""
        if entry.paid is None:
            self.unknown_purchases += 1
            return
        if entry.lane is Lane.BATCH:
            self.batch_purchases += 1
        elif entry.lane is Lane.FLEX:
            self.flex_purchases += 1
        else:
            self.sync_purchases += 1
        self.rescue_purchases += entry.kind is EntryKind.RESCUE
        self.paid += entry.paid
        if used:
            self.would_have_paid += entry.would_have_paid or 0
        elif entry.paid and entry.kind is not EntryKind.RESCUE and entry.lane is Lane.BATCH:
            self.duplicates += 1


# ------------------------------------------------------------ troubles
# What does not work at the moment: since when, and after how many attempts. An event is sent when trouble begins,
# changes or ends, but not for every attempt.

FORGOTTEN_S = 600.0  # trouble without an attempt for this long counts as new
MAX_TROUBLES = 1000  # troubles remembered; the oldest is dropped first


@dataclass(slots=True)
class _OngoingTrouble:
    since: float
    last: float
    tries: int
    reason: str


class Troubles:
    """Everything that does not work, by provider, account and activity. An unreachable provider is one trouble,
    whichever activity notices. `account` finds the account of a credential."""

    def __init__(self, event_hooks: EventHooks, now: Callable[[], float], account: Callable[[str], str]) -> None:
        self._event_hooks = event_hooks
        self._now = now
        self._account = account
        self._known: BoundedMap[tuple[str, str, str], _OngoingTrouble] = BoundedMap(MAX_TROUBLES)

    def __bool__(self) -> bool:
        return bool(self._known)

    def failed(
        self, doing: str, error: BaseException | str, provider: str = "", credential: str = "", then: str = ""
    ) -> None:
        """Records a failed attempt. It is trouble that begins, if it is new or failed in another way before."""
        now, account = self._now(), self._account(credential)
        if isinstance(error, NotConnected) and not isinstance(error, TooBusy | ProviderFailing):
            account = doing = ""
        reason = error if isinstance(error, str) else plain_message(error)
        ongoing = self._known.get((provider, account, doing))
        if ongoing is None or now - ongoing.last > FORGOTTEN_S:
            ongoing = self._known[provider, account, doing] = _OngoingTrouble(now, now, 0, "")
        ongoing.last, ongoing.tries = now, ongoing.tries + 1
        if ongoing.reason != reason:
            ongoing.reason = reason
            began = TroubleBegan(now, doing, reason, ongoing.since, ongoing.tries, provider, then, credential=account)
            self._event_hooks.emit(began)

    def unreached(self, provider: str) -> bool:
        """Whether this provider is known to be unreachable."""
        return (provider, "", "") in self._known

    def worked(self, doing: str, provider: str = "", credential: str = "") -> None:
        """Records success of something that may have failed before. With a provider, it also counts as reachable."""
        if not self._known:
            return
        for account, what in ((self._account(credential), doing), *((("", ""),) if provider else ())):
            if (ongoing := self._known.pop((provider, account, what), None)) is not None:
                over = TroubleOver(self._now(), what, ongoing.since, ongoing.tries, provider, credential=account)
                self._event_hooks.emit(over)
