"""Formats exceptions for logs without leaking data: type and location, and the message only of carpool's own errors.

The message of any other exception may quote the value that caused it, and that may be a key or a prompt.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from carpool.core.errors import CarpoolError

MOST_FRAMES = 30


def error_name(error: BaseException) -> str:
    """Describes an exception in one line: type and message, or type and location."""
    if isinstance(error, CarpoolError):
        return f"{type(error).__name__}: {error}"
    last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    return type(error).__name__ + (f" at {last.filename}:{last.lineno} in {last.name}" if last else "")


def plain_message(error: BaseException) -> str:
    """Returns the message of one of carpool's errors; for any other exception, type and location."""
    return str(error) if isinstance(error, CarpoolError) else error_name(error)


def safe_traceback(error: BaseException) -> str:
    """Formats the stack frames of an exception and of its causes, without source lines or values."""
    return "\nwhich came of this:\n".join(_format_frames(link) for link in _chain(error))


def _format_frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    return "\n".join([*(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames), error_name(error)])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
