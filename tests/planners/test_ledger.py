from __future__ import annotations

import pytest

from carpool.core.model import EntryKind, Lane, Totals
from carpool.planners.ledger import LedgerSummary, dollars


def test_a_summary_counts_a_call_once() -> None:
    summary = LedgerSummary.of(
        [
            Totals(Lane.BATCH, EntryKind.PURCHASE, 10, 1, 500, 1000),
            Totals(Lane.NOW, EntryKind.RESCUE, 2, 0, 200, 200),
            Totals(Lane.BATCH, EntryKind.DUPLICATE, 1, 0, 100, 200),
        ]
    )
    assert (summary.purchases, summary.unknown) == (13, 1)
    assert (summary.paid, summary.would_have_paid, summary.saved) == (800, 1200, 400)
    assert summary.share == pytest.approx(1 / 3)


def test_an_empty_summary_has_no_share() -> None:
    assert (LedgerSummary.of([]).saved, LedgerSummary.of([]).share) == (0, None)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "$0.00"),
        (1, "$0.000000001"),
        (1_395_000, "$0.001395"),
        (-1_395_000, "-$0.001395"),
        (1_395_049, "$0.001395"),
        (500_000_000, "$0.50"),
        (123_456_789, "$0.1235"),
        (999_990_000, "$1.00"),
        (1_005_000_000, "$1.00"),  # half to even
        (1_234_567_890_000_000, "$1,234,567.89"),
        (-12_345_600_000, "-$12.35"),
    ],
)
def test_dollars_for_people(nano: int, text: str) -> None:
    assert dollars(nano) == text
