"""Choose a lane for each call, and a pool for each call that goes to a batch. Pure: no I/O, no clock.

`route` checks these in order; the first that applies decides:

1. A lane that was asked for. If the call can't take it, a client's wish is an error (`insists`), and a rule's wish is
   ignored.
2. No deadline: the default lane. If that is `batch`, the call may wait, and takes the cheapest lane. Where a batch is
   impossible, that is `flex` if offered, else `now`.
3. A budget of at most `sync_max_latency_ms` (5 s if unset) goes to `now`. With a longer one, a call that can't be
   batched goes to `flex` if that is offered and in time, else to `now`.
4. A batch needs time for its linger, a cancel and a synchronous rescue before the deadline. Without it: `now`.
5. If the policy sets `sync_max_latency_ms`, every longer budget goes to `batch`.
6. Otherwise the cheapest lane, by what each is expected to cost (`quotes`).

Not modelled yet: the current load or rate limit of a provider does not influence the choice.

A batch ends with its slowest call and is rescued as a whole, so `pool_key` also separates calls by output size and by
deadline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from carpool.core.errors import BadCall, ConfigError
from carpool.core.model import Call, Lane, PoolKey, Value
from carpool.core.ports import Capability, Dialect
from carpool.core.settings import SWITCH, Check, Range, check, known, mapping
from carpool.planners.forecast import BatchClass, Forecast
from carpool.planners.policy import RoutingPolicy, span
from carpool.planners.quotes import Quote

T = TypeVar("T")

# ------------------------------------------------------------ model capabilities
# The dialect lists its models; the config overrides that. A model without a row gets the defaults.

_CHECKS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("batch", "flex", "stream"), SWITCH),
    **dict.fromkeys(("context_tokens", "output_tokens", "cacheable_tokens"), Range(0, 1_000_000_000, whole=True)),
    **dict.fromkeys(("batch_price", "flex_price"), Range(0, 1, whole=False)),
}
KEYS: Final = tuple(_CHECKS)

Overrides = Mapping[str, Mapping[str, Mapping[str, Any]]]  # provider → model or glob → capabilities


class Capabilities:
    def __init__(self, overrides: Overrides | None = None) -> None:
        self._overrides = overrides or {}
        self.of = lru_cache(maxsize=4096)(self._of)

    def why_not(self, lane: Lane, provider: str, dialect: Dialect, model: str) -> str | None:
        """Why a model can't take a lane; None if it can."""
        able = self.of(provider, dialect, model)
        if able.batch if lane is Lane.BATCH else able.flex and dialect.flex is not None:
            return None
        return f"The model {model[:80]} is not offered on the lane {lane}."

    def _of(self, provider: str, dialect: Dialect, model: str) -> Capability:
        """Look up a model. The config's overrides are by `provider`, its name there."""
        listed = _first(dialect.models, model) or Capability()
        overrides = self._overrides.get(provider, {})
        return replace(listed, **(overrides.get(model) or _first(overrides.items(), model) or {}))


def _first(rows: Iterable[tuple[str, T]], model: str) -> T | None:
    return next((row for pattern, row in rows if fnmatchcase(model, pattern)), None)


def read_models(value: object, shown: str) -> dict[str, dict[str, Any]]:
    """Parse the models of a provider's section in a config."""
    models: dict[str, dict[str, Any]] = {}
    for pattern, content in mapping(value, shown).items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f'{shown} has a model that is no name: write names or globs, as in "my-model-*".')
        given = mapping(content, f"{shown}.{pattern}")
        models[pattern] = {}
        for key, setting in given.items():
            name = known(key, KEYS, f"{shown}.{pattern}.")
            check(_CHECKS[name], setting, f"{shown}.{pattern}.{name}")
            models[pattern][name] = setting
    return models


# ------------------------------------------------------------ choice of a lane

TIGHT_MS: Final = 5_000.0  # budgets up to this are answered synchronously, unless the policy says otherwise
RESCUE_MARGIN: Final = 2.0  # seconds to wake up and to send the request
DEFAULT_WINDOW_MS: Final = 30_000.0  # the longest wait for a minimum batch size when no window is set
FLEX_STRETCH: Final = 3.0  # flex latency relative to `now`, a generous estimate
NO_FLEX: Final = "There is no lane flex for it."
NO_GAIN: Final = "The lane flex costs no less than now."
_FITS: Final = "A budget of {} has room for flex. {}"


class Decision(Value, frozen=True, gc=False):
    lane: Lane
    reason: str
    rescue_at: float | None = None
    quotes: tuple[Quote, ...] = ()  # what the lanes cost, the chosen one first; empty if that did not matter


class BatchDeadlines(Value, frozen=True, gc=False):
    """The times that decide what a batch costs."""

    latest_end: float = math.inf  # when a batch must end, or its calls are rescued
    wait: float = 0.0  # in the pool
    later: float = math.inf  # seconds for a batch that one of the turns to come would have


Quoting = Callable[
    [Sequence[Lane], BatchDeadlines], Sequence[Quote]
]  # lanes that the call can take → the cheapest first

_AT_ONCE: Final = {lane: Decision(lane, "No budget was given, so it goes at once.") for lane in Lane}


def route(
    call: Call,
    policy: RoutingPolicy,
    forecast: Forecast,
    now: float,
    quote: Quoting,
    *,
    can_batch: str | None = None,
    can_flex: str | None = NO_FLEX,
    default: Lane = Lane.BATCH,
) -> Decision:
    """Choose the lane. `can_batch` and `can_flex` are the reasons why this call can't take those lanes (None: it can).
    `quote` is asked where the costs decide.
    """
    no_batch = call.unbatchable or can_batch
    if call.lane is not None:
        obstacle = {Lane.BATCH: no_batch, Lane.FLEX: can_flex}.get(call.lane)
        if obstacle is None:
            reason = f"The lane {call.lane} was asked for." if call.insists else call.note
            return Decision(call.lane, reason, rescue_time(call, forecast) if call.lane is Lane.BATCH else None)
        if call.insists:
            raise BadCall(f"The lane {call.lane} was asked for, but this call can't take it. {obstacle}")
    flex = can_flex is None and (  # in time, and with enough time left for `now` if it is refused at the last moment
        call.deadline is None
        or now + (FLEX_STRETCH + 1) * sync_seconds(call, forecast) + RESCUE_MARGIN <= call.deadline
    )
    if call.deadline is not None:
        return _within_deadline(call, call.deadline, policy, forecast, now, quote, flex=flex, no_batch=no_batch)
    if default is not Lane.BATCH:
        return Decision(Lane.NOW, no_batch) if no_batch else _AT_ONCE[default]
    if no_batch is not None:
        return (
            Decision(Lane.FLEX, f"It could wait, but not for a batch. {no_batch}")
            if flex
            else Decision(Lane.NOW, no_batch)
        )
    lanes = (Lane.BATCH, Lane.FLEX, Lane.NOW) if flex else (Lane.BATCH, Lane.NOW)  # what costs the same may wait
    return _cheapest(call, forecast, quote, BatchDeadlines(wait=pool_wait(policy)), lanes)


def _within_deadline(
    call: Call,
    deadline: float,
    policy: RoutingPolicy,
    forecast: Forecast,
    now: float,
    quote: Quoting,
    *,
    flex: bool,
    no_batch: str | None,
) -> Decision:
    budget, cap = deadline - call.arrived, policy.sync_max_latency_ms
    tight = (TIGHT_MS if cap is None else cap) / 1000
    if no_batch is not None:
        fits = flex and budget > tight
        return Decision(Lane.FLEX, _FITS.format(span(budget), no_batch)) if fits else Decision(Lane.NOW, no_batch)
    if budget <= tight:
        return Decision(Lane.NOW, f"The budget of {span(budget)} is tight: up to {span(tight)} goes at once.")
    margin = sync_seconds(call, forecast) + forecast.cancel_seconds(call.provider)
    if deadline - margin - policy.linger_ms / 1000 <= now:
        return Decision(Lane.NOW, f"A budget of {span(budget)} leaves no room for a batch and a rescue.")
    if cap is not None:
        reason = f"The budget of {span(budget)} is above {span(tight)}."
        return Decision(Lane.BATCH, reason, rescue_time(call, forecast))
    later = math.inf if call.task_deadline is not None else budget - margin
    lanes = (Lane.NOW, Lane.FLEX, Lane.BATCH) if flex else (Lane.NOW, Lane.BATCH)
    return _cheapest(call, forecast, quote, BatchDeadlines(deadline - margin, pool_wait(policy), later), lanes)


def _cheapest(call: Call, forecast: Forecast, quote: Quoting, times: BatchDeadlines, lanes: Sequence[Lane]) -> Decision:
    """Of lanes that cost the same, the first."""
    quotes = tuple(quote(lanes, times))
    lane = quotes[0].lane
    return Decision(lane, explained(quotes), rescue_time(call, forecast) if lane is Lane.BATCH else None, quotes)


def explained(quotes: Sequence[Quote]) -> str:
    """Why the first of these quotes was chosen, in a line: what the best quote of each lane costs compared with `now`,
    over this turn and those to come."""
    chosen, best = quotes[0], dict[Lane, Quote]()
    for quote in quotes:
        best.setdefault(quote.lane, quote)
    if Lane.NOW not in best or len(best) == 1:
        return f"It takes the lane {chosen.lane}."
    on_now = best.pop(Lane.NOW).total
    if on_now == 0:
        return "It costs nothing on any lane."
    shares = " and ".join(f"{lane} {quote.total / on_now:.0%}" for lane, quote in best.items())
    odds = f"; a batch is in time with a chance of {best[Lane.BATCH].on_time:.0%}" if Lane.BATCH in best else ""
    return f"{_verdict(chosen, quotes)}: of the cost on now, {shares}{odds}."


def _verdict(chosen: Quote, quotes: Sequence[Quote]) -> str:
    if chosen.probe:
        return "It is a probe of how long batches take"
    lane = str(chosen.lane).capitalize()
    turns = f" with the {chosen.turns:.0f} turns to come" if chosen.turns >= 1 else ""
    if any(quote.lane is not chosen.lane and quote.total < chosen.total for quote in quotes):
        return f"{lane} is kept{turns}, as a change would save too little to be sure of"
    return f"{lane} is cheapest{turns}"


def noted(call: Call, decision: Decision) -> Decision:
    """Put the note of a rule before the reason, unless it already is the reason."""
    if not call.note or decision.reason == call.note:
        return decision
    return msgspec.structs.replace(decision, reason=f"{call.note} {decision.reason}")


def batch_class(call: Call) -> BatchClass:
    return BatchClass(call.provider, call.model, size_class(call.max_output_tokens))


def sync_seconds(call: Call, forecast: Forecast) -> float:
    return forecast.sync_seconds(call.provider, call.model, call.max_output_tokens)


def rescue_time(call: Call, forecast: Forecast) -> float | None:
    """The latest time to resend a call on `now`. None for a call without a deadline."""
    if call.deadline is None:
        return None
    return call.deadline - sync_seconds(call, forecast) - RESCUE_MARGIN


def must_be_kept(call: Call, lane: Lane) -> bool:
    """Whether a call goes through the store, where an earlier purchase of it may be found. A retry with a budget does
    so on `now`, too: its first attempt may have been in a batch."""
    return lane is Lane.BATCH or call.key is not None or (lane is Lane.NOW and call.retry and call.deadline is not None)


def pool_wait(policy: RoutingPolicy) -> float:
    """The longest time in seconds that a call waits in its pool before it is submitted."""
    if policy.batch_window_ms is not None:
        return policy.batch_window_ms / 1000
    if policy.batch_min_size is not None:
        return DEFAULT_WINDOW_MS / 1000
    return policy.linger_ms / 1000


def pool_key(call: Call, mixes_models: bool, now: float) -> PoolKey:
    return PoolKey(
        provider=call.provider,
        dialect=call.dialect,
        credential=call.payer or call.credential,
        endpoint=call.endpoint,
        headers=call.headers,
        model="" if mixes_models else call.model,
        size_class=size_class(call.max_output_tokens),
        deadline_class=deadline_class(call.deadline, now),
    )


def size_class(max_output_tokens: int) -> str:
    """Separate long responses, because a batch ends with its slowest call. Few classes: each costs submissions."""
    if max_output_tokens <= 1024:
        return "s"
    return "m" if max_output_tokens <= 8192 else "l"


def deadline_class(deadline: float | None, now: float) -> str:
    """`patient`, or the power of two below the minutes left: `8m` holds 8 to 16 minutes.

    The calls of one class come due together, so a late batch can be cancelled before all of its calls are resent.
    All deadlines below two minutes form one class, and so do all above 17 hours.
    """
    if deadline is None:
        return "patient"
    minutes = (deadline - now) / 60
    exponent = math.floor(math.log2(minutes)) if minutes >= 1 else 0
    return f"{2 ** min(exponent, 10)}m"
