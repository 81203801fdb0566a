"""From waiting calls to a bought batch: flush plan, intent, lease check, create, and what the answer means."""

from __future__ import annotations

from collections.abc import AsyncIterator

from carpool.engine.desk import CANNOT_BATCH_S, Desk
from carpool.engine.events import BatchRefused, BatchSubmitted, BatchUnknown
from carpool.engine.upstream import Answer, Upstream, whole
from carpool.errors import Garbled, NotConnected, WireError
from carpool.lifecycle import BatchState
from carpool.model import Batch, Intent, Lane, PoolView, custom_id
from carpool.pooling import Flush, FlushPlan, plan
from carpool.ports import Refusal, StreamedBody

CREATE_SILENCE_S = 120.0  # a create may be large, and the provider slow to take it in
RETRY_S = 5.0


class Buyer:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def step(self) -> float | None:
        """Claims what is ready to travel and sends it off. Says when to look again."""
        desk = self._desk
        pools = await desk.store.pools(desk.keyring)
        now = desk.now()  # after reading: calls may have arrived meanwhile, and must not seem to be from the future
        wakes: list[float] = []
        for provider in sorted({view.key.provider for view in pools}):
            flushes = self._plan(provider, [view for view in pools if view.key.provider == provider], now)
            for flush in flushes.flushes:
                await self._flush(flush, now)
            if flushes.wake is not None:
                wakes.append(flushes.wake)
        return min(wakes, default=None)

    def _plan(self, provider: str, pools: list[PoolView], now: float) -> FlushPlan:
        desk = self._desk
        dialect = desk.upstreams[provider].dialect
        accounts = {view.key.credential: desk.keyring.account(view.key.credential) for view in pools}
        return plan(
            pools,
            {account: desk.road(credential) for credential, account in accounts.items()},
            desk.policy,
            dialect.limits,
            {account: self._unresolved(account) for account in accounts.values()},
            now,
            overhead=dialect.line_overhead(),
            draining=desk.closing,
            accounts=accounts,
        )

    def _unresolved(self, account: str) -> frozenset[int]:
        """Counts that would make our own batches look alike while the fate of one is unknown."""
        desk = self._desk
        return frozenset(
            batch.count
            for batch in desk.batches
            if batch.state is BatchState.UNKNOWN and desk.keyring.account(batch.key.credential) == account
        )

    async def _flush(self, flush: Flush, now: float) -> None:
        desk = self._desk
        cap = desk.byte_caps.get(desk.keyring.account(flush.credential), flush.max_bytes)
        intent = Intent(
            pool=flush.pool,
            nonce=desk.new_nonce(),
            max_count=flush.max_count,
            max_bytes=min(flush.max_bytes, cap),
            owner=desk.name,
            at=now,
        )
        batch = await desk.store.intend(intent)
        if batch is None:
            return
        desk.set_road(flush.credential, desk.road(flush.credential).spend_create(now))
        desk.crew.spawn(self._create(batch), f"create {batch.id}")

    async def _create(self, batch: Batch) -> None:
        desk = self._desk
        upstream = desk.upstreams[batch.key.provider]
        try:
            await desk.reached("intended")
            if not await desk.store.still_mine(batch.id, desk.name, desk.now() + CREATE_SILENCE_S):
                return  # another engine has it now, and decides what becomes of it
            await desk.reached("checked")
            answer = await self._send(batch, upstream)
        except NotConnected as error:
            await self._refused(batch, Refusal(0, str(error), retryable=True))
        except WireError as error:
            await self._unknown(batch, str(error))
        else:
            await desk.reached("created")
            await self._answered(batch, upstream, answer)
        finally:
            desk.wake_now()

    async def _send(self, batch: Batch, upstream: Upstream) -> Answer:
        ask = upstream.dialect.create(batch.key.headers)
        secret = self._desk.keyring.secret(batch.key.credential)
        body = self._body(batch, upstream)
        response = await upstream.ask(ask, secret, timeout=CREATE_SILENCE_S, body=body)
        return await whole(response)

    def _body(self, batch: Batch, upstream: Upstream) -> StreamedBody:
        dialect = upstream.dialect
        head, between, tail = dialect.create_frame()
        line = dialect.line(custom_id(batch.nonce, 0), b"")
        length = len(head) + batch.bytes + batch.count * len(line) + (batch.count - 1) * len(between) + len(tail)
        return StreamedBody(length, self._pieces(batch, upstream))

    async def _pieces(self, batch: Batch, upstream: Upstream) -> AsyncIterator[bytes]:
        dialect = upstream.dialect
        head, between, tail = dialect.create_frame()
        lead = head
        async for chunk in self._desk.store.lines(batch.id):
            yield lead + between.join(dialect.line(custom_id(batch.nonce, ticket), body) for ticket, body in chunk)
            lead = between
        yield tail

    async def _answered(self, batch: Batch, upstream: Upstream, answer: Answer) -> None:
        self._desk.heard(upstream, batch.key.credential, answer)
        if answer.ok:
            try:
                report = upstream.dialect.report(answer.body)
            except Garbled as error:
                await self._unknown(batch, str(error))
            else:
                await self._bought(batch, report.provider_id, report.expires_at)
        elif answer.status >= 500 or answer.status == 408:
            await self._unknown(batch, f"the create was answered with {answer.status}")
        else:
            await self._refused(batch, upstream.dialect.refusal(answer.status, answer.headers, answer.body))

    async def _bought(self, batch: Batch, provider_id: str, expires_at: float | None) -> None:
        desk = self._desk
        offset = desk.offsets.get(batch.key.provider, 0.0)
        await desk.insist(
            "writing down a bought batch",
            lambda: desk.store.move(
                batch.id,
                BatchState.OPEN,
                provider_id=provider_id,
                resolved_at=desk.now(),
                expires_at=None if expires_at is None else expires_at - offset,
                clock_offset=offset,
            ),
        )
        desk.stats.batches_submitted += 1
        whose = batch.key.credential
        desk.bulletin.tell(BatchSubmitted(desk.now(), batch.id, provider_id, batch.count, credential=whose))
        await desk.reached("bought")

    async def _unknown(self, batch: Batch, reason: str) -> None:
        desk = self._desk
        offset = desk.offsets.get(batch.key.provider, 0.0)
        await desk.insist(
            "writing down an unknown create",
            lambda: desk.store.move(
                batch.id, BatchState.UNKNOWN, resolved_at=desk.now(), clock_offset=offset, note=reason
            ),
        )
        desk.stats.batches_unknown += 1
        desk.bulletin.tell(BatchUnknown(desk.now(), batch.id, batch.count, reason, credential=batch.key.credential))

    async def _refused(self, batch: Batch, refusal: Refusal) -> None:
        """Provably not bought. Its calls wait for another batch, or go `now`, each to its own true answer."""
        desk = self._desk
        lane = await self._consequence(batch, refusal)
        reason = f"the batch was refused: {refusal.message}"
        await desk.insist(
            "writing down a refused create",
            lambda: desk.store.release(batch.id, BatchState.REFUSED, lane, desk.now(), reason),
        )
        desk.stats.batches_refused += 1
        whose, status, why = batch.key.credential, refusal.status, refusal.message
        desk.bulletin.tell(BatchRefused(desk.now(), batch.id, batch.count, status, why, credential=whose))

    async def _consequence(self, batch: Batch, refusal: Refusal) -> Lane:
        desk, credential = self._desk, batch.key.credential
        account = desk.keyring.account(credential)
        if refusal.cannot_batch:
            until = desk.now() + CANNOT_BATCH_S
            desk.cannot_batch[account] = (until, f"this credential can't batch: {refusal.message}")
            await desk.store.remember("cannot_batch", account, f"{until} {refusal.message}", desk.now())
            return Lane.NOW
        if refusal.too_large and batch.count > 1:
            desk.byte_caps[account] = max(1, batch.bytes // 2)
            return Lane.BATCH
        if refusal.retryable and not refusal.too_large:
            desk.pause(credential, RETRY_S if refusal.retry_after is None else refusal.retry_after)
            return Lane.BATCH
        return Lane.NOW
