"""The options of a call beside its body: budget, lane, tags, key, provider. Set by the client or by rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import field

from carpool.core.model import Lane, Value


class Options(Value, frozen=True, gc=False):
    budget: float | None = None  # seconds from arrival
    deadline: float | None = None  # absolute; wins over the budget
    lane: Lane | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    provider: str | None = None
    on_disconnect: Literal["keep", "cancel"] | None = None
    insists: bool = True  # False where a rule chose the lane: a call that can't take it is routed as if it had none
    note: str = ""  # what a rule adds to the reason of the lane

    @property
    def timed(self) -> bool:
        return self.budget is not None or self.deadline is not None

    def over(self, weaker: Options) -> Options:
        """These options, with gaps filled from weaker ones."""
        return Options(
            budget=self.budget if self.timed else weaker.budget,
            deadline=self.deadline if self.timed else weaker.deadline,
            lane=self.lane or weaker.lane,
            tags={**weaker.tags, **self.tags},
            key=self.key or weaker.key,
            provider=self.provider or weaker.provider,
            on_disconnect=self.on_disconnect or weaker.on_disconnect,
            insists=self.insists if self.lane else weaker.insists,
            note=self.note or weaker.note,
        )

    def until(self, arrived: float) -> float | None:
        if self.deadline is not None:
            return self.deadline
        return None if self.budget is None else arrived + self.budget
