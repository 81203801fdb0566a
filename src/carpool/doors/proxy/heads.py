"""Heads that were read before. The calls of one client on one connection differ in their bodies, and of their heads in
no more than the length: whatever was found out about the first holds for all that follow, byte for byte.

Only what the strict parser has let pass, and what was relayed, is remembered so. Anything else about a head, and it
goes through the parser as if none had been known.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

LARGEST = 8192  # of a head that is remembered
MOST = 1024  # heads remembered together; the oldest is forgotten first
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_DIGITS = 9  # of a length
_END = b"\r\n\r\n"


class Known(Struct, frozen=True, eq=False):
    """A head in two pieces, around the digits of its length, and what the application found out about it."""

    before: bytes
    after: bytes  # up to the body
    met: Any

    def __repr__(self) -> str:  # never the secrets
        return f"<{type(self).__name__}>"

    def body(self, data: bytes) -> tuple[int, int] | None:
        """Where the body begins, and how long it is, if the data begin with this head."""
        start, after = len(self.before), self.after
        end = data.find(after, start, start + _DIGITS + len(after))
        if end < 0 or not data.startswith(self.before) or not (digits := data[start:end]).isdigit():
            return None
        return end + len(after), int(digits)


class Heads:
    """Remembers heads, each once, however many connections send it."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], Known] = {}

    def learn(self, data: bytes, met: Any) -> Known | None:
        """The head with which the data begin, whole and with a length, about which so much was found out."""
        end = data.find(_END, 0, LARGEST) + len(_END)
        found = _LENGTH.search(data, 0, end)
        if found is None or end < len(_END):
            return None
        pieces = (data[: found.start(1)], data[found.end(1) : end])
        known = self._known.get(pieces)
        if known is None or known.met != met:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            known = self._known[pieces] = Known(*pieces, met)
        return known
