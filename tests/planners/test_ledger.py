from __future__ import annotations

import pytest

from carpool.core.model import EntryKind, Lane, Totals, Usage
from carpool.core.prices import PriceBook
from carpool.planners.ledger import LedgerSummary, attempt, dollars, priced

AT = 1_795_000_000.0  # in November 2026
WHO = {"provider": "main", "credential": "c", "model": "claude-haiku-4-5"}
BOOK = PriceBook()


def test_an_attempt_is_unknown() -> None:
    entry = attempt(ticket=1, purchase=-1, at=AT, reason="no budget", tags={"team": "ci"}, **WHO)
    assert (entry.paid, entry.would_have_paid, entry.usage) == (None, None, None)
    assert (entry.lane, entry.kind, entry.tags) == (Lane.NOW, EntryKind.PURCHASE, {"team": "ci"})


def test_a_batched_purchase_saves_half() -> None:
    usage = Usage(input_tokens=1000, output_tokens=200)
    entry = priced(attempt(ticket=1, purchase=7, at=AT, lane=Lane.BATCH, **WHO), "anthropic", usage, BOOK)
    assert (entry.paid, entry.would_have_paid) == (1_000_000, 2_000_000)
    assert (entry.provider, entry.usage) == ("main", usage)


def test_an_attempt_is_completed_by_its_answer() -> None:
    started = attempt(ticket=1, purchase=-1, at=AT, **WHO)
    entry = priced(started, "anthropic", Usage(input_tokens=10), BOOK)
    assert (entry.ticket, entry.purchase, entry.paid, entry.would_have_paid) == (1, -1, 10_000, 10_000)
    assert priced(started, "anthropic", None, BOOK) == started


def test_no_saving_is_claimed_where_the_price_paid_is_unknown() -> None:
    early = attempt(ticket=1, purchase=7, at=1_780_000_000.0, lane=Lane.BATCH, **WHO)
    entry = priced(early, "anthropic", Usage(input_tokens=10), BOOK)
    assert (entry.paid, entry.would_have_paid) == (None, None)
    assert entry.usage == Usage(input_tokens=10)


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
