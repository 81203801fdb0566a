"""The way to a provider's batch API: every request to it goes through `BatchApi`, and so do the moves of batches that
its answers bring about.

A request waits for its turn, is sent, and its response is learned from, whatever was requested: a create, an upload, a
list, a retrieve, results, a cancel, the deletion of a file. Providers count all of them against the same rate limit, so
a 429 to any of them concerns the next request of any kind.

What is learned belongs to an account, because all credentials of an account share its limits:

- The quota of requests per minute: stated by headers, halved by a 429, raised step by step by accepted requests.
- A pause, after a 429. Nothing is sent to the batch API before its end.
- The size of a create that the provider rejects as too large (413).
- How much of a model may be enqueued, and until when its queue is full.

The provider's clock, from the `Date` header of each response, belongs to the provider.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterable
from typing import TypeVar

from carpool.core.errors import CarpoolError, IllegalMove
from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, Headers, Lane, PoolKey
from carpool.core.ports import Ask, HttpResponse, Refusal, StreamedBody
from carpool.core.upstream import WholeResponse, clock_offset, whole
from carpool.engine.context import EngineContext
from carpool.planners.pressure.quota import BatchQuota, EnqueuedLimits, enqueued

T = TypeVar("T")

DEFAULT_RPM = 50
DEFAULT_PACE = 2.0
QUOTA_CHECK_S = 1.0  # how often to check the quota while waiting for it
PAUSE_S = 5.0  # after a 429 without `retry-after`
LONGEST_PAUSE_S = 3600.0  # upper limit of a `retry-after`
IDLE_TIMEOUT_S = 60.0


class BatchApi:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._quotas: dict[str, BatchQuota] = {}  # by account
        self._lines: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by account: the queue for its quota
        self._byte_caps: dict[str, int] = {}  # account → bytes of a create, learned from a 413
        self._queues = EnqueuedLimits()
        self.offsets: dict[str, float] = {}  # provider → its clock minus ours

    # ------------------------------------------------------------ requests

    async def request(self, batch: Batch, ask: Ask, *, timeout: float = IDLE_TIMEOUT_S) -> WholeResponse:
        """Sends one request about a batch when it is its turn."""
        await self.turn(batch.key.credential)
        return await self.send(batch, ask, timeout=timeout)

    async def send(
        self, batch: Batch, ask: Ask, *, timeout: float = IDLE_TIMEOUT_S, body: StreamedBody | None = None
    ) -> WholeResponse:
        """Sends one request at once: a create, for which the planner has spent the quota, or a cancel at close."""
        response = await whole(await self._ask(batch, ask, timeout, body))
        self._learn(batch, response.status, response.headers, response.body)
        return response

    async def open(self, batch: Batch, ask: Ask, *, timeout: float) -> HttpResponse | WholeResponse:
        """Sends one request when it is its turn. Only an error is read; the caller reads and closes a success."""
        await self.turn(batch.key.credential)
        response = await self._ask(batch, ask, timeout)
        error = None if response.status == 200 else await whole(response)
        self._learn(batch, response.status, response.headers, b"" if error is None else error.body)
        return response if error is None else error

    async def delete_files(self, batch: Batch, files: Iterable[str]) -> None:
        """Deletes files of a batch that is surely ours. Files that can't be deleted expire at the provider."""
        context = self._context
        uploads = context.upstreams[batch.key.provider].dialect.uploads
        if uploads is None or not context.policy.delete_provider_files:
            return
        for file_id in files:
            try:
                await self.request(batch, uploads.delete(batch.key.headers, file_id))
            except CarpoolError as error:
                context.trouble("deleting a provider's file", error)

    async def _ask(self, batch: Batch, ask: Ask, timeout: float, body: StreamedBody | None = None) -> HttpResponse:
        secret = self._context.keyring.secret(batch.key.credential)
        return await self._context.upstreams[batch.key.provider].ask(ask, secret, timeout=timeout, body=body)

    # ------------------------------------------------------------ the quota of an account

    def quota(self, credential: str) -> BatchQuota:
        context, account = self._context, self._context.keyring.account(credential)
        if account not in self._quotas:
            pace = context.policy.poll_interval_s or DEFAULT_PACE
            self._quotas[account] = BatchQuota.new(context.policy.batch_rpm or DEFAULT_RPM, pace, context.now())
        return self._quotas[account]

    def set_quota(self, credential: str, quota: BatchQuota) -> None:
        self._quotas[self._context.keyring.account(credential)] = quota

    async def turn(self, credential: str) -> None:
        """Waits until the account's quota allows another request, and spends it. First come, first served: otherwise
        frequent polls would hold up the download of results."""
        context = self._context
        async with self._lines[context.keyring.account(credential)]:
            while not (quota := self.quota(credential)).can_ask(context.now()):
                wait = quota.ask_ready_at(context.now()) - context.now()
                await context.clock.sleep(min(max(0.01, wait), QUOTA_CHECK_S))  # the quota may grow meanwhile
            self.set_quota(credential, quota.spend(context.now()))

    # ------------------------------------------------------------ the rows of batches

    async def moved(self, batch: Batch, target: BatchState, **changes: object) -> Batch | None:
        """Changes the state of a batch. Returns None if another engine owns it by now, because this one was considered
        dead meanwhile. Then the new owner decides."""
        return await self._if_mine(
            batch, self._context.store.move(batch.id, target, owner=self._context.name, **changes)
        )

    async def released(self, batch: Batch, target: BatchState, reason: str) -> int | None:
        """Gives a batch up: its open calls wait for another batch. Returns how many, or None as in `moved`."""
        release, context = self._context.store.release, self._context
        releasing = context.retry_write(
            "giving a batch up",
            lambda: release(batch.id, target, Lane.BATCH, context.now(), reason, owner=context.name),
        )
        return await self._if_mine(batch, releasing)

    async def _if_mine(self, batch: Batch, writing: Awaitable[T]) -> T | None:
        try:
            return await writing
        except IllegalMove:
            if await self.is_mine(batch):
                raise
            return None

    async def is_mine(self, batch: Batch) -> bool:
        """False if another engine took the batch over because this one was considered dead. The new owner decides."""
        row = await self._context.store.batch(batch.id)
        return row is None or row.owner == self._context.name

    async def stopping(self, batch: Batch, note: str) -> None:
        """Records that the provider is cancelling a batch. Canceller and poller may notice at the same time."""
        try:
            await self._context.store.move(batch.id, BatchState.CANCELLING, note=note)
        except IllegalMove:
            row = await self._context.store.batch(batch.id)
            if row is None or row.state is BatchState.OPEN:
                raise

    # ------------------------------------------------------------ learning

    def _learn(self, batch: Batch, status: int, headers: Headers, body: bytes) -> None:
        context, provider, credential = self._context, batch.key.provider, batch.key.credential
        dialect, now = context.upstreams[provider].dialect, context.now()
        context.troubles.worked("", provider)
        offset = clock_offset(headers, now)
        if offset is not None:
            self.offsets[provider] = offset
        rpm, quota = dialect.requests_per_minute(headers), self.quota(credential)
        if rpm is not None:  # the policy may lower the account's limit, but not raise it
            quota = quota.learned(min(rpm, context.policy.batch_rpm or rpm))
        elif status == 429:
            quota = quota.slowed(now)
        elif 200 <= status < 300:
            quota = quota.eased()
        self.set_quota(credential, quota)
        if status == 429:
            self._pause(credential, dialect.refusal(status, headers, body).retry_after)

    def _pause(self, credential: str, seconds: float | None) -> None:
        until = self._context.now() + min(PAUSE_S if seconds is None else seconds, LONGEST_PAUSE_S)
        self.set_quota(credential, self.quota(credential).paused(until))

    async def learn_refusal(self, batch: Batch, refusal: Refusal) -> Lane:
        """Learns why a create was refused. Returns the lane that is left for the calls of the batch."""
        context, credential = self._context, batch.key.credential
        account = context.keyring.account(credential)
        if refusal.queue_full:
            self._queues.full(account, batch, refusal.queue_tokens, context.now())
            return Lane.BATCH
        if refusal.cannot_batch:
            model = batch.key.model if refusal.of_model else ""
            await context.learned.refused(Lane.BATCH, credential, model, refusal.message)
            return Lane.NOW
        if refusal.too_large and batch.count > 1:
            self._byte_caps[account] = max(1, batch.bytes // 2)
            return Lane.BATCH
        if refusal.retryable and not refusal.too_large:
            self._pause(credential, refusal.retry_after)
            return Lane.BATCH
        return Lane.NOW

    def freed(self, batch: Batch) -> None:
        """A batch has left the provider's queue, so there is room for another."""
        self._queues.freed(self._context.keyring.account(batch.key.credential), batch.key.model)

    def opens_at(self, key: PoolKey) -> float:
        """Returns when the provider's queue for a pool's model may have room again."""
        return self._queues.opens_at(self._context.keyring.account(key.credential), key.model)

    def max_bytes(self, credential: str, model: str, most: int) -> int:
        """Lowers `most`, the bytes of the next create, to what is learned. 0 or less: there is no room now."""
        context, account = self._context, self._context.keyring.account(credential)
        ours = [batch for batch in context.batches if context.keyring.account(batch.key.credential) == account]
        room = self._queues.room(account, model, enqueued(ours, model))
        return min(most, self._byte_caps.get(account, most), most if room is None else room)
