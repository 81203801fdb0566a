"""What an account may ask of a batch API: requests and creates per minute, and how much it may have enqueued."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from carpool.core.bounded import backoff
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch
from carpool.planners.pressure.turns import FRESH, Turns

# ------------------------------------------------------------ requests per minute

CREATE_BURST: Final = 3.0
CREATE_SHARE: Final = 0.3  # of the quota that creates may take from polls; as much again is for results


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """An immutable token bucket. It may go into debt: a request that had to be sent delays later ones."""

    rate_per_s: float
    burst: float
    tokens: float
    at: float

    def available(self, now: float) -> float:
        # A clock that was set back must not remove tokens.
        return min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate_per_s)

    def take(self, now: float, n: float = 1) -> TokenBucket:
        return replace(self, tokens=self.available(now) - n, at=now)

    def wait_until(self, now: float, n: float = 1) -> float:
        """The earliest time from `now` on with n tokens. All readiness checks go through this method, so that the
        tokens *are* available at the returned time despite floating-point rounding."""
        return now if self.available(now) >= n else max(now, self.at + (n - self.tokens) / self.rate_per_s)

    def paced(self, rate_per_s: float, burst: float) -> TokenBucket:
        return replace(self, rate_per_s=rate_per_s, burst=burst, tokens=min(self.tokens, burst))


def create_rate(rpm: float, poll_interval: float) -> float:
    """Creates per minute: what polling leaves, halved because the results of each batch must be downloaded too.

    Where polls at their pace would leave creates less than their share, polls become rarer. With c creates and x polls
    a minute, a call waits about 30/c seconds for its create, and its answer 30/x for a poll. With 2c + x = rpm the sum
    is smallest at c = 0.29 rpm.
    """
    return max((rpm - 60 / poll_interval) / 2, rpm * CREATE_SHARE)


@dataclass(frozen=True, slots=True)
class BatchQuota:
    """The request quota of one account: every request takes from `requests`, a create from `creates` as well."""

    rpm: int
    poll_interval: float
    requests: TokenBucket
    creates: TokenBucket
    most: int  # the known limit of requests per minute; refusals lower `rpm` below it
    paused_until: float = 0.0
    turns: Turns = FRESH  # of the tenants of the account

    @classmethod
    def new(cls, rpm: int, poll_interval: float, now: float) -> BatchQuota:
        burst = _burst(rpm)
        requests = TokenBucket(rpm / 60, burst, burst, now)
        creates = TokenBucket(create_rate(rpm, poll_interval) / 60, CREATE_BURST, CREATE_BURST, now)
        return cls(rpm, poll_interval, requests, creates, most=rpm)

    def create_ready_at(self, now: float) -> float:
        return max(self.paused_until, self.creates.wait_until(now), self.requests.wait_until(now))

    def can_create(self, now: float) -> bool:
        return self.create_ready_at(now) <= now

    def spend_create(self, now: float, turns: Turns | None = None) -> BatchQuota:
        """Take the tokens of a create. `turns` is whose turn it is after it."""
        spent = replace(self, requests=self.requests.take(now), creates=self.creates.take(now))
        return spent if turns is None else replace(spent, turns=turns)

    def ask_ready_at(self, now: float) -> float:
        # The last token is reserved for a create that is allowed, or frequent polling would starve the creates.
        next_token = self.requests.wait_until(now)
        ready = next_token if next_token < self.creates.wait_until(now) else self.requests.wait_until(now, 2)
        return max(self.paused_until, ready)

    def can_ask(self, now: float) -> bool:
        return self.ask_ready_at(now) <= now

    def spend(self, now: float) -> BatchQuota:
        """Take the token of any request but a create: a list, a poll, a download, a cancel."""
        return replace(self, requests=self.requests.take(now), creates=self.creates.take(now, 0))

    def paused(self, until: float) -> BatchQuota:
        """The provider answered 429: nothing is sent before `until`."""
        return replace(self, paused_until=max(self.paused_until, until))

    def learned(self, rpm: int) -> BatchQuota:
        """The provider stated another limit. Tokens already taken stay taken."""
        return self if rpm < 1 or rpm == self.rpm == self.most else replace(self._paced(rpm), most=rpm)

    def slowed(self, now: float) -> BatchQuota:
        """The provider answered 429 without stating its limit: halve the rate, once for all refusals of a burst."""
        return self if now < self.paused_until else self._paced(max(1, self.rpm // 2))

    def eased(self) -> BatchQuota:
        """A request was accepted: raise the rate a little, up to the known limit."""
        return self._paced(min(self.rpm + 1, self.most))

    def _paced(self, rpm: int) -> BatchQuota:
        if rpm == self.rpm:
            return self
        requests = self.requests.paced(rpm / 60, _burst(rpm))
        creates = self.creates.paced(create_rate(rpm, self.poll_interval) / 60, CREATE_BURST)
        return replace(self, rpm=rpm, requests=requests, creates=creates)


def _burst(rpm: int) -> float:
    # Enough for a burst of creates and one poll, far below the limit per minute.
    return max(CREATE_BURST + 1, rpm / 10)


# ------------------------------------------------------------ enqueued tokens
# Providers limit how much of a model an account may have enqueued. Calls beyond that wait for room.

BYTES_PER_TOKEN = 4
WAIT_S = 15.0
LONGEST_WAIT_S = 900.0
_ENQUEUED = frozenset({BatchState.SUBMITTING, BatchState.UNKNOWN, BatchState.OPEN, BatchState.CANCELLING})


@dataclass(slots=True)
class _EnqueuedLimit:
    opens_at: float = 0.0
    refusals: int = 0  # in a row
    holds: int | None = None  # bytes of all batches together, from the limit that the provider states
    most: int | None = None  # bytes of one batch, learned from refusals


_UNLIMITED: Final = _EnqueuedLimit()  # never changed


class EnqueuedLimits:
    """Limits by account and model. The provider also counts other users of the account, and it counts tokens its own
    way: its stated limit is a hint, its refusals decide."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], _EnqueuedLimit] = {}

    def full(self, account: str, batch: Batch, tokens: int | None, now: float) -> None:
        """A batch was refused for lack of room. Hold this model back until a batch ends or the backoff has passed."""
        queue = self._queues.setdefault((account, batch.key.model), _EnqueuedLimit())
        queue.refusals += 1
        queue.opens_at = now + backoff(queue.refusals, WAIT_S, LONGEST_WAIT_S)
        queue.most = max(1, batch.bytes // 2)
        if tokens is not None:
            queue.holds = tokens * BYTES_PER_TOKEN

    def freed(self, account: str, model: str) -> None:
        """A batch of ours has ended: its room is free, and larger batches may be tried again."""
        queue = self._queues.get((account, model))
        if queue is None:
            return
        queue.opens_at, queue.refusals = 0.0, 0
        queue.most = None if queue.most is None else queue.most * 2

    def opens_at(self, account: str, model: str) -> float:
        return self._queues.get((account, model), _UNLIMITED).opens_at

    def room(self, account: str, model: str, enqueued: int) -> int | None:
        """Bytes that one more batch may have while `enqueued` bytes are enqueued; None without a known limit. With
        nothing enqueued a batch is always tried, even if its only call is too large: the provider decides."""
        queue = self._queues.get((account, model), _UNLIMITED)
        bounds = [queue.most] if queue.most is not None else []
        if queue.holds is not None:
            bounds.append(queue.holds - enqueued if enqueued else max(1, queue.holds))
        return min(bounds, default=None)


def enqueued(batches: Iterable[Batch], model: str) -> int:
    """Bytes of the batches of a model that the provider may still count as enqueued."""
    return sum(batch.bytes for batch in batches if batch.key.model == model and batch.state in _ENQUEUED)
