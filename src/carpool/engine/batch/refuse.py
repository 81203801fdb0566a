"""Batches that were provably not bought: their calls wait for another batch, or go on `now`."""

from __future__ import annotations

from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, Lane
from carpool.core.ports import Refusal
from carpool.engine.context import EngineContext
from carpool.engine.events import BatchRefused

RETRY_S = 5.0
CREATING = "creating a batch"
WAITS = "Its calls wait, and it is tried again."


async def refuse(context: EngineContext, batch: Batch, refusal: Refusal) -> None:
    """Releases the calls of a refused batch. Nothing is billed, so this does not count as an attempt."""
    lane = await _next_lane(context, batch, refusal)
    reason = f"the batch was refused: {refusal.message}"
    await context.insist(
        "writing down a refused batch",
        lambda: context.store.release(batch.id, BatchState.REFUSED, lane, context.now(), reason),
    )
    context.stats.batches_refused += 1
    whose, status, why = context.whose(batch), refusal.status, refusal.message
    if status:  # without a response the caller reports the error
        then = WAITS if lane is Lane.BATCH else "Its calls go on `now`."
        context.failing(CREATING, f"{status}: {why}", batch.key.provider, whose, then)
    context.event_hooks.tell(BatchRefused(context.now(), batch.id, batch.count, status, why, credential=whose))


async def _next_lane(context: EngineContext, batch: Batch, refusal: Refusal) -> Lane:
    credential = batch.key.credential
    account = context.keyring.account(credential)
    if refusal.crowded:
        context.queues.full(account, batch, refusal.queue_tokens, context.now())
        return Lane.BATCH
    if refusal.cannot_batch:
        model = batch.key.model if refusal.of_model else ""
        await context.learned.refused(Lane.BATCH, account, model, refusal.message)
        return Lane.NOW
    if refusal.too_large and batch.count > 1:
        context.byte_caps[account] = max(1, batch.bytes // 2)
        return Lane.BATCH
    if refusal.retryable and not refusal.too_large:
        context.pause(credential, RETRY_S if refusal.retry_after is None else refusal.retry_after)
        return Lane.BATCH
    return Lane.NOW
