"""How much anybody may ask of the proxy at a time: the part of the section `limits` that concerns connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from carpool.config.layering import Document
from carpool.settings import Range, check, mapping

_RANGES: Final[Mapping[str, Range]] = {
    "max_head_kb": Range(1, 1000, whole=True),
    "max_headers": Range(10, 10_000, whole=True),
    "max_connections": Range(1, 1_000_000, whole=True),
    "slow_sender_s": Range(0.1, 86_400, whole=False),
    "slow_reader_s": Range(0.1, 86_400, whole=False),
}


@dataclass(frozen=True, slots=True)
class Limits:
    max_head_kb: int = 64
    max_headers: int = 256
    max_connections: int = 20_000
    slow_sender_s: float = 60.0
    slow_reader_s: float = 600.0

    @property
    def max_head(self) -> int:
        """The most bytes that a request's line and headers may have together."""
        return self.max_head_kb * 1024


def read_limits(document: Document) -> Limits:
    section = mapping(document.sections.get("limits"), "The section limits")
    given = {name: section[name] for name in _RANGES if section.get(name) is not None}
    for name, value in given.items():
        check(_RANGES[name], value, document.shown(f"limits.{name}"))
    return Limits(**given)  # type: ignore[arg-type]
