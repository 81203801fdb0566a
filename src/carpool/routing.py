"""Which lane a call takes, and which calls may share a batch. Pure: a call and the time in, a decision out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from carpool.errors import BadCall
from carpool.forecast import Forecast
from carpool.model import Call, Lane, PoolKey, Value
from carpool.policy import RoutingPolicy

TIGHT_MS: Final = 5_000.0  # budgets up to this are answered synchronously, unless the policy says otherwise
RESCUE_MARGIN: Final = 2.0  # for noticing that the time has come, and for getting the request out
DEFAULT_WINDOW_MS: Final = 30_000.0  # how long a minimum size may be waited for when no window is set
FLEX_STRETCH: Final = 3.0  # how much longer than `now` flex takes, with room to spare
SURE: Final = 0.99  # of a batch: then it is taken although flex costs the same, and leaves the synchronous rate alone
NO_FLEX: Final = "There is no lane flex for it."
NO_GAIN: Final = "The lane flex costs no less than now."
_FITS: Final = "A budget of {} has room for flex."


class Decision(Value, frozen=True, gc=False):
    lane: Lane
    reason: str
    rescue_at: float | None = None


def route(
    call: Call,
    policy: RoutingPolicy,
    forecast: Forecast,
    now: float,
    *,
    can_batch: str | None = None,
    can_flex: str | None = NO_FLEX,
    default: Lane = Lane.BATCH,
    beta: float = 0.5,
    q: float = 0.25,
) -> Decision:
    """Chooses the lane. `can_batch` and `can_flex` say why this call may not take those lanes (None: it may), `beta` is
    the batch's price relative to `now`, `q` the chance that a batch copy is billed although its call was rescued."""
    obstacle = call.unbatchable or can_batch
    against = {Lane.BATCH: obstacle, Lane.FLEX: can_flex}
    if call.lane is not None and (call.insists or against.get(call.lane) is None):
        return _forced(call, call.lane, against, forecast)
    flex = can_flex is None and _flex_in_time(call, forecast, now)
    if call.deadline is None:
        if obstacle is None or default is not Lane.BATCH:
            return _patient(default) if obstacle is None else Decision(Lane.NOW, obstacle)
        return (
            Decision(Lane.FLEX, f"It could wait, but not for a batch. {obstacle}")
            if flex
            else Decision(Lane.NOW, obstacle)
        )
    found = Decision(Lane.NOW, obstacle) if obstacle is not None else None
    return _in_time(call, call.deadline, policy, forecast, now, beta, q, flex=flex, unless=found)


def _flex_in_time(call: Call, forecast: Forecast, now: float) -> bool:
    """Whether flex would be back in time, and a refusal at the worst moment would still leave time for `now`."""
    needed = (FLEX_STRETCH + 1) * forecast.sync_seconds(call.max_output_tokens) + RESCUE_MARGIN
    return call.deadline is None or now + needed <= call.deadline


def flex_until(call: Call, forecast: Forecast) -> float | None:
    """When a call that travels on `flex` must be asked for on `now` instead. None for a patient one."""
    return rescue_time(call, forecast)


def _forced(call: Call, lane: Lane, against: Mapping[Lane, str | None], forecast: Forecast) -> Decision:
    if lane is Lane.NOW:
        return Decision(lane, _asked(call, lane))
    if lane not in against:
        raise BadCall(
            f"The lane {lane} is not available yet: ask for now, flex or batch, or leave the choice to carpool."
        )
    if (obstacle := against[lane]) is not None:
        raise BadCall(f"The lane {lane} was asked for, but this call can't take it. {obstacle}")
    return Decision(lane, _asked(call, lane), rescue_time(call, forecast) if lane is Lane.BATCH else None)


def _asked(call: Call, lane: Lane) -> str:
    return f"The lane {lane} was asked for." if call.insists else call.note


def noted(call: Call, decision: Decision) -> Decision:
    """What a rule had to say stands before the reason, unless it is the reason."""
    if not call.note or decision.reason == call.note:
        return decision
    return replace(decision, reason=f"{call.note} {decision.reason}")


@lru_cache
def _patient(default: Lane) -> Decision:
    said = "it can wait for a batch" if default is Lane.BATCH else "it goes at once"
    return Decision(default, f"No budget was given, so {said}.")


def _in_time(
    call: Call,
    deadline: float,
    policy: RoutingPolicy,
    forecast: Forecast,
    now: float,
    beta: float,
    q: float,
    *,
    flex: bool,
    unless: Decision | None,
) -> Decision:
    budget = deadline - call.arrived
    tight = (TIGHT_MS if policy.sync_max_latency_ms is None else policy.sync_max_latency_ms) / 1000
    if budget <= tight:
        return unless or Decision(
            Lane.NOW, f"The budget of {_span(budget)} is tight: up to {_span(tight)} goes at once."
        )
    if unless is not None:
        return Decision(Lane.FLEX, f"{_FITS.format(_span(budget))} {unless.reason}") if flex else unless
    latest_end = deadline - forecast.sync_seconds(call.max_output_tokens) - forecast.cancel_seconds
    if latest_end - policy.linger_ms / 1000 <= now:
        return Decision(Lane.NOW, f"A budget of {_span(budget)} leaves no room for a batch and a rescue.")
    rescue_at = rescue_time(call, forecast)
    if policy.sync_max_latency_ms is not None:
        return Decision(Lane.BATCH, f"The budget of {_span(budget)} is above {_span(tight)}.", rescue_at)
    left = int(latest_end - pool_wait(policy) - now)
    chance = _chance(forecast, left, call.model, size_class(call.max_output_tokens))
    said = f"A batch is back in time with a chance of {chance:.0%}"
    needed = break_even(beta, q)
    if flex and chance < SURE:
        return Decision(Lane.FLEX, f"{_FITS.format(_span(budget))} {said}, and flex costs no more.")
    if chance > needed:
        return Decision(Lane.BATCH, f"{said}; it pays above {needed:.0%}.", rescue_at)
    return Decision(Lane.NOW, f"{said}; it would pay above {needed:.0%}.")


@lru_cache(maxsize=4096)  # calls that arrive together have about as much time left, and each asks
def _chance(forecast: Forecast, seconds: int, model: str, size: str) -> float:
    return forecast.batch_cdf(seconds, model, size)


def rescue_time(call: Call, forecast: Forecast) -> float | None:
    """When a call must be resent on `now` at the latest. None for a patient one."""
    if call.deadline is None:
        return None
    return call.deadline - forecast.sync_seconds(call.max_output_tokens) - RESCUE_MARGIN


def break_even(beta: float, q: float) -> float:
    """The chance of being in time above which "batch, then rescue" is cheaper than `now`."""
    if beta >= 1:
        return math.inf  # a batch that saves nothing is never worth the risk
    return beta * q / (1 - beta * (1 - q))


def pool_wait(policy: RoutingPolicy) -> float:
    """Seconds that a call may wait in its pool before it is submitted."""
    if policy.batch_window_ms is not None:
        return policy.batch_window_ms / 1000
    if policy.batch_min_size is not None:
        return DEFAULT_WINDOW_MS / 1000
    return policy.linger_ms / 1000


def pool_key(call: Call, mixes_models: bool, now: float) -> PoolKey:
    return PoolKey(
        provider=call.provider,
        dialect=call.dialect,
        credential=call.credential,
        endpoint=call.endpoint,
        headers=call.headers,
        model="" if mixes_models else call.model,
        size_class=size_class(call.max_output_tokens),
        deadline_class=deadline_class(call.deadline, now),
    )


def size_class(max_output_tokens: int) -> str:
    """A batch ends with its slowest member, so long answers travel apart. Each class costs submissions: few."""
    if max_output_tokens <= 1024:
        return "s"
    return "m" if max_output_tokens <= 8192 else "l"


def deadline_class(deadline: float | None, now: float) -> str:
    """`patient`, or the power of two below the minutes left: `8m` holds 8 up to 16 minutes.

    Calls of one class come due together, so that a late batch can be cancelled before all of it is resent.
    Below two minutes and above 17 hours there is one class each.
    """
    if deadline is None:
        return "patient"
    minutes = (deadline - now) / 60
    exponent = math.floor(math.log2(minutes)) if minutes >= 1 else 0
    return f"{2 ** min(exponent, 10)}m"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
