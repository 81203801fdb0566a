"""Batches that were provably not bought: their calls wait for another, or go `now`, each to its own true answer."""

from __future__ import annotations

from carpool.engine.desk import Desk
from carpool.engine.events import BatchRefused
from carpool.lifecycle import BatchState
from carpool.model import Batch, Lane
from carpool.ports import Refusal

RETRY_S = 5.0


async def refuse(desk: Desk, batch: Batch, refusal: Refusal) -> None:
    """Nothing of it is billed, so this is no try: its calls have as many left as before."""
    lane = await _consequence(desk, batch, refusal)
    reason = f"the batch was refused: {refusal.message}"
    await desk.insist(
        "writing down a refused batch",
        lambda: desk.store.release(batch.id, BatchState.REFUSED, lane, desk.now(), reason),
    )
    desk.stats.batches_refused += 1
    whose, status, why = batch.key.credential, refusal.status, refusal.message
    desk.bulletin.tell(BatchRefused(desk.now(), batch.id, batch.count, status, why, credential=whose))


async def _consequence(desk: Desk, batch: Batch, refusal: Refusal) -> Lane:
    credential = batch.key.credential
    account = desk.keyring.account(credential)
    if refusal.crowded:
        desk.queues.full(account, batch, refusal.queue_tokens, desk.now())
        return Lane.BATCH
    if refusal.cannot_batch:
        model = batch.key.model if refusal.of_model else ""
        await desk.learned.refused(Lane.BATCH, account, model, refusal.message)
        return Lane.NOW
    if refusal.too_large and batch.count > 1:
        desk.byte_caps[account] = max(1, batch.bytes // 2)
        return Lane.BATCH
    if refusal.retryable and not refusal.too_large:
        desk.pause(credential, RETRY_S if refusal.retry_after is None else refusal.retry_after)
        return Lane.BATCH
    return Lane.NOW
