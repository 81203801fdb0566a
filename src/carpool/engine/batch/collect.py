"""Collects ended batches: streams their results line by line into `settle`, and accounts for every call.

The `custom_id` of a result line is the nonce of its batch and the ticket of its call. A line without our nonce or with
an unreadable id is counted and ignored. Every other line is a purchase and gets its ledger entry, also when a rescue
has settled the call meanwhile: the first outcome wins, and both purchases stand in the ledger.

Collecting may be interrupted at any line, by a cut connection, a crash or a takeover, and then starts again from the
beginning. That is harmless: an outcome is written only to an open ticket, and an entry only once for each ticket and
batch. After the last line the bodies of the calls are removed, the batch becomes `collected`, and its files are deleted
at the provider.

What a line does to its call:

- succeeded, or an error that is the client's own: the call is settled with it.
- expired, cancelled, or an error that a retry may avoid: the call is bought again, in a batch or on `now`, as its
  deadline and its attempts allow (`retry_lane`). Otherwise it is settled with the error.
- no line at all: the purchase is entered with unknown price, and the call is bought again or settled as lost.

Results that the provider denies (404, 410) several times in a row are given up (`lose`). Any other failure is retried
with a backoff.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from operator import itemgetter

from msgspec.structs import replace

from carpool.core.bounded import backoff
from carpool.core.errors import BadCall, CallLost, CarpoolError, MalformedResponse, ResultsGone
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import (
    Batch,
    Entry,
    EntryKind,
    Lane,
    Outcome,
    OutcomeKind,
    Settlement,
    TicketView,
    ticket_number,
)
from carpool.core.ports import BatchReport, ResultLine
from carpool.core.upstream import Upstream, WholeResponse, whole
from carpool.engine.batch.api import BatchApi
from carpool.engine.context import LATE, PRESSED, EngineContext
from carpool.engine.events import BatchCollected, BatchLost, FailureRateHigh
from carpool.planners.tracking import Denials, retry_lane

CHUNK = 8192  # lines per transaction; more would write fewer pages, but delay the first answers
CHUNK_BYTES = 16_000_000
IN_FLIGHT = 2  # chunks being written
TIDY = 4000
RESULTS_IDLE_TIMEOUT_S = 120.0
RETRY_S = 2.0
RETRY_MAX_S = 60.0

GONE = frozenset({404, 410})

_TICKET = itemgetter(0)
_KINDS = {
    "succeeded": OutcomeKind.SUCCEEDED,
    "errored": OutcomeKind.ERRORED,
    "expired": OutcomeKind.EXPIRED,
    "canceled": OutcomeKind.CANCELLED,
}


class Collector:
    def __init__(self, context: EngineContext, api: BatchApi) -> None:
        self._context = context
        self._api = api
        self._collecting: set[int] = set()
        self._retry_at: dict[int, float] = {}
        self._failures: Counter[int] = Counter()
        self._denials = Denials()

    def start(self, batch: Batch, report: BatchReport | None = None) -> None:
        """Starts collecting, unless that is under way or has just failed. `report` is the provider's current report of
        the batch, if there is one; otherwise it is requested."""
        context = self._context
        if batch.id in self._collecting or self._retry_at.get(batch.id, 0.0) > context.now():
            return
        if batch.key.credential in context.keyring:
            self._collecting.add(batch.id)
            failures = self._failures[batch.id]
            wait = backoff(failures + 1, RETRY_S, RETRY_MAX_S) if failures else RETRY_S
            self._retry_at[batch.id] = context.now() + wait  # whatever goes wrong, no immediate retry
            context.background.spawn(self._collect(batch, report), f"collect {batch.id}")

    def retry_now(self, batch: Batch) -> None:
        """Retries a failed download soon, however often it failed, because a call needs the results."""
        if batch.id in self._retry_at:
            self._retry_at[batch.id] = min(self._retry_at[batch.id], self._context.now() + RETRY_S)

    def wake(self, now: float) -> float | None:
        return min((at for at in self._retry_at.values() if at > now), default=None)

    async def _collect(self, batch: Batch, report: BatchReport | None) -> None:
        context, upstream = self._context, self._context.upstreams[batch.key.provider]
        row = batch
        try:
            current = await context.store.batch(batch.id)
            if current is None or current.state is not BatchState.ENDED:
                return  # the caller saw an older state
            row = current
            places, files = await self._places(batch, upstream, report)
            tally = await self._stream(batch, upstream, places)
            missing = await self.settle_unmentioned(batch, "the provider's results do not mention it")
            tally["missing"] = missing.total()
            after: int | None = -1
            while after is not None:  # removes bodies in the order of the tickets, which is that of the disk
                after = await context.store.tidy(batch.id, after, TIDY)
            doing = "recording a collected batch"
            if await context.retry_write(doing, lambda: self._api.moved(batch, BatchState.COLLECTED)) is not None:
                await context.reached("collected")
                self._finished(batch, tally)
                await self._api.delete_files(batch, files)
        except CarpoolError as error:
            context.trouble(f"collecting batch {batch.id}", error, upstream.provider, context.credential_of(batch))
            self._failures[batch.id] += 1
            if isinstance(error, ResultsGone) and self._denials.add(batch.id, context.now()):
                await self.lose(row, BatchState.ABANDONED, "the provider no longer has its results")
                self._forget(batch)
        else:
            context.troubles.worked(f"collecting batch {batch.id}", upstream.provider, context.credential_of(batch))
            self._forget(batch)
        finally:
            self._collecting.discard(batch.id)
            context.wake_now()

    def _forget(self, batch: Batch) -> None:
        self._retry_at.pop(batch.id, None)
        self._failures.pop(batch.id, None)
        self._denials.clear(batch.id)

    async def _places(
        self, batch: Batch, upstream: Upstream, report: BatchReport | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Where the results are, and which files to delete afterwards. If the id does not tell, the report does."""
        assert batch.provider_id is not None
        places = upstream.dialect.results_at(batch.provider_id)
        if places is not None:
            return places, ()
        if report is None or report.results is None:
            ask = upstream.dialect.retrieve(batch.key.headers, batch.provider_id)
            response = await self._api.request(batch, ask, timeout=RESULTS_IDLE_TIMEOUT_S)
            if not response.ok:
                error = ResultsGone if response.status in GONE else MalformedResponse
                raise error(f"The provider answered {response.status} when asked where a batch's results are.")
            report = upstream.dialect.report(response.body)
        return report.results or (), report.files

    async def _stream(self, batch: Batch, upstream: Upstream, places: Sequence[str]) -> Counter[str]:
        """Pipelines the work: one chunk is written while the next is prepared and the one after it is read."""
        tally: Counter[str] = Counter()
        writing: list[asyncio.Task[None]] = []
        try:
            async with aclosing(self._chunks(batch, upstream, places, tally)) as chunks:
                async for chunk in chunks:
                    if len(writing) == IN_FLIGHT:
                        await writing.pop(0)
                    writing.append(
                        self._context.background.spawn_awaited(self._settle(batch, upstream, chunk, tally), "settle")
                    )
        finally:
            await asyncio.gather(*writing)  # also after a read error: what was read is kept
        return tally

    async def _chunks(
        self, batch: Batch, upstream: Upstream, places: Sequence[str], tally: Counter[str]
    ) -> AsyncGenerator[list[ResultLine], None]:
        chunk: list[ResultLine] = []
        size = 0
        async with aclosing(self.lines(batch, upstream, places)) as pieces:
            async for lines in pieces:
                for raw in lines:
                    try:
                        chunk.append(upstream.dialect.result_line(raw))
                        size += len(raw)
                    except MalformedResponse:
                        tally["garbled"] += 1
                while len(chunk) >= CHUNK or size >= CHUNK_BYTES:
                    yield chunk[:CHUNK]
                    chunk, size = chunk[CHUNK:], 0
        if chunk:
            yield chunk

    async def lines(self, batch: Batch, upstream: Upstream, places: Sequence[str]) -> AsyncGenerator[list[bytes], None]:
        """Yields complete result lines, as many as arrived at a time. Memory does not grow with the batch."""
        dialect = upstream.dialect
        for place in places:
            page: str | None = place
            while page is not None:
                ask = dialect.results(batch.key.headers, page)
                response = await self._api.open(batch, ask, timeout=RESULTS_IDLE_TIMEOUT_S)
                if isinstance(response, WholeResponse):
                    error = ResultsGone if response.status in GONE else MalformedResponse
                    raise error(f"The provider answered {response.status} instead of a batch's results.")
                if dialect.result_pages is not None:
                    lines, page = dialect.result_pages.lines(page, (await whole(response)).body)
                    yield lines
                    continue
                page, rest = None, b""
                try:
                    async for piece in response.chunks():
                        *lines, rest = (rest + piece).split(b"\n")
                        yield [line for line in lines if line and not line.isspace()]
                    if rest.strip():
                        yield [rest]
                finally:
                    await response.aclose()

    async def _settle(self, batch: Batch, upstream: Upstream, chunk: Sequence[ResultLine], tally: Counter[str]) -> None:
        context = self._context
        # In the order of the tickets, which is that of the disk: neighbours share pages. The sort is stable.
        mine = sorted(self._own_lines(batch, chunk, tally), key=_TICKET)
        mine = [(ticket, self._unless_edited(ticket, line)) for ticket, line in mine]
        retryable = {ticket for ticket, line in mine if line.retryable}
        views = {view.ticket: view for view in await context.store.views(sorted(retryable))} if retryable else {}
        now = context.now()
        await context.settle([self._settlement(batch, upstream, t, line, views.get(t), now) for t, line in mine])
        await context.reached("settled")

    def _own_lines(
        self, batch: Batch, chunk: Iterable[ResultLine], tally: Counter[str]
    ) -> Iterable[tuple[int, ResultLine]]:
        """Yields the lines with a ticket of this batch. Other lines are counted and ignored."""
        for line in chunk:
            nonce, _, text = line.custom_id.partition("-")
            try:
                ticket = ticket_number(text)
            except BadCall:
                ticket = -1
            if nonce != batch.nonce or ticket < 0:
                tally["stray"] += 1
                continue
            tally[line.result] += 1
            yield ticket, line

    def _unless_edited(self, ticket: int, line: ResultLine) -> ResultLine:
        """A call that may have failed because it was edited for the prompt cache is tried again, as it came."""
        if line.result != "errored" or line.retryable:
            return line
        refused = self._context.prompt_caches.refused_in_batch(ticket, line.status, line.body)
        return replace(line, retryable=True) if refused else line

    def _settlement(
        self, batch: Batch, upstream: Upstream, ticket: int, line: ResultLine, view: TicketView | None, now: float
    ) -> Settlement:
        entry = self._entry(batch, upstream, ticket, line, now)
        if line.usage is not None:
            sent = batch.intended_at if batch.sent_at is None else batch.sent_at
            if edits := self._context.prompt_caches.edits_of(ticket):
                entry = replace(entry, reason=f"For the prompt cache: {edits}.")
            self._context.prompt_caches.collected(ticket, sent, line.usage, now)
        if line.retryable and batch.abandoned:
            return Settlement(ticket, entry=entry)  # the call was requeued when the batch was abandoned
        pressed = line.result == "canceled" and batch.note == PRESSED
        lane = retry_lane(view, self._context.policy, now, pressed=pressed) if line.retryable and view else None
        if lane is not None:
            late = lane is Lane.NOW and pressed
            return Settlement(ticket, entry=entry, requeue=lane, reason=LATE if late else entry.reason)
        kind = _KINDS[line.result]
        outcome = Outcome(kind, line.status, line.body, now, Lane.BATCH, batch=batch.provider_id)
        return Settlement(ticket, outcome, entry)

    def _entry(self, batch: Batch, upstream: Upstream, ticket: int, line: ResultLine, now: float) -> Entry:
        key, usage = batch.key, line.usage
        model = line.model or key.model
        paid = would_have_paid = None
        reason = ""
        if line.result != "succeeded":
            usage, paid, would_have_paid = None, 0, 0  # only successful lines are billed
            reason = f"the batch returned it as {line.result}"
        elif usage is not None:
            paid, would_have_paid = self._context.prices.paid_and_would_have_paid(
                upstream.dialect, model, usage, Lane.BATCH, now
            )
        kind = EntryKind.PURCHASE
        bought = ticket, batch.id, now, Lane.BATCH, kind, key.provider, self._context.credential_of(batch), model
        return Entry(*bought, usage, paid, would_have_paid, reason)

    async def settle_unmentioned(
        self, batch: Batch, reason: str, *, doubted: bool = False, staying: bool = False
    ) -> Counter[Lane | None]:
        """Enters each call of which no result line was read in the ledger, as a purchase of unknown price. An open call
        is bought again, or settled as lost; nothing happens to it if the batch is only `doubted`. With `staying`, calls
        that wait for another batch stay in this one until it is released: it may come back. Returns how many calls were
        requeued on which lane."""
        requeued: Counter[Lane | None] = Counter()
        after = -1
        while tickets := await self._context.store.unmentioned(batch.id, after, CHUNK):
            after = tickets[-1]
            rows = [] if doubted else await self._context.store.views(tickets)
            views = {view.ticket: view for view in rows}
            settlements = [self._unknown_settlement(batch, t, reason, views.get(t), staying) for t in tickets]
            await self._context.settle(settlements)
            requeued.update(settlement.requeue for settlement in settlements)
        return requeued

    def _unknown_settlement(
        self, batch: Batch, ticket: int, reason: str, view: TicketView | None, staying: bool
    ) -> Settlement:
        key, now, kind = batch.key, self._context.now(), EntryKind.PURCHASE
        bought = ticket, batch.id, now, Lane.BATCH, kind, key.provider, self._context.credential_of(batch), key.model
        entry = Entry(*bought, reason=reason)
        if view is None or view.state is TicketState.SENDING:
            return Settlement(ticket, entry=entry)
        lane = retry_lane(view, self._context.policy, self._context.now())
        if lane is not None:
            requeue = None if staying and lane is Lane.BATCH else lane
            return Settlement(ticket, entry=entry, requeue=requeue, reason=reason)
        status, message = CallLost.status, f"This call was bought, but its answer is lost: {reason}."
        body = self._context.upstreams[key.provider].dialect.error(status, CallLost.code, message)
        outcome = Outcome(OutcomeKind.LOST, status, body, now, Lane.BATCH, reason, batch=batch.provider_id)
        return Settlement(ticket, outcome, entry)

    async def lose(self, batch: Batch, target: BatchState, reason: str) -> None:
        """The provider has no such batch, or no results. Its open calls are bought again as their time allows, and its
        purchases stand in the ledger with unknown price."""
        context, why = self._context, f"its batch was lost: {reason}"
        requeued = await self.settle_unmentioned(batch, why, staying=True)
        released = await self._api.released(batch, target, why)
        if released is None:
            return
        self._api.freed(batch)
        context.stats.batches_lost += 1
        context.stats.requeued_calls += released
        count = requeued.total() - requeued[None] + released
        context.emit_batch_event(BatchLost, batch, batch.provider_id or "", reason, count)
        context.wake_now()
        at = context.now()
        await context.retry_write(
            "noting a lost batch", lambda: context.store.annotate(batch.id, note=reason, ended_at=at)
        )

    async def readable(self, batch: Batch, upstream: Upstream, places: Sequence[str]) -> bool:
        """Whether the provider has results to collect."""
        try:
            async with aclosing(self.lines(batch, upstream, places)) as lines:
                await anext(lines, None)
        except ResultsGone:
            return False
        return True

    def _finished(self, batch: Batch, tally: Counter[str]) -> None:
        context = self._context
        context.stats.batches_collected += 1
        context.learner.batch_collected(batch, tally["succeeded"], tally["canceled"])
        context.stats.stray_lines += tally["stray"] + tally["garbled"]
        context.stats.missing_lines += tally["missing"]
        context.emit_batch_event(BatchCollected, batch, batch.provider_id or "", {k: v for k, v in tally.items() if v})
        limit = context.policy.alert_on_batch_failure_rate
        rate = 1 - tally["succeeded"] / max(1, batch.count)
        if limit is not None and rate > limit:
            high = FailureRateHigh(context.now(), rate, limit, batch.count, credential=context.credential_of(batch))
            context.event_hooks.emit(high)
