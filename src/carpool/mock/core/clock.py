"""The only place in this package where a clock is read."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import format_datetime

Now = Callable[[], float]

wall: Now = time.time


def rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def http_date(at: float) -> str:
    return format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True)
