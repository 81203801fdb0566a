"""The event log of a simulated run, in sentences: enough to understand a failure without the code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from carpool.engine import Event


class SimLog:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._start = now()
        self._lines: list[tuple[float, str, str]] = []

    def add(self, who: str, what: str) -> None:
        self._lines.append((self._now() - self._start, who, what))

    def event(self, who: str, event: Event) -> None:
        said = ", ".join(f"{f.name} {_short(getattr(event, f.name))}" for f in fields(event) if f.name != "at")
        self.add(who, f"{_words(type(event).__name__)}: {said}")

    def text(self, most: int = 4000) -> str:
        lines = [f"{_stamp(at)}  {who:<12} {what}" for at, who, what in self._lines[-most:]]
        return "\n".join(lines)


def _words(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()


def _short(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _stamp(seconds: float) -> str:
    hours, rest = divmod(seconds, 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{int(hours):3d}:{int(minutes):02d}:{seconds:06.3f}"
