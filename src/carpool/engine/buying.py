"""From waiting calls to a bought batch: flush plan, intent, upload, lease check, create, and what the answer means."""

from __future__ import annotations

from collections.abc import AsyncIterator

from carpool.engine.desk import Desk
from carpool.engine.events import BatchSubmitted, BatchUnknown
from carpool.engine.queues import enqueued
from carpool.engine.refusing import refuse
from carpool.engine.sweeping import sweep
from carpool.engine.upstream import Answer, Upstream, whole
from carpool.errors import Garbled, IllegalMove, NotConnected, StoreError, WireError
from carpool.lifecycle import BatchState
from carpool.model import Batch, Intent, PoolView, custom_id
from carpool.pooling import Flush, FlushPlan, plan
from carpool.ports import Ask, Refusal, StreamedBody

CREATE_SILENCE_S = 120.0  # a create may be large, and the provider slow to take it in
NOT_IMPLEMENTED = 501  # the one server error that says what did not happen
RECHECK_S = 5.0  # how old the look at the lease may be when the end of a create goes out
UNSEEN_TRIES = 7  # of a create whose file can't be seen yet
UNSEEN_S = 0.5  # before the second of them; then twice as long each time


class Buyer:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._under_way: set[int] = set()
        self._cut: set[int] = set()  # batches whose create was broken off before its end

    async def step(self) -> float | None:
        """Claims what is ready to travel and sends it off. Says when to look again."""
        desk = self._desk
        await self._give_back()
        pools = await desk.store.pools(desk.led_credentials)
        now = desk.now()  # after reading: calls may have arrived meanwhile, and must not seem to be from the future
        wakes = [at for view in pools if (at := self._opens_at(view)) > now]
        pools = [view for view in pools if self._opens_at(view) <= now]
        for provider in sorted({view.key.provider for view in pools}):
            flushes = self._plan(provider, [view for view in pools if view.key.provider == provider], now)
            for flush in flushes.flushes:
                await self._flush(flush, now)
            if flushes.wake is not None:
                wakes.append(flushes.wake)
        return min(wakes, default=None)

    async def _give_back(self) -> None:
        """Batches whose engine died, or failed, before the create went out: nothing was bought, their calls wait as
        before. Where the store failed between that and the answer, only the provider knows."""
        for batch in self._desk.batches:
            if batch.state is not BatchState.SUBMITTING or batch.id in self._under_way:
                continue
            row = await self._desk.store.batch(batch.id)  # it may have moved on meanwhile
            if row is None or row.state is not BatchState.SUBMITTING or row.owner != self._desk.name:
                continue
            if row.unsent:
                await refuse(self._desk, row, Refusal(0, "Its create was never sent.", True, 0.0))
            else:
                await self._unknown(row, "what became of its create was not written down")

    def _opens_at(self, view: PoolView) -> float:
        """When the provider's queue for this pool's model may have room again."""
        desk = self._desk
        return desk.queues.opens_at(desk.keyring.account(view.key.credential), view.key.model)

    def _plan(self, provider: str, pools: list[PoolView], now: float) -> FlushPlan:
        desk = self._desk
        dialect = desk.upstreams[provider].dialect
        accounts = {view.key.credential: desk.keyring.account(view.key.credential) for view in pools}
        return plan(
            pools,
            {account: desk.road(credential) for credential, account in accounts.items()},
            desk.policy,
            dialect.limits,
            {} if dialect.tells_nonces else {account: self._unresolved(account) for account in accounts.values()},
            now,
            overhead=max(dialect.line_overhead(view.key.endpoint) for view in pools),
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
        most = self._most(flush)
        if most < 1:
            return  # until one of ours has ended, which wakes the planner
        intent = Intent(
            pool=flush.pool,
            nonce=desk.new_nonce(),
            max_count=flush.max_count,
            max_bytes=most,
            owner=desk.name,
            at=now,
            unsent=True,
            account=desk.keyring.account(flush.credential),
        )
        batch = await desk.store.intend(intent)
        if batch is None:
            return
        self._under_way.add(batch.id)
        desk.batches.append(batch)  # the next flush of this step counts it among the enqueued
        desk.set_road(flush.credential, desk.road(flush.credential).spend_create(now))
        desk.crew.spawn(self._create(batch), f"create {batch.id}")

    def _most(self, flush: Flush) -> int:
        """Bytes of calls that this batch may have, by all that was learned of its account."""
        desk = self._desk
        account = desk.keyring.account(flush.credential)
        ours = [batch for batch in desk.batches if desk.keyring.account(batch.key.credential) == account]
        bounds = (desk.byte_caps.get(account), desk.queues.room(account, flush.model, enqueued(ours, flush.model)))
        return min([flush.max_bytes, *(bound for bound in bounds if bound is not None)])

    async def _create(self, batch: Batch) -> None:
        desk = self._desk
        upstream = desk.upstreams[batch.key.provider]
        try:
            await desk.reached("intended")
            upload = upstream.dialect.upload(batch.key.headers, batch.nonce)
            if upload is None:
                if await self._departs(batch):
                    await self._buy(batch, upstream, None)
                return
            if not await self._still_mine(batch):
                await self._let_go(batch)
                return
            file_id = await self._upload(batch, upstream, upload)
            if file_id is not None:
                await desk.reached("uploaded")
                await self._buy_uploaded(batch, upstream, file_id)
        except IllegalMove:
            if await self._is_mine(batch):
                raise
        finally:
            self._under_way.discard(batch.id)
            self._cut.discard(batch.id)
            desk.wake_now()

    async def _departs(self, batch: Batch) -> bool:
        """Right before a create's bytes go out: that they do is on disk, unless the lease might end before the answer.
        Where it is not on disk, nothing was bought."""
        desk, now = self._desk, self._desk.now()
        departs = await desk.store.depart(batch.id, desk.name, now + CREATE_SILENCE_S, now)
        if not departs:
            await self._let_go(batch)
        return departs

    async def _still_mine(self, batch: Batch) -> bool:
        desk = self._desk
        return await desk.store.still_mine(batch.id, desk.name, desk.now() + CREATE_SILENCE_S)

    async def _is_mine(self, batch: Batch) -> bool:
        """Another engine has it when this one was taken for dead, and decides what becomes of it."""
        row = await self._desk.store.batch(batch.id)
        return row is not None and row.owner == self._desk.name

    async def _let_go(self, batch: Batch) -> None:
        """Its create did not go out, or not whole: the lease might end before the answer, or the store failed. A batch
        that is another engine's by now is `unknown`, which this move does not touch."""
        if await self._is_mine(batch):
            await refuse(self._desk, batch, Refusal(0, "its create could not be sent whole", retryable=True))

    # ------------------------------------------------------------ the lines go first: nothing is bought yet

    async def _upload(self, batch: Batch, upstream: Upstream, ask: Ask) -> str | None:
        """The id of the file; None where it was refused. Whatever goes wrong here, nothing was bought."""
        desk, credential = self._desk, batch.key.credential
        desk.set_road(credential, desk.road(credential).spend(desk.now()))
        try:
            answer = await self._send(batch, upstream, ask, self._body(batch, upstream))
            desk.heard(upstream, credential, answer)
            if answer.ok:
                return upstream.dialect.uploaded(answer.body)
            refusal = upstream.dialect.refusal(answer.status, answer.headers, answer.body)
        except (WireError, Garbled) as error:
            refusal = Refusal(0, str(error), retryable=True)
        await refuse(desk, batch, refusal)
        return None

    async def _buy_uploaded(self, batch: Batch, upstream: Upstream, file_id: str) -> None:
        """A file that was just uploaded may be invisible for a moment: then the same create is sent again."""
        desk, wait = self._desk, UNSEEN_S
        for tries_left in reversed(range(UNSEEN_TRIES)):
            if not await self._departs(batch):
                return
            if await self._buy(batch, upstream, file_id, again=tries_left > 0):
                return
            await desk.clock.sleep(wait)
            wait *= 2

    # ------------------------------------------------------------ the purchase

    async def _buy(self, batch: Batch, upstream: Upstream, file_id: str | None, *, again: bool = False) -> bool:
        """Sends the create, once. False when its file can't be seen yet and it may be sent `again`."""
        desk = self._desk
        await desk.reached("checked")
        key = batch.key
        ask = upstream.dialect.create(key.headers, key.endpoint, batch.nonce, file_id, key.model)
        try:
            answer = await self._send(batch, upstream, ask, self._body(batch, upstream) if file_id is None else None)
        except NotConnected as error:
            await self._refused(batch, upstream, Refusal(0, str(error), retryable=True), file_id)
        except WireError as error:
            if batch.id in self._cut:  # its end was never sent, so nobody can have taken it for a whole one
                await self._let_go(batch)
            else:
                await self._unknown(batch, str(error))
        else:
            await desk.reached("created")
            desk.heard(upstream, batch.key.credential, answer)
            if not answer.ok and _surely(answer.status):
                refusal = upstream.dialect.refusal(answer.status, answer.headers, answer.body)
                if refusal.unseen and again:
                    return False
                await self._refused(batch, upstream, refusal, file_id)
            else:
                await self._answered(batch, upstream, answer)
        return True

    async def _refused(self, batch: Batch, upstream: Upstream, refusal: Refusal, file_id: str | None) -> None:
        await refuse(self._desk, batch, refusal)
        if file_id is not None:
            await sweep(self._desk, batch, upstream, (file_id,))

    async def _send(self, batch: Batch, upstream: Upstream, ask: Ask, body: StreamedBody | None) -> Answer:
        secret = self._desk.keyring.secret(batch.key.credential)
        return await whole(await upstream.ask(ask, secret, timeout=CREATE_SILENCE_S, body=body))

    def _body(self, batch: Batch, upstream: Upstream) -> StreamedBody:
        dialect, endpoint = upstream.dialect, batch.key.endpoint
        head, between, tail = dialect.frame(batch.nonce)
        line = dialect.line(endpoint, custom_id(batch.nonce, 0), b"")
        length = len(head) + batch.bytes + batch.count * len(line) + (batch.count - 1) * len(between) + len(tail)
        return StreamedBody(length, self._pieces(batch, upstream))

    async def _pieces(self, batch: Batch, upstream: Upstream) -> AsyncIterator[bytes]:
        line, endpoint, nonce = upstream.dialect.line, batch.key.endpoint, batch.nonce
        head, between, tail = upstream.dialect.frame(nonce)
        lead, desk = head, self._desk
        checked_at = desk.now()
        try:
            async for chunk in desk.store.lines(batch.id):
                yield lead + between.join(line(endpoint, custom_id(nonce, ticket), body) for ticket, body in chunk)
                lead = between
                if desk.now() > checked_at + RECHECK_S:
                    await self._check_again(batch)
                    checked_at = desk.now()
        except StoreError:
            self._cut.add(batch.id)
            raise
        yield tail

    async def _check_again(self, batch: Batch) -> None:
        """A large body may take long: the lease must last from its last byte to the answer."""
        if not await self._still_mine(batch):
            raise StoreError("The lease of this engine runs out.")

    async def _answered(self, batch: Batch, upstream: Upstream, answer: Answer) -> None:
        if not answer.ok:
            await self._unknown(batch, f"the create was answered with {answer.status}")
            return
        try:
            report = upstream.dialect.report(answer.body)
        except Garbled as error:
            await self._unknown(batch, str(error))
        else:
            await self._bought(batch, report.provider_id, report.expires_at)

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


def _surely(status: int) -> bool:
    """Whether an answer to a create that is none says for sure that nothing was bought."""
    return (status < 500 and status != 408) or status == NOT_IMPLEMENTED
