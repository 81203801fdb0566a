"""Buys batches: claims waiting calls, sends the create request, and records what the response means.

Creating a batch costs money, and neither the network nor this process is reliable. The purchase protocol guarantees
that an accepted call is never lost and never bought twice by accident. It has four steps:

1. admit: the call is on disk (`admit.py`) before anything else happens.
2. intent: one transaction claims the tickets and writes a batch row `submitting` with a fresh nonce. The nonce is part
   of every `custom_id` of the batch, so the result lines prove whose batch it is.
3. create: the row stays `unsent` until right before the create request. Then `store.depart` records that the bytes may
   go out, provided that the lease outlasts the time the response may take. The lease is checked again while a large
   body is sent. Where the provider takes lines as a file, the upload comes first; an upload buys nothing.
4. bought: the provider's batch id is on disk, and the row is `open`.

After a crash, the row shows how far the purchase went:

- `unsent`: provably not bought. The row becomes `refused`, and its calls return to their pool.
- `submitting` without `unsent`: the create may have reached the provider. The row becomes `unknown`.
- `open`: bought. Polling continues.

The same holds for errors. A connection that was never made, a body that was cut before its end, a 4xx other than 408,
and a 501 prove that nothing was bought. Everything else (a timeout, a cut connection, a 5xx, an unreadable response)
leaves an unknown outcome, which is never retried here: `follow.py` resolves it. Until then the account submits
no batch with the same number of calls, unless the provider's list shows nonces, so that few batches look like the lost
one. Nothing below the engine retries a create.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping

from carpool.core.bounded import backoff
from carpool.core.errors import IllegalMove, MalformedResponse, NotConnected, StoreError, WireError
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, CachePlan, Intent, Lane, PoolView, custom_id
from carpool.core.ports import Refusal, StreamedBody, Uploads
from carpool.core.upstream import Upstream
from carpool.engine.batch.api import BatchApi
from carpool.engine.context import EngineContext
from carpool.engine.events import BatchRefused, BatchSubmitted, BatchUnknown
from carpool.planners.pooling import Flush, FlushPlan, plan

CREATE_IDLE_TIMEOUT_S = 120.0  # a create may be large, and the provider slow to read it
NOT_IMPLEMENTED = 501  # the only 5xx that proves that nothing was bought
RECHECK_S = 5.0  # maximum age of the last lease check while the body of a create is sent
FILE_TRIES = 7  # attempts at a create whose uploaded file is not visible yet
FILE_RETRY_S, FILE_RETRY_MAX_S = 0.5, 16.0  # backoff before the second attempt, and its maximum
CREATING = "creating a batch"
WAITS = "Its calls wait, and it is tried again."


class Buyer:
    def __init__(self, context: EngineContext, api: BatchApi) -> None:
        self._context = context
        self._api = api
        self._creating: set[int] = set()
        self._cut_short: set[int] = set()  # batches whose request body was cut before its end

    async def step(self) -> float | None:
        """Creates batches from the pools that are ready. Returns when to plan again."""
        context = self._context
        await self._resolve_interrupted()
        pools = await context.store.pools(context.led_credentials)
        now = context.now()  # after reading: a call that arrived meanwhile must not seem to come from the future
        wakes = [at for view in pools if (at := self._api.opens_at(view.key)) > now]
        pools = [view for view in pools if self._api.opens_at(view.key) <= now]
        for provider in sorted({view.key.provider for view in pools}):
            flushes = self._plan(provider, [view for view in pools if view.key.provider == provider], now)
            for flush in flushes.flushes:
                await self._flush(flush, now)
            if flushes.wake is not None:
                wakes.append(flushes.wake)
        return min(wakes, default=None)

    async def _resolve_interrupted(self) -> None:
        """Resolves batches whose create was interrupted by a crash or a store error. Unsent batches were not bought,
        and their calls return to the pool. Of the others only the provider knows whether they were bought."""
        for batch in self._context.batches:
            if batch.state is not BatchState.SUBMITTING or batch.id in self._creating:
                continue
            row = await self._context.store.batch(batch.id)  # its state may have changed since
            if row is None or row.state is not BatchState.SUBMITTING or row.owner != self._context.name:
                continue
            if row.unsent:
                await self.refuse(row, Refusal(0, "Its create was never sent.", True, 0.0))
            else:
                await self._record_unknown(row, "the result of its create was not recorded")
            self._context.wake_now()  # this step plans with the rows as they were

    def _plan(self, provider: str, pools: list[PoolView], now: float) -> FlushPlan:
        context, account_of = self._context, self._context.keyring.account
        dialect = context.upstreams[provider].dialect
        accounts = {view.key.credential: account_of(view.key.credential) for view in pools}
        unresolved: dict[str, frozenset[int]] = {}
        if not dialect.shows_nonces:  # another batch of the same size could be mistaken for one with unknown outcome
            unknown = [batch for batch in context.batches if batch.state is BatchState.UNKNOWN]
            unresolved = {
                account: frozenset(batch.count for batch in unknown if account_of(batch.key.credential) == account)
                for account in accounts.values()
            }
        return plan(
            pools,
            {account: self._api.quota(credential) for credential, account in accounts.items()},
            context.policy,
            dialect.limits,
            unresolved,
            now,
            overhead=max(dialect.line_overhead(view.key.endpoint) for view in pools),
            draining=context.closing,
            accounts=accounts,
            tenants={credential: context.keyring.credential(credential) for credential in accounts},
        )

    async def _flush(self, flush: Flush, now: float) -> None:
        context = self._context
        max_bytes = self._api.max_bytes(flush.credential, flush.model, flush.max_bytes)
        if max_bytes < 1:
            return  # the end of one of our batches wakes the planner
        intent = Intent(
            pool=flush.pool,
            nonce=context.new_nonce(),
            max_count=flush.max_count,
            max_bytes=max_bytes,
            owner=context.name,
            at=now,
            unsent=True,
            account=context.keyring.account(flush.credential),
        )
        batch = await context.store.intend(intent)
        if batch is None:
            return
        self._creating.add(batch.id)
        context.batches.append(batch)  # so that the next flush of this step counts it as enqueued
        self._api.set_quota(flush.credential, self._api.quota(flush.credential).spend_create(now, flush.turns))
        context.background.spawn(self._create(batch), f"create {batch.id}")

    async def _create(self, batch: Batch) -> None:
        context = self._context
        upstream = context.upstreams[batch.key.provider]
        try:
            await context.reached("intended")
            uploads = upstream.dialect.uploads
            if uploads is None:
                if await self._record_departure(batch):
                    await self._buy(batch, upstream, None)
                return
            if not await self._still_mine(batch):
                await self._refuse_unsent(batch)
                return
            file_id = await self._upload(batch, upstream, uploads)
            if file_id is not None:
                await context.reached("uploaded")
                await self._buy_uploaded(batch, upstream, file_id)
        except IllegalMove:
            if await self._api.is_mine(batch):
                raise
        finally:
            self._creating.discard(batch.id)
            self._cut_short.discard(batch.id)
            context.wake_now()

    async def _record_departure(self, batch: Batch) -> bool:
        """Records on disk that the create is about to be sent. Returns False, and gives the batch up, if the lease
        might end before the response. A create that is not recorded was not sent, so nothing was bought."""
        context, now = self._context, self._context.now()
        may_send = await context.store.depart(batch.id, context.name, now + CREATE_IDLE_TIMEOUT_S, now)
        if not may_send:
            await self._refuse_unsent(batch)
        return may_send

    async def _still_mine(self, batch: Batch) -> bool:
        context = self._context
        return await context.store.still_mine(batch.id, context.name, context.now() + CREATE_IDLE_TIMEOUT_S)

    # ------------------------------------------------------------ upload, which buys nothing

    async def _upload(self, batch: Batch, upstream: Upstream, uploads: Uploads) -> str | None:
        """Uploads the lines. Returns the file id, or None after a failure. Nothing is bought in either case."""
        context, credential = self._context, batch.key.credential
        self._api.set_quota(credential, self._api.quota(credential).spend(context.now()))
        try:
            body = await self._body(batch, upstream)
            ask = uploads.upload(batch.key.headers, batch.nonce)
            response = await self._api.send(batch, ask, timeout=CREATE_IDLE_TIMEOUT_S, body=body)
            if response.ok:
                context.troubles.worked("uploading a batch", upstream.provider, credential)
                return uploads.file_id(response.body)
            refusal = upstream.dialect.refusal(response.status, response.headers, response.body)
        except (WireError, MalformedResponse) as error:
            refusal = Refusal(0, str(error), retryable=True)
            context.troubles.failed("uploading a batch", error, upstream.provider, credential, WAITS)
        await self.refuse(batch, refusal)
        return None

    async def _buy_uploaded(self, batch: Batch, upstream: Upstream, file_id: str) -> None:
        """Sends the create, and retries it while the provider does not see the uploaded file yet."""
        for attempt in range(1, FILE_TRIES + 1):
            if not await self._record_departure(batch):
                return
            if await self._buy(batch, upstream, file_id, again=attempt < FILE_TRIES):
                return
            await self._context.clock.sleep(backoff(attempt, FILE_RETRY_S, FILE_RETRY_MAX_S))

    # ------------------------------------------------------------ create

    async def _buy(self, batch: Batch, upstream: Upstream, file_id: str | None, *, again: bool = False) -> bool:
        """Sends the create once. Returns False if the provider does not see the file yet and `again` allows a retry."""
        context, key, dialect = self._context, batch.key, upstream.dialect
        await context.reached("checked")
        ask = dialect.create(key.headers, key.endpoint, batch.nonce, file_id, key.model)
        body = await self._body(batch, upstream) if file_id is None else None
        files = () if file_id is None else (file_id,)
        try:
            response = await self._api.send(batch, ask, timeout=CREATE_IDLE_TIMEOUT_S, body=body)
        except NotConnected as error:
            context.troubles.failed(CREATING, error, upstream.provider, key.credential, WAITS)
            await self.refuse(batch, Refusal(0, str(error), retryable=True), files)
            return True
        except WireError as error:
            if batch.id in self._cut_short:  # the end of the body was never sent, so it can't have been accepted
                await self._refuse_unsent(batch)
            else:
                await self._record_unknown(batch, str(error))
            return True
        await context.reached("created")
        status = response.status
        if response.ok:
            try:
                report = dialect.report(response.body)
            except MalformedResponse as error:
                await self._record_unknown(batch, str(error))
            else:
                await self._record_bought(batch, report.provider_id, report.expires_at)
        elif (status < 500 and status != 408) or status == NOT_IMPLEMENTED:  # proves that nothing was bought
            refusal = dialect.refusal(status, response.headers, response.body)
            if refusal.file_not_ready and again:
                return False
            await self.refuse(batch, refusal, files)
        else:
            await self._record_unknown(batch, f"the create was answered with {status}")
        return True

    async def _body(self, batch: Batch, upstream: Upstream) -> StreamedBody:
        dialect, endpoint = upstream.dialect, batch.key.endpoint
        head, between, tail = dialect.frame(batch.nonce)
        line = dialect.line(endpoint, custom_id(batch.nonce, 0), b"")
        length = len(head) + batch.bytes + batch.count * len(line) + (batch.count - 1) * len(between) + len(tail)
        plans, growth = await self._cache_plans(batch)
        return StreamedBody(length + growth, self._body_chunks(batch, upstream, plans))

    async def _cache_plans(self, batch: Batch) -> tuple[dict[int, CachePlan], int]:
        """The plans of the calls that are edited for the prompt cache, and by how much that lengthens the batch: the
        length of a body is announced before it is sent. If the store fails, no call is edited."""
        caches, plans, growth = self._context.prompt_caches, {}, 0
        if not caches.may_edit:
            return {}, 0
        try:
            async for chunk in self._context.store.lines(batch.id):
                for ticket, body in chunk:
                    if (planned := caches.edit_in_batch(ticket, body)) is not None:
                        plans[ticket] = planned[0]
                        growth += len(planned[1].body) - len(body)
        except StoreError as error:
            self._context.trouble("planning for the prompt cache", error)
            return {}, 0
        return plans, growth

    async def _body_chunks(
        self, batch: Batch, upstream: Upstream, plans: Mapping[int, CachePlan]
    ) -> AsyncIterator[bytes]:
        line, endpoint, nonce = upstream.dialect.line, batch.key.endpoint, batch.nonce
        head, between, tail = upstream.dialect.frame(nonce)
        lead, context = head, self._context
        checked_at = context.now()
        try:
            async for chunk in context.store.lines(batch.id):
                if plans:
                    chunk = [(ticket, _edited(upstream, body, plans.get(ticket))) for ticket, body in chunk]
                yield lead + between.join(line(endpoint, custom_id(nonce, ticket), body) for ticket, body in chunk)
                lead = between
                if context.now() > checked_at + RECHECK_S:
                    await self._recheck_lease(batch)
                    checked_at = context.now()
        except StoreError:
            self._cut_short.add(batch.id)
            raise
        yield tail

    async def _recheck_lease(self, batch: Batch) -> None:
        """A large body takes time. The lease must still last from its last byte to the response."""
        if not await self._still_mine(batch):
            raise StoreError("The lease of this engine runs out.")

    # ------------------------------------------------------------ results of a create

    async def _record_bought(self, batch: Batch, provider_id: str, expires_at: float | None) -> None:
        context = self._context
        offset = self._api.offsets.get(batch.key.provider, 0.0)
        await context.retry_write(
            "recording a bought batch",
            lambda: context.store.move(
                batch.id,
                BatchState.OPEN,
                provider_id=provider_id,
                resolved_at=context.now(),
                expires_at=None if expires_at is None else expires_at - offset,
                clock_offset=offset,
            ),
        )
        context.stats.batches_submitted += 1
        context.troubles.worked(CREATING, batch.key.provider, batch.key.credential)
        context.emit_batch_event(BatchSubmitted, batch, provider_id, batch.count)
        await context.reached("bought")

    async def _record_unknown(self, batch: Batch, reason: str) -> None:
        context = self._context
        offset = self._api.offsets.get(batch.key.provider, 0.0)
        await context.retry_write(
            "recording an unknown create",
            lambda: context.store.move(
                batch.id, BatchState.UNKNOWN, resolved_at=context.now(), clock_offset=offset, note=reason
            ),
        )
        context.stats.batches_unknown += 1
        context.emit_batch_event(BatchUnknown, batch, batch.count, reason)

    async def _refuse_unsent(self, batch: Batch) -> None:
        """Refuses a batch whose create was not sent, or not completely: the lease would end before the response, or
        the store failed. A batch that another engine took over is `unknown` by now and stays as it is."""
        if await self._api.is_mine(batch):
            await self.refuse(batch, Refusal(0, "its create could not be sent whole", retryable=True))

    async def refuse(self, batch: Batch, refusal: Refusal, files: Iterable[str] = ()) -> None:
        """Releases the calls of a batch that was provably not bought: they wait for another batch, or go on `now`.
        Nothing is billed, so this does not count as an attempt. `files` were uploaded for it."""
        context = self._context
        lane = await self._api.learn_refusal(batch, refusal)
        reason = f"the batch was refused: {refusal.message}"
        await context.retry_write(
            "recording a refused batch",
            lambda: context.store.release(batch.id, BatchState.REFUSED, lane, context.now(), reason),
        )
        context.stats.batches_refused += 1
        status, why, key = refusal.status, refusal.message, batch.key
        if status:  # without a response the caller reports the error
            then = WAITS if lane is Lane.BATCH else "Its calls go on `now`."
            context.troubles.failed(CREATING, f"{status}: {why}", key.provider, key.credential, then)
        context.emit_batch_event(BatchRefused, batch, batch.count, status, why)
        await self._api.delete_files(batch, files)


def _edited(upstream: Upstream, body: bytes, plan: CachePlan | None) -> bytes:
    edits = upstream.dialect.caching
    edited = None if plan is None or edits is None else edits.edited(body, plan)
    return body if edited is None else edited.body
