"""The record of calls: shapes in blocks, joined with the ledger when they are read.

One row holds up to `BLOCK` shapes in MessagePack: a row for each would take several times as much disk and writing. So
blocks are only ever written and removed whole, in the order in which they were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from carpool.core.model import CallShape, RecordedPurchase, TimedBatch
from carpool.core.tasks import TaskRecord
from carpool.stores.operations.session import PlainContents, Row, Session, entry_value, to_json
from carpool.stores.operations.tasks import tasks

BLOCK = 256
MAX_SCANNED = 4096  # blocks scanned for removal at a time

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[CallShape])


def record_shapes(session: Session, recorded: Sequence[CallShape]) -> None:
    blocks = [recorded[start : start + BLOCK] for start in range(0, len(recorded), BLOCK)]
    session.insert("insert_shapes", [_block_row(block) for block in blocks])


def _block_row(block: Sequence[CallShape]) -> Row:
    return max(shape.arrived for shape in block), len(block), _encoder.encode(block)


def shapes(
    session: Session, since: float, after: int, credentials: Sequence[str] | None = None
) -> tuple[int, list[RecordedPurchase]] | None:
    row = session.row("next_shapes", {"since": since, "after": after})
    if row is None:
        return None
    number, content = row
    calls = {shape.ticket: shape for shape in _decoder.decode(content) if shape.arrived >= since}
    query = {"tickets": to_json(sorted(calls)), "credentials": session.credential_filter(credentials)}
    return number, [_purchase(session, calls, found) for found in session.rows("recorded_entries", query)]


def _purchase(session: Session, calls: dict[int, CallShape], row: Row) -> RecordedPurchase:
    settled_at, *columns = row
    entry = entry_value(session, tuple(columns))
    call = calls[entry.ticket]
    if entry.usage is None and entry.paid == 0:  # refused, or given back
        return RecordedPurchase(call, entry, None)
    if entry.purchase > 0 and entry.usage is not None:  # entered when its answer was there
        return RecordedPurchase(call, entry, entry.at)
    return RecordedPurchase(call, entry, settled_at if call.seconds is None else entry.at + call.seconds)


def prune_shapes(session: Session, before: float, most: int) -> int:
    removed = session.run("remove_old_shapes", {"before": before, "limit": MAX_SCANNED}).rowcount
    row = session.row("count_shapes")
    excess = (int(row[0]) if row else 0) - most
    if excess > 0:
        removed += session.run("remove_first_shapes", {"excess": excess, "limit": MAX_SCANNED}).rowcount
    return removed


class _Unread(PlainContents):
    """Leaves texts as they are stored: nobody who replays traffic reads them, so the secret is not needed."""

    def text_out(self, text: str) -> str:
        return text


class CallRecord:
    """The record of calls, to be read while other processes may write to it."""

    def __init__(self, session: Session) -> None:
        session.contents = _Unread()
        self._session = session

    def pages(self, since: float) -> Iterator[list[RecordedPurchase]]:
        """The purchases of the calls that arrived since then, in pages; all purchases of a call are in one page."""
        found = shapes(self._session, since, 0)
        while found is not None:
            number, page = found
            yield page
            found = shapes(self._session, since, number)

    def tasks(self, since: float, limit: int) -> list[TaskRecord]:
        return tasks(self._session, since, limit)

    def timed_batches(self, since: float) -> list[TimedBatch]:
        found = self._session.rows("timed_batches", {"since": since})
        rows: list[Row] = [(*row[:-1], not row[-1]) for row in found]
        return [TimedBatch(*row) for row in rows]
