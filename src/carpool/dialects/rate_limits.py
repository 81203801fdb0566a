"""Parse rate-limit headers. Implausible values are ignored."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from carpool.core.model import Headers
from carpool.core.ports import Allowance, Allowances

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_UNITS = (86_400.0, 3600.0, 60.0, 1.0, 0.001)
_MAX_DIGITS = 12

_PARTS = ("limit", "remaining", "reset")
_ANTHROPIC = [[f"anthropic-ratelimit-{what}-{part}" for part in _PARTS] for what in ("requests", "tokens")]
_OPENAI = [[f"x-ratelimit-{part}-{what}" for part in _PARTS] for what in ("requests", "tokens")]


def anthropic(headers: Headers) -> Allowances | None:
    """`anthropic-ratelimit-requests-limit`, `-remaining`, `-reset`; `tokens` is the tightest of the token limits."""
    values = dict(headers)
    return _allowances(values, _ANTHROPIC, lambda reset: _between(values.get("date"), reset))


def openai(headers: Headers) -> Allowances | None:
    """`x-ratelimit-limit-requests`, `-remaining-`, `-reset-`; the reset is a duration such as `6m0s`."""
    return _allowances(dict(headers), _OPENAI, duration)


def _allowances(
    headers: dict[str, str], names: list[list[str]], seconds: Callable[[str | None], float | None]
) -> Allowances | None:
    allowances: list[Allowance | None] = []
    for limit_name, remaining_name, reset_name in names:
        limit, remaining = _number(headers.get(limit_name)), _number(headers.get(remaining_name))
        if not limit or remaining is None:
            allowances.append(None)
        else:
            allowances.append(Allowance(limit, min(remaining, limit), seconds(headers.get(reset_name))))
    return Allowances(*allowances) if any(allowances) else None


def _number(text: str | None) -> int | None:
    if text is None or len(text) > _MAX_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def duration(text: str | None) -> float | None:
    """Parse `1s`, `6m0s`, `20ms` or `1h0m5.5s` into seconds; None for anything else."""
    match = _DURATION.fullmatch(text) if text and len(text) < 40 else None
    if match is None:
        return None
    return sum(float(part) * unit for part, unit in zip(match.groups(), _UNITS, strict=True) if part)


def _between(date: str | None, reset: str | None) -> float | None:
    """Seconds from the response's `date` header to the reset, both on the provider's clock."""
    if date is None or reset is None or len(reset) > 40:
        return None
    try:
        seconds = datetime.fromisoformat(reset).timestamp() - _epoch(date)
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


@lru_cache(maxsize=16)  # equal for all responses within a second
def _epoch(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()
