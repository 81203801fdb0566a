"""Reconciles creates with an unknown outcome: finds out whether the provider sold the batch.

Unless the provider answered, or the connection was provably never made, a create may have been bought: after a crash,
a timeout, a cut connection, a 5xx. The row is `unknown` then, and this module decides without ever guessing.

A batch at the provider is ours only if our create returned its id, or if it carries our nonce. Some providers show the
nonce in their list. Elsewhere it appears only in the `custom_id` of the result lines, that is, when the batch has
ended. Until then a batch in the list that fits by count and creation time is a suspect. Suspects are watched and never
cancelled, because they may belong to somebody else who uses the same account. When a suspect has ended, a few of its
result lines are read. If one carries our nonce, the batch is ours: the row becomes `open` and is polled like any other.
If none does, it is a stranger to this row, though it may still prove another row.

The module gives up when no suspect has appeared within a grace time, or when suspects prove nothing for a day. The row
becomes `abandoned`: each of its calls stands in the ledger as a purchase of unknown price, and open calls are bought
again. An abandoned batch is watched for 24 hours more. Late proof settles calls that are still open, and is otherwise
entered as a duplicate. Without proof the row becomes `void`, and the price stays unknown.

Calls with a near deadline do not wait for any of this: `rescue.py` sends them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from carpool.core.errors import Garbled
from carpool.core.lifecycle import UNRESOLVED, BatchState
from carpool.core.model import Batch
from carpool.core.ports import BatchReport
from carpool.core.upstream import Upstream
from carpool.engine.batch.api import BatchApi
from carpool.engine.batch.collect import Collector
from carpool.engine.context import EngineContext
from carpool.engine.events import BatchAbandoned, BatchSubmitted
from carpool.planners.tracking import next_look, reconcile, watch_pace

GRACE_S = 90.0  # how long the provider's list may lag behind a create
LINES_TO_READ = 50  # our batch shows its nonce within this many lines; stray lines may come before


class Reconciler:
    def __init__(self, context: EngineContext, api: BatchApi, collector: Collector) -> None:
        self._context = context
        self._api = api
        self._collector = collector

    def due(self, batch: Batch, looked: float | None) -> float:
        """Returns when to list the provider's batches again for an unresolved batch."""
        since = batch.resolved_at or batch.intended_at
        if looked is None or looked < since:
            return since
        if batch.state is BatchState.ABANDONED:
            return looked + watch_pace(looked - since)
        return looked + min(next_look(looked - since, GRACE_S, self._context.policy.poll_interval_s), 15.0)

    async def apply(
        self, upstream: Upstream, batches: Sequence[Batch], listed: Sequence[BatchReport], asked: float
    ) -> None:
        """Compares the list that was requested at `asked` with the creates whose outcome is unknown."""
        for batch in batches:
            row = await self._context.store.batch(batch.id)
            if row is not None and row.state in UNRESOLVED:
                await self._apply(upstream, row, listed, asked)

    async def _apply(self, upstream: Upstream, batch: Batch, listed: Sequence[BatchReport], asked: float) -> None:
        context = self._context
        plan = reconcile(
            batch,
            listed,
            await self._known_ids(batch),
            await context.store.suspects(batch.id),
            asked,
            self._api.offsets.get(upstream.provider, batch.clock_offset),
            grace=GRACE_S,
            pressed=False,  # urgent calls are rescued one by one, so the batch can wait for proof
        )
        if plan.found is not None:
            await self._adopt(batch, plan.found)
            return
        for provider_id in plan.new_suspects:
            await context.store.suspect(batch.id, provider_id, "watched")
        for provider_id in plan.inspect:
            if await self._is_ours(upstream, batch, provider_id):
                await self._adopt(batch, provider_id)
                return
            await context.store.suspect(batch.id, provider_id, "stranger")  # to this batch; it may prove another one
            context.wake_now()
        if plan.give_up:
            await self._give_up(batch)

    async def _known_ids(self, batch: Batch) -> set[str]:
        """Ids of all known batches of the account: credentials that share a secret see each other's batches."""
        known: set[str] = set()
        for credential in self._context.keyring.sharing(batch.key.credential):
            known |= await self._context.store.known_provider_ids(credential)
        return known

    async def _is_ours(self, upstream: Upstream, batch: Batch, provider_id: str) -> bool:
        """Whether a result line carries our nonce. Nothing else of another user's batch is read or kept."""
        lines_read, places = 0, upstream.dialect.results_at(provider_id) or ()
        async with aclosing(self._collector.result_lines(batch, upstream, places)) as lines:
            async for raw in lines:
                try:
                    if upstream.dialect.result_line(raw).custom_id.startswith(f"{batch.nonce}-"):
                        return True
                except Garbled:
                    continue
                lines_read += 1
                if lines_read >= LINES_TO_READ:
                    break
        return False

    async def _adopt(self, batch: Batch, provider_id: str) -> None:
        context = self._context
        if await context.moved(batch, BatchState.OPEN, provider_id=provider_id, resolved_at=context.now()) is None:
            return
        context.stats.batches_submitted += 1
        whose = batch.key.credential
        context.event_hooks.tell(BatchSubmitted(context.now(), batch.id, provider_id, batch.count, credential=whose))
        context.wake_now()

    async def _give_up(self, batch: Batch) -> None:
        context = self._context
        if batch.state is BatchState.ABANDONED:
            await context.moved(batch, BatchState.VOID)
            return
        reason = "its create went unanswered, and no batch at the provider fits it"
        await self._collector.doubt(batch, reason)
        count = await context.released(batch, BatchState.ABANDONED, reason)
        if count is None:
            return
        context.stats.batches_abandoned += 1
        context.event_hooks.tell(
            BatchAbandoned(context.now(), batch.id, count, reason, credential=context.whose(batch))
        )
        context.wake_now()
