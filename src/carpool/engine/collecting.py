"""Bringing an ended batch home: its results stream line by line into `settle`, and no call of it is forgotten."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from operator import itemgetter

from msgspec.structs import replace

from carpool import ledger
from carpool.engine.desk import Desk
from carpool.engine.events import BatchCollected, BatchLost, FailureRateHigh
from carpool.engine.settling import settle
from carpool.engine.sweeping import sweep
from carpool.engine.upstream import Upstream, whole
from carpool.errors import BadCall, CallLost, CarpoolError, Garbled, ResultsGone
from carpool.lifecycle import BatchState, TicketState
from carpool.model import (
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
from carpool.ports import BatchReport, ResultLine, WireResponse
from carpool.tracking import must_retry

CHUNK = 8192  # one statement's worth; a larger one writes fewer pages, but the first answers wait for the last of it
CHUNK_BYTES = 16_000_000
IN_FLIGHT = 2  # chunks
TIDY = 4000
RESULTS_SILENCE_S = 120.0
RETRY_S = 2.0
RETRY_MAX_S = 60.0
GONE_S = 600.0  # results that are denied for so long after the end are gone

_TICKET = itemgetter(0)
_KINDS = {
    "succeeded": OutcomeKind.SUCCEEDED,
    "errored": OutcomeKind.ERRORED,
    "expired": OutcomeKind.EXPIRED,
    "canceled": OutcomeKind.CANCELLED,
}


class Collector:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._busy: set[int] = set()
        self._retry_at: dict[int, float] = {}
        self._failures: Counter[int] = Counter()

    def start(self, batch: Batch, report: BatchReport | None = None) -> None:
        """Begins to collect, unless that is under way or was tried a moment ago. `report` is what the provider said of
        its end, where that was a moment ago; otherwise it is asked."""
        desk = self._desk
        if batch.id in self._busy or self._retry_at.get(batch.id, 0.0) > desk.now():
            return
        if batch.key.credential in desk.keyring:
            self._busy.add(batch.id)
            wait = min(RETRY_S * 2.0 ** min(self._failures[batch.id], 10), RETRY_MAX_S)
            self._retry_at[batch.id] = desk.now() + wait  # whatever goes wrong, it is not tried again at once
            desk.crew.spawn(self._collect(batch, report), f"collect {batch.id}")

    def hurry(self, batch: Batch) -> None:
        """Results that could not be fetched are tried again soon, however often that failed: somebody needs them."""
        if batch.id in self._retry_at:
            self._retry_at[batch.id] = min(self._retry_at[batch.id], self._desk.now() + RETRY_S)

    def wake(self, now: float) -> float | None:
        return min((at for at in self._retry_at.values() if at > now), default=None)

    async def _collect(self, batch: Batch, report: BatchReport | None) -> None:
        desk, upstream = self._desk, self._desk.upstreams[batch.key.provider]
        row = batch
        try:
            found = await desk.store.batch(batch.id)
            if found is None or found.state is not BatchState.ENDED:
                return  # what started this was a look at an older state
            row = found
            places, files = await self._places(batch, upstream, report)
            tally = await self._stream(batch, upstream, places)
            tally["missing"] = await self._forgotten(batch)
            await self._tidy(batch)
            doing = "writing down a collected batch"
            if await desk.insist(doing, lambda: desk.moved(batch, BatchState.COLLECTED)) is not None:
                await desk.reached("collected")
                self._finished(batch, tally)
                await sweep(desk, batch, upstream, files)
        except CarpoolError as error:
            desk.trouble("collecting", error)
            self._failures[batch.id] += 1
            if isinstance(error, ResultsGone) and desk.now() - (row.ended_at or 0.0) >= GONE_S:
                await self.lose(row, "the provider no longer has its results")
        else:
            self._retry_at.pop(batch.id, None)
            self._failures.pop(batch.id, None)
        finally:
            self._busy.discard(batch.id)
            desk.wake_now()

    async def _tidy(self, batch: Batch) -> None:
        """In the order of the tickets, which is that of the disk, and not in that of the results."""
        after: int | None = -1
        while after is not None:
            after = await self._desk.store.tidy(batch.id, after, TIDY)

    async def _places(
        self, batch: Batch, upstream: Upstream, report: BatchReport | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Where the results lie, and which files the batch leaves behind: its report tells where its id does not."""
        assert batch.provider_id is not None
        places = upstream.dialect.results_at(batch.provider_id)
        if places is not None:
            return places, ()
        if report is None or report.results is None:
            desk, credential = self._desk, batch.key.credential
            await desk.turn(credential)
            ask = upstream.dialect.retrieve(batch.key.headers, batch.provider_id)
            answer = await whole(await upstream.ask(ask, desk.keyring.secret(credential), timeout=RESULTS_SILENCE_S))
            if not answer.ok:
                raise Garbled(f"The provider answered {answer.status} to a question where a batch's results are.")
            report = upstream.dialect.report(answer.body)
        return report.results or (), report.files

    async def _stream(self, batch: Batch, upstream: Upstream, places: Sequence[str]) -> Counter[str]:
        """One chunk is written while the next is made ready and the one after it is read."""
        tally: Counter[str] = Counter()
        writing: list[asyncio.Task[None]] = []
        try:
            async with aclosing(self._chunks(batch, upstream, places, tally)) as chunks:
                async for chunk in chunks:
                    if len(writing) == IN_FLIGHT:
                        await writing.pop(0)
                    writing.append(self._desk.crew.lend(self._settle(batch, upstream, chunk, tally), "settle"))
        finally:
            await asyncio.gather(*writing)  # also when the reading failed: what was read is kept
        return tally

    async def _chunks(
        self, batch: Batch, upstream: Upstream, places: Sequence[str], tally: Counter[str]
    ) -> AsyncGenerator[list[ResultLine], None]:
        chunk: list[ResultLine] = []
        size = 0
        async with aclosing(self._pieces(batch, upstream, places)) as pieces:
            async for lines in pieces:
                for raw in lines:
                    try:
                        chunk.append(upstream.dialect.result_line(raw))
                        size += len(raw)
                    except Garbled:
                        tally["garbled"] += 1
                while len(chunk) >= CHUNK or size >= CHUNK_BYTES:
                    yield chunk[:CHUNK]
                    chunk, size = chunk[CHUNK:], 0
        if chunk:
            yield chunk

    async def result_lines(
        self, batch: Batch, upstream: Upstream, places: Sequence[str]
    ) -> AsyncGenerator[bytes, None]:
        """The lines of a batch's results as they arrive, one by one."""
        async with aclosing(self._pieces(batch, upstream, places)) as pieces:
            async for lines in pieces:
                for line in lines:
                    yield line

    async def _pieces(
        self, batch: Batch, upstream: Upstream, places: Sequence[str]
    ) -> AsyncGenerator[list[bytes], None]:
        """Whole lines, as many as came at a time. Memory does not grow with the batch."""
        read = self._leaves if upstream.dialect.pages_results else self._file
        for place in places:
            async with aclosing(read(batch, upstream, place)) as pieces:
                async for lines in pieces:
                    yield lines

    async def _leaves(self, batch: Batch, upstream: Upstream, place: str) -> AsyncGenerator[list[bytes], None]:
        """Results that come in pages, each read as a whole."""
        following: str | None = place
        while following is not None:
            answer = await whole(await self._open(batch, upstream, following))
            lines, following = upstream.dialect.result_page(following, answer.body)
            yield lines

    async def _file(self, batch: Batch, upstream: Upstream, place: str) -> AsyncGenerator[list[bytes], None]:
        response = await self._open(batch, upstream, place)
        try:
            rest = b""
            async for piece in response.chunks():
                *lines, rest = (rest + piece).split(b"\n")
                yield [line for line in lines if line and not line.isspace()]
            if rest.strip():
                yield [rest]
        finally:
            await response.aclose()

    async def _open(self, batch: Batch, upstream: Upstream, place: str) -> WireResponse:
        """The results at a place, once the provider gives them."""
        desk, credential = self._desk, batch.key.credential
        await desk.turn(credential)
        ask = upstream.dialect.results(batch.key.headers, place)
        response = await upstream.ask(ask, desk.keyring.secret(credential), timeout=RESULTS_SILENCE_S)
        desk.heard(upstream, credential, response)
        if response.status != 200:
            answer = await whole(response)
            refusal = upstream.dialect.refusal(answer.status, answer.headers, answer.body)
            if answer.status == 429:
                desk.pause(credential, RETRY_S if refusal.retry_after is None else refusal.retry_after)
            error = ResultsGone if answer.status in (404, 410) else Garbled
            raise error(f"The provider answered {answer.status} instead of a batch's results.")
        return response

    async def _settle(self, batch: Batch, upstream: Upstream, chunk: Sequence[ResultLine], tally: Counter[str]) -> None:
        desk = self._desk
        # By ticket, which is the order of the disk: neighbours lie on the same pages. Lines of one ticket keep theirs.
        mine = sorted(self._own(batch, chunk, tally), key=_TICKET)
        again = {ticket for ticket, line in mine if line.retryable}
        views = {view.ticket: view for view in await desk.store.views(sorted(again))} if again else {}
        now = desk.now()
        await settle(desk, [self._settlement(batch, upstream, t, line, views.get(t), now) for t, line in mine])
        await desk.reached("settled")

    def _own(self, batch: Batch, chunk: Iterable[ResultLine], tally: Counter[str]) -> Iterable[tuple[int, ResultLine]]:
        """The lines that name a ticket of this very batch; whatever else the provider sent is counted and left."""
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

    def _settlement(
        self, batch: Batch, upstream: Upstream, ticket: int, line: ResultLine, view: TicketView | None, now: float
    ) -> Settlement:
        entry = self._entry(batch, upstream, ticket, line, now)
        if line.retryable and view is not None and (lane := self._again(view)) is not None:
            reason = f"the batch gave it back as {line.result}"
            return Settlement(ticket, entry=entry, requeue=lane, reason=reason)
        kind = _KINDS[line.result]
        outcome = Outcome(kind, line.status, line.body, now, Lane.BATCH, batch=batch.provider_id)
        return Settlement(ticket, outcome, entry)

    def _again(self, view: TicketView) -> Lane | None:
        """Where a call goes that the batch did not answer: into another batch, or `now`; None: give the failure."""
        desk = self._desk
        asking = 0.0 if view.deadline is None or view.rescue_at is None else view.deadline - view.rescue_at
        attempts = view.requeues + 1
        return must_retry(True, attempts, desk.policy, view.deadline, desk.now(), asking, awaited=view.awaited)

    def _entry(self, batch: Batch, upstream: Upstream, ticket: int, line: ResultLine, now: float) -> Entry:
        key, usage = batch.key, line.usage
        model = line.model or key.model
        paid = would_have_paid = None
        reason = ""
        if line.result != "succeeded":
            usage, paid, would_have_paid = None, 0, 0  # what was given back is not billed
            reason = f"the batch gave it back as {line.result}"
        elif usage is not None:
            book = self._desk.prices
            paid, would_have_paid = ledger.money(upstream.dialect.seller, model, usage, Lane.BATCH, now, book)
        kind = EntryKind.PURCHASE
        bought = ticket, batch.id, now, Lane.BATCH, kind, key.provider, key.credential, model
        return Entry(*bought, usage, paid, would_have_paid, reason)

    async def _forgotten(self, batch: Batch) -> int:
        """Calls that the results do not mention. Whether they were billed is unknown; their callers still wait."""
        count = 0
        reason = "the provider's results do not mention it"
        async for tickets in self._unmentioned(batch):
            views = {view.ticket: view for view in await self._desk.store.views(tickets)}
            unsure = [self._unsure(batch, ticket, reason, views.get(ticket)) for ticket in tickets]
            await settle(self._desk, unsure)
            count += len(tickets)
        return count

    async def _unmentioned(self, batch: Batch) -> AsyncGenerator[list[int], None]:
        after = -1
        while tickets := await self._desk.store.unmentioned(batch.id, after, CHUNK):
            after = tickets[-1]
            yield tickets

    def _unsure(self, batch: Batch, ticket: int, reason: str, view: TicketView | None) -> Settlement:
        """Stands in the ledger as unknown. An open call is tried again, or given the loss."""
        entry = ledger.attempt(
            ticket=ticket,
            purchase=batch.id,
            at=self._desk.now(),
            provider=batch.key.provider,
            credential=batch.key.credential,
            model=batch.key.model,
            lane=Lane.BATCH,
            reason=reason,
        )
        if view is None or view.state is TicketState.SENDING:
            return Settlement(ticket, entry=entry)
        lane = self._again(view)
        if lane is not None:
            return Settlement(ticket, entry=entry, requeue=lane, reason=reason)
        return Settlement(ticket, self._loss(batch, reason), entry)

    async def doubt(self, batch: Batch, reason: str) -> None:
        """The whole batch may have been bought, and may not: each of its calls stands in the ledger as unknown."""
        async for tickets in self._unmentioned(batch):
            await settle(self._desk, [self._unsure(batch, ticket, reason, None) for ticket in tickets])

    def _loss(self, batch: Batch, reason: str) -> Outcome:
        body = self._desk.upstreams[batch.key.provider].dialect.error(
            CallLost.status, CallLost.code, f"This call was bought, but its answer is lost: {reason}."
        )
        now = self._desk.now()
        return Outcome(OutcomeKind.LOST, CallLost.status, body, now, Lane.BATCH, reason, batch=batch.provider_id)

    async def lose(self, batch: Batch, reason: str) -> None:
        """The provider has nothing more to give for this batch."""
        desk = self._desk
        async for tickets in self._unmentioned(batch):
            unsure = [replace(self._unsure(batch, t, reason, None), outcome=self._loss(batch, reason)) for t in tickets]
            await settle(desk, unsure)
        if await desk.moved(batch, BatchState.LOST, note=reason) is None:
            return
        whose = batch.key.credential
        desk.bulletin.tell(BatchLost(desk.now(), batch.id, batch.provider_id or "", reason, credential=whose))

    def _finished(self, batch: Batch, tally: Counter[str]) -> None:
        desk = self._desk
        desk.stats.batches_collected += 1
        desk.stats.stray_lines += tally["stray"] + tally["garbled"]
        desk.stats.missing_lines += tally["missing"]
        found, whose = {k: v for k, v in tally.items() if v}, batch.key.credential
        desk.bulletin.tell(BatchCollected(desk.now(), batch.id, batch.provider_id or "", found, credential=whose))
        limit = desk.policy.alert_on_batch_failure_rate
        rate = 1 - tally["succeeded"] / max(1, batch.count)
        if limit is not None and rate > limit:
            desk.bulletin.tell(FailureRateHigh(desk.now(), rate, limit, batch.count, credential=whose))
