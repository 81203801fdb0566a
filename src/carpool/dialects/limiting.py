"""Rate limits as the heads of answers name them. Numbers that make no sense are no numbers."""

from __future__ import annotations

import re
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from carpool.model import Headers
from carpool.ports import Allowance, Allowances

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?")
_UNITS = (86_400.0, 3600.0, 60.0, 1.0, 0.001)
_MOST_DIGITS = 12

_ANTHROPIC = "anthropic-ratelimit-"
_OPENAI = "x-ratelimit-"


def anthropic(headers: Headers) -> Allowances | None:
    """`anthropic-ratelimit-requests-limit`, `-remaining`, `-reset`; `tokens` shows the tightest of the token limits."""
    said = dict(headers)
    requests = _anthropic(said, "requests")
    tokens = _anthropic(said, "tokens")
    return None if requests is None and tokens is None else Allowances(requests, tokens)


def openai(headers: Headers) -> Allowances | None:
    """`x-ratelimit-limit-requests`, `-remaining-`, `-reset-`; the reset is a duration such as `6m0s`."""
    said = dict(headers)
    requests = _openai(said, "requests")
    tokens = _openai(said, "tokens")
    return None if requests is None and tokens is None else Allowances(requests, tokens)


def _anthropic(said: dict[str, str], what: str) -> Allowance | None:
    limit = _number(said.get(f"{_ANTHROPIC}{what}-limit"))
    left = _number(said.get(f"{_ANTHROPIC}{what}-remaining"))
    if not limit or left is None:
        return None
    full_in = _between(said.get("date"), said.get(f"{_ANTHROPIC}{what}-reset"))
    return Allowance(limit, min(left, limit), full_in)


def _openai(said: dict[str, str], what: str) -> Allowance | None:
    limit = _number(said.get(f"{_OPENAI}limit-{what}"))
    left = _number(said.get(f"{_OPENAI}remaining-{what}"))
    if not limit or left is None:
        return None
    return Allowance(limit, min(left, limit), duration(said.get(f"{_OPENAI}reset-{what}")))


def _number(text: str | None) -> int | None:
    if text is None or len(text) > _MOST_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def duration(text: str | None) -> float | None:
    """Seconds of `1s`, `6m0s`, `20ms`, `1h0m5.5s`; None for anything else."""
    match = _DURATION.fullmatch(text) if text and len(text) < 40 else None
    if match is None:
        return None
    return sum(float(part) * unit for part, unit in zip(match.groups(), _UNITS, strict=True) if part)


def _between(date: str | None, reset: str | None) -> float | None:
    """Seconds from the answer's own date to the reset, both on the provider's clock."""
    if date is None or reset is None or len(reset) > 40:
        return None
    try:
        seconds = datetime.fromisoformat(reset).timestamp() - _epoch(date)
    except (ValueError, OverflowError):
        return None
    return max(0.0, seconds)


@lru_cache(maxsize=16)  # the same for all answers of a second
def _epoch(date: str) -> float:
    return parsedate_to_datetime(date).timestamp()
