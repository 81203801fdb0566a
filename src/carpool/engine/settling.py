"""The one way in which a call ends: outcome and ledger line in one transaction, then whoever waits is woken."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.desk import Desk
from carpool.engine.events import CallSettled
from carpool.engine.waiting import Reply
from carpool.model import OutcomeKind, Settlement, ticket_text


async def settle(desk: Desk, settlements: Sequence[Settlement]) -> None:
    if not settlements:
        return
    used = await desk.insist("settling", lambda: desk.store.settle(settlements, desk.now()))
    for settlement, won in zip(settlements, used, strict=True):
        _count(desk, settlement, won)
        if won:
            _wake(desk, settlement)
    desk.crowd.shrank(len(desk.waiters))


def _count(desk: Desk, settlement: Settlement, won: bool) -> None:
    if settlement.entry is not None:
        desk.stats.count(settlement.entry, won)
    if settlement.requeue is not None:
        desk.stats.requeued_calls += 1


def _wake(desk: Desk, settlement: Settlement) -> None:
    outcome = settlement.outcome
    if outcome is None:
        return
    desk.stats.settled_calls += 1
    desk.stats.failed_calls += outcome.kind is not OutcomeKind.SUCCEEDED
    if desk.bulletin.heard:
        text, entry = ticket_text(settlement.ticket), settlement.entry
        whose = "" if entry is None else entry.credential
        desk.bulletin.tell(CallSettled(desk.now(), text, outcome.lane, outcome.kind, outcome.status, credential=whose))
    desk.waiters.resolve(Reply(settlement.ticket, outcome, settlement.entry))
