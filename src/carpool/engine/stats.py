"""Counters of one engine's life, in the words that the library shows."""

from __future__ import annotations

from dataclasses import dataclass, fields

from carpool.model import Entry, EntryKind, Lane


@dataclass(slots=True)
class Stats:
    """Calls, batches and money since this dispatcher started. Money is in nano-dollars (`paid_usd` in dollars)."""

    sync_calls: int = 0
    flex_calls: int = 0
    flex_refused: int = 0  # and went another way
    batched_calls: int = 0
    rescued_calls: int = 0
    returned_calls: int = 0  # came back by key or adoption
    requeued_calls: int = 0
    settled_calls: int = 0
    failed_calls: int = 0
    batches_submitted: int = 0
    batches_refused: int = 0
    batches_unknown: int = 0
    batches_abandoned: int = 0
    batches_collected: int = 0
    duplicates: int = 0
    stray_lines: int = 0
    missing_lines: int = 0
    unknown_purchases: int = 0
    held_calls: int = 0  # had to wait before they were sent on `now`
    turned_away_calls: int = 0
    retries: int = 0  # on `now`, of calls with a budget
    slowdowns: int = 0
    breaker_openings: int = 0
    paid: int = 0
    would_have_paid: int = 0

    @property
    def saved(self) -> int:
        return self.would_have_paid - self.paid

    @property
    def paid_usd(self) -> float:
        return self.paid / 1e9

    @property
    def would_have_paid_usd(self) -> float:
        return self.would_have_paid / 1e9

    @property
    def saved_usd(self) -> float:
        return self.saved / 1e9

    def metrics(self, prefix: str = "carpool", split: bool = True) -> dict[str, int]:
        """Every counter under `prefix`; without `split`, calls are not told apart by lane."""
        values = {field.name: int(getattr(self, field.name)) for field in fields(self)}
        if not split:
            values["calls"] = sum(values.pop(name) for name in ("sync_calls", "flex_calls", "batched_calls"))
        return {f"{prefix}.{name}": value for name, value in values.items()}

    def count(self, entry: Entry, used: bool) -> None:
        """Adds one finished purchase. What the unmodified call would have cost is counted once, with its answer."""
        if entry.paid is None:
            self.unknown_purchases += 1
            return
        self.paid += entry.paid
        if used:
            self.would_have_paid += entry.would_have_paid or 0
        elif entry.paid and entry.kind is not EntryKind.RESCUE and entry.lane is Lane.BATCH:
            self.duplicates += 1
