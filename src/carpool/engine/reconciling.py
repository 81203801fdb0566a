"""Creates whose fate is unknown. Suspects are watched, never cancelled, and decided by what their results say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from carpool.engine.collecting import Collector
from carpool.engine.desk import Desk
from carpool.engine.events import BatchAbandoned
from carpool.engine.upstream import Upstream
from carpool.errors import Garbled, IllegalMove
from carpool.lifecycle import UNRESOLVED, BatchState
from carpool.model import Batch, Lane
from carpool.ports import BatchReport
from carpool.tracking import next_look, reconcile

GRACE_S = 90.0  # a LIST may lag behind a create by so much
ABANDONED_PACE_S = 300.0
LINES_TO_READ = 50  # a batch of ours shows its nonce within so many lines; stray lines may stand before them


class Reconciler:
    def __init__(self, desk: Desk, collector: Collector) -> None:
        self._desk = desk
        self._collector = collector

    def due(self, batch: Batch, looked: float | None) -> float:
        """When to LIST again for an unresolved batch."""
        since = batch.resolved_at or batch.intended_at
        if looked is None or looked < since:
            return since
        if batch.state is BatchState.ABANDONED:
            return looked + max(ABANDONED_PACE_S, (looked - since) / 10)
        return looked + min(next_look(looked - since, GRACE_S, self._desk.policy.poll_interval_s), 15.0)

    async def apply(
        self, upstream: Upstream, batches: Sequence[Batch], listed: Sequence[BatchReport], asked: float
    ) -> None:
        """Holds what the provider listed, when asked at that time, against the creates with unknown fate."""
        for batch in batches:
            row = await self._desk.store.batch(batch.id)
            if row is not None and row.state in UNRESOLVED:
                await self._apply(upstream, row, listed, asked)

    async def _apply(self, upstream: Upstream, batch: Batch, listed: Sequence[BatchReport], asked: float) -> None:
        desk = self._desk
        plan = reconcile(
            batch,
            listed,
            await self._known(batch),
            await desk.store.suspects(batch.id),
            asked,
            desk.offsets.get(upstream.provider, batch.clock_offset),
            grace=GRACE_S,
            pressed=False,  # pressing calls are rescued one by one; the batch itself can wait for its proof
        )
        if plan.found is not None:
            await self._found(batch, plan.found)
            return
        for provider_id in plan.new_suspects:
            await desk.store.suspect(batch.id, provider_id, "watched")
        for provider_id in plan.inspect:
            if await self._is_ours(upstream, batch, provider_id):
                await self._found(batch, provider_id)
                return
            await desk.store.suspect(batch.id, provider_id, "stranger")  # to this batch; it may be another's proof
            desk.wake_now()
        if plan.give_up:
            await self._give_up(batch)

    async def _known(self, batch: Batch) -> set[str]:
        """All who buy with one secret see each other's batches in a LIST."""
        known: set[str] = set()
        for credential in self._desk.keyring.sharing(batch.key.credential):
            known |= await self._desk.store.known_provider_ids(credential)
        return known

    async def _is_ours(self, upstream: Upstream, batch: Batch, provider_id: str) -> bool:
        """Whether a result line carries our nonce. Nothing else of a stranger's batch is looked at or kept."""
        seen, places = 0, upstream.dialect.results_at(provider_id) or ()
        async with aclosing(self._collector.result_lines(batch, upstream, places)) as lines:
            async for raw in lines:
                try:
                    if upstream.dialect.result_line(raw).custom_id.startswith(f"{batch.nonce}-"):
                        return True
                except Garbled:
                    continue
                seen += 1
                if seen >= LINES_TO_READ:
                    break
        return False

    async def _found(self, batch: Batch, provider_id: str) -> None:
        desk = self._desk
        if await desk.moved(batch, BatchState.OPEN, provider_id=provider_id, resolved_at=desk.now()) is None:
            return
        desk.stats.batches_submitted += 1
        desk.wake_now()

    async def _give_up(self, batch: Batch) -> None:
        desk = self._desk
        if batch.state is BatchState.ABANDONED:
            await desk.moved(batch, BatchState.VOID)
            return
        reason = "its create went unanswered, and no batch at the provider fits it"
        await self._collector.doubt(batch, reason)
        try:
            count = await desk.store.release(
                batch.id, BatchState.ABANDONED, Lane.BATCH, desk.now(), reason, owner=desk.name
            )
        except IllegalMove:
            row = await desk.store.batch(batch.id)
            if row is None or row.owner == desk.name:
                raise
            return  # this engine was taken for dead: another has the batch, and decides what becomes of it
        desk.stats.batches_abandoned += 1
        desk.bulletin.tell(BatchAbandoned(desk.now(), batch.id, count, reason, credential=batch.key.credential))
        desk.wake_now()
