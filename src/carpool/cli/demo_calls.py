"""The demo's fleet: who asks, what, and how long each may wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_FILLER = (
    "The harbour was quiet before dawn, and the boats lay close together so that the tide would not part them. "
    "Whoever wanted to cross could hire one alone and pay for every seat, or wait on the pier until it was full. "
)


@dataclass(frozen=True, slots=True)
class Role:
    """Callers of one kind. `waves` are their arrivals: seconds after the start, and how many calls."""

    name: str
    budget_s: float | None
    model: str
    max_tokens: int
    task: str
    length: int  # of the prompt, in repetitions of the filler
    waves: tuple[tuple[float, int], ...]

    @property
    def count(self) -> int:
        return sum(size for _, size in self.waves)

    @property
    def budget(self) -> str:
        if self.budget_s is None:
            return "patient"
        return f"{self.budget_s:.0f} s" if self.budget_s < 120 else f"{self.budget_s / 60:.0f} min"

    def calls(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """When each call arrives, and its parameters."""
        number = 0
        for at, size in self.waves:
            for _ in range(size):
                number += 1
                yield at, self._params(number)

    def _params(self, number: int) -> dict[str, Any]:
        text = f"{self.task} {number}. {_FILLER * self.length}"
        message = {"role": "user", "content": text}
        return {"model": self.model, "max_tokens": self.max_tokens, "messages": [message]}


CHATS = Role(
    name="chats",
    budget_s=2.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Answer chat",
    length=2,
    waves=tuple((0.3 + turn, 1) for turn in range(14)),
)
GRADERS = Role(
    name="graders",
    budget_s=600.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Grade essay",
    length=30,
    waves=((0.2, 20), (7.5, 8)),
)
NIGHTLY = Role(
    name="nightly",
    budget_s=None,
    model="claude-haiku-4-5",
    max_tokens=400,
    task="Summarise report",
    length=60,
    waves=((0.8, 12),),
)
# carpool cancels a batch of these about 31 s before its deadline: 20 s for the cancel, 9 s to ask anew, 2 s to spare.
REVIEWERS = Role(
    name="reviewers",
    budget_s=36.0,
    model="claude-sonnet-5",
    max_tokens=200,
    task="Review change",
    length=20,
    waves=((1.6, 6),),
)
FLEET = (CHATS, GRADERS, NIGHTLY, REVIEWERS)
