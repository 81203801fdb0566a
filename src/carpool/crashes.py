"""What may be told of an exception: its kind and where it was raised; its words only where they are carpool's own.

The message of any other exception may quote what it stumbled over, and that may be a key or a prompt.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

from carpool.errors import CarpoolError

MOST_FRAMES = 30


def named(error: BaseException) -> str:
    """In one line."""
    if isinstance(error, CarpoolError):
        return f"{type(error).__name__}: {error}"
    last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    return type(error).__name__ + (f" at {last.filename}:{last.lineno} in {last.name}" if last else "")


def told(error: BaseException) -> str:
    """With the way that led to it, and with what it came from."""
    return "\nwhich came of this:\n".join(_told(one) for one in _chain(error))


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-MOST_FRAMES:]
    return "\n".join([*(f"  {one.filename}:{one.lineno} in {one.name}" for one in frames), named(error)])


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
