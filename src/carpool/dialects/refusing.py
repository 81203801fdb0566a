"""What a refusal means, where the providers agree: they differ in how they say that no waiting helps."""

from __future__ import annotations

from carpool.dialects.headers import retry_after, wish
from carpool.model import Headers
from carpool.ports import Refusal

_LATER = frozenset({408, 409, 429})
_LONGEST = 1000


def refused(status: int, headers: Headers, message: str, *, spent: bool) -> Refusal:
    """`spent`: the account has no money left, so the same request can't succeed later."""
    wanted = wish(headers)
    passing = status in _LATER or status >= 500 if wanted is None else wanted
    return Refusal(
        status=status,
        message=message[:_LONGEST] or f"The provider answered {status}.",
        retryable=passing and not spent,
        retry_after=retry_after(headers),
        cannot_batch=status in (401, 403, 404),
        too_large=status == 413,
    )
