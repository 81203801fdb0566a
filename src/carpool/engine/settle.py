"""The only way a call ends: outcome and ledger entry in one transaction, then its waiters are woken."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.model import OutcomeKind, Settlement, ticket_text
from carpool.engine.context import EngineContext
from carpool.engine.events import CallSettled
from carpool.engine.waiters import Reply


async def settle(context: EngineContext, settlements: Sequence[Settlement]) -> None:
    if not settlements:
        return
    used = await context.insist("settling", lambda: context.store.settle(settlements, context.now()))
    for settlement, won in zip(settlements, used, strict=True):
        _count(context, settlement, won)
        if won:
            _wake(context, settlement)
    context.gc_freezer.shrank(len(context.waiters))


def _count(context: EngineContext, settlement: Settlement, won: bool) -> None:
    if settlement.entry is not None:
        context.stats.count(settlement.entry, won)
    if settlement.requeue is not None:
        context.stats.requeued_calls += 1


def _wake(context: EngineContext, settlement: Settlement) -> None:
    outcome = settlement.outcome
    if outcome is None:
        return
    context.stats.settled_calls += 1
    context.stats.failed_calls += outcome.kind is not OutcomeKind.SUCCEEDED
    if context.event_hooks.heard:
        text, entry = ticket_text(settlement.ticket), settlement.entry
        whose = "" if entry is None else entry.credential
        context.event_hooks.tell(
            CallSettled(context.now(), text, outcome.lane, outcome.kind, outcome.status, credential=whose)
        )
    context.waiters.resolve(Reply(settlement.ticket, outcome, settlement.entry))
