"""A cache of request heads that were already parsed.

The calls of one client on one connection differ in their bodies, and their heads only in the content length. So what
was length for the first head holds for all later heads with the same bytes around the length.

Only heads that the strict parser accepted and whose call was relayed are cached. Any other head is parsed normally.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

LARGEST = 8192  # bytes of a cached head
MOST = 1024  # cached heads; the oldest is dropped first
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_DIGITS = 9  # most digits of a content length
_END = b"\r\n\r\n"


class KnownHead(Struct, frozen=True, eq=False):
    """A head as two pieces around the digits of its content length, and the application's facts about it."""

    before: bytes
    after: bytes  # up to the body
    parsed_head: Any

    def __repr__(self) -> str:  # never the secrets
        return f"<{type(self).__name__}>"

    def body(self, data: bytes) -> tuple[int, int] | None:
        """The offset and the length of the body, if `data` starts with this head."""
        start, after = len(self.before), self.after
        end = data.find(after, start, start + _DIGITS + len(after))
        if end < 0 or not data.startswith(self.before) or not (digits := data[start:end]).isdigit():
            return None
        return end + len(after), int(digits)


class KnownHeads:
    """Caches heads, each once, for all connections."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], KnownHead] = {}

    def learn(self, data: bytes, parsed_head: Any) -> KnownHead | None:
        """Caches the head at the start of `data`; None if it is incomplete or has no content length."""
        end = data.find(_END, 0, LARGEST) + len(_END)
        length = _LENGTH.search(data, 0, end)
        if length is None or end < len(_END):
            return None
        pieces = (data[: length.start(1)], data[length.end(1) : end])
        known = self._known.get(pieces)
        if known is None or known.parsed_head != parsed_head:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            known = self._known[pieces] = KnownHead(*pieces, parsed_head)
        return known
