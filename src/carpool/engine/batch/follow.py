"""Follows bought batches to their end, and reconciles creates with an unknown outcome.

One list request per account covers all of its batches, at an interval that fits their age.

Unless the provider answered, or the connection was provably never made, a create may have been bought: after a crash,
a timeout, a cut connection, a 5xx. The row is `unknown` then, and the `Reconciler` decides without ever guessing.

A batch at the provider is ours only if our create returned its id, or if it carries our nonce. Some providers show the
nonce in their list. Elsewhere it appears only in the `custom_id` of the result lines, that is, when the batch has
ended. Until then a batch in the list that fits by count and creation time is a suspect. Suspects are watched and never
cancelled, because they may belong to somebody else who uses the same account. When a suspect has ended, a few of its
result lines are read. If one carries our nonce, the batch is ours: the row becomes `open` and is polled like any other.
If none does, it is a stranger to this row, though it may still prove another row.

The reconciler gives up when no suspect has appeared within a grace time, or when suspects prove nothing for a day. The
row becomes `abandoned`: each of its calls is in the ledger as a purchase of unknown price, and open calls are
bought again. An abandoned batch is watched for 24 hours more. Late proof settles calls that are still open, and is
otherwise entered as a duplicate. Without proof the row becomes `void`, and the price stays unknown.

Calls with a near deadline do not wait for any of this: `rescue.py` sends them one by one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from carpool.core.bounded import backoff
from carpool.core.errors import CarpoolError, MalformedResponse
from carpool.core.lifecycle import UNRESOLVED, BatchState
from carpool.core.model import Batch
from carpool.core.ports import BatchReport
from carpool.core.upstream import Upstream, WholeResponse
from carpool.engine.batch.api import BatchApi
from carpool.engine.batch.buy import Buyer
from carpool.engine.batch.collect import GONE, Collector
from carpool.engine.context import EngineContext
from carpool.engine.events import BatchAbandoned, BatchEnded, BatchSubmitted, RetentionNear
from carpool.planners.forecast import BatchClass
from carpool.planners.poll_pace import InFlight, next_poll
from carpool.planners.tracking import (
    DENIED_PACE_S,
    WATCH,
    Denials,
    reconcile,
    reconcile_delay,
    watch_pace,
)

GRACE_S = 90.0  # how long the provider's list may lag behind a create
LINES_TO_READ = 50  # our batch shows its nonce within this many lines; stray lines may come before


class Reconciler:
    def __init__(self, context: EngineContext, api: BatchApi, collector: Collector) -> None:
        self._context = context
        self._api = api
        self._collector = collector

    def due(self, batch: Batch, polled_at: float | None) -> float:
        """Returns when to list the provider's batches again for an unresolved batch."""
        since = batch.resolved_at or batch.intended_at
        if polled_at is None or polled_at < since:
            return since
        if batch.state is BatchState.ABANDONED:
            return polled_at + watch_pace(polled_at - since)
        return polled_at + reconcile_delay(polled_at - since, GRACE_S, self._context.policy.poll_interval_s)

    async def apply(
        self, upstream: Upstream, batches: Sequence[Batch], listed: Sequence[BatchReport], asked: float
    ) -> None:
        """Compares the list that was requested at `asked` with the creates whose outcome is unknown."""
        for batch in batches:
            row = await self._context.store.batch(batch.id)
            if row is not None and row.state in UNRESOLVED:
                await self._apply(upstream, row, listed, asked)

    async def _apply(self, upstream: Upstream, batch: Batch, listed: Sequence[BatchReport], asked: float) -> None:
        context, sharing = self._context, self._context.keyring.sharing(batch.key.credential)
        plan = reconcile(
            batch,
            listed,
            # Credentials that share a secret see each other's batches.
            {name for credential in sharing for name in await context.store.known_provider_ids(credential)},
            await context.store.suspects(batch.id),
            asked,
            self._api.offsets.get(upstream.provider, batch.clock_offset),
            grace=GRACE_S,
        )
        if plan.proven is not None:
            await self._adopt(batch, plan.proven)
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

    async def _is_ours(self, upstream: Upstream, batch: Batch, provider_id: str) -> bool:
        """Whether a result line carries our nonce. Nothing else of another user's batch is read or kept."""
        lines_read, places = 0, upstream.dialect.results_at(provider_id) or ()
        async with aclosing(self._collector.lines(batch, upstream, places)) as pieces:
            async for lines in pieces:
                for raw in lines:
                    try:
                        if upstream.dialect.result_line(raw).custom_id.startswith(f"{batch.nonce}-"):
                            return True
                    except MalformedResponse:
                        continue
                    lines_read += 1
                    if lines_read >= LINES_TO_READ:
                        return False
        return False

    async def _adopt(self, batch: Batch, provider_id: str) -> None:
        context = self._context
        if await self._api.moved(batch, BatchState.OPEN, provider_id=provider_id, resolved_at=context.now()) is None:
            return
        context.stats.batches_submitted += 1
        context.emit_batch_event(BatchSubmitted, batch, provider_id, batch.count)
        context.wake_now()

    async def _give_up(self, batch: Batch) -> None:
        context = self._context
        if batch.state is BatchState.ABANDONED:
            await self._api.moved(batch, BatchState.VOID)
            return
        reason = "its create went unanswered, and no batch at the provider fits it"
        await self._collector.settle_unmentioned(batch, reason, doubted=True)
        count = await self._api.released(batch, BatchState.ABANDONED, reason)
        if count is None:
            return
        context.stats.batches_abandoned += 1
        context.emit_batch_event(BatchAbandoned, batch, count, reason)
        context.wake_now()


MAX_PAGES = 20
FAILED_POLL_S = 5.0
FAILED_POLL_MAX_S = 60.0
NEVER_NAMED_S = 600.0  # results that are announced for this long without a location never get one
ALERT_BEFORE_S = 2 * 86_400.0


class Follower:
    def __init__(self, context: EngineContext, api: BatchApi, buyer: Buyer, collector: Collector) -> None:
        self._context = context
        self._api = api
        self._buyer = buyer
        self._collector = collector
        self._reconciler = Reconciler(context, api, collector)
        self._polling: set[str] = set()
        self._polled_at: dict[str, float] = {}  # account → last successful poll
        self._not_before: dict[str, float] = {}  # account → earliest retry of a failed poll
        self._failures: Counter[str] = Counter()  # account → failed polls since the last success
        self._denials = Denials()
        self._not_due_until: dict[int, float] = {}  # denied batch → when to request it again
        self._alerted: set[int] = set()
        self._hinted: set[int] = set()  # batches of any engine that were reported as ended since the last step
        self._reported_ended: set[str] = set()  # accounts with a batch that was reported as ended

    async def step(self, now: float) -> float | None:
        """Starts the polls that are due, and the collection of ended batches. Returns when to plan again."""
        hinted, self._hinted = self._hinted, set()
        by_account: dict[str, list[Batch]] = defaultdict(list)
        for batch in self._context.batches:
            account = self._context.keyring.account(batch.key.credential)
            if batch.id in hinted and batch.state is BatchState.ENDED:
                self._collector.retry_now(batch)
            elif batch.id in hinted:
                self._not_due_until.pop(batch.id, None)
                self._reported_ended.add(account)
            if batch.state is BatchState.ENDED:
                self._collector.start(batch)
            elif batch.state is not BatchState.SUBMITTING:
                by_account[account].append(batch)
            self._alert(batch, now)
        wakes = [self._poll_if_due(account, batches, now) for account, batches in by_account.items()]
        wakes.append(self._collector.wake(now))
        return min((wake for wake in wakes if wake is not None), default=None)

    def poll_soon(self, provider: str, provider_id: str) -> None:
        """Polls a batch at once, because it is reported as ended or its answers are urgent. If another engine owns it,
        the store passes the hint on."""
        named = provider, provider_id
        mine = [batch.id for batch in self._context.batches if (batch.key.provider, batch.provider_id) == named]
        if mine:
            self.on_hint(mine)
        else:
            self._context.background.spawn(self._pass_on(provider, provider_id), "hint_batch")

    async def _pass_on(self, provider: str, provider_id: str) -> None:
        try:
            await self._context.store.hint_batch(provider, provider_id)
        except CarpoolError as error:  # only a hint: the next poll will notice
            self._context.trouble("passing on a webhook", error)

    def on_hint(self, numbers: Sequence[int]) -> None:
        """Batches of any engine were reported as ended, to this engine or another."""
        if self._context.led or self._context.batches:  # an engine that leads nothing polls nothing
            self._hinted.update(numbers)
            self._context.wake_now()

    def _poll_if_due(self, account: str, batches: list[Batch], now: float) -> float | None:
        batches = [batch for batch in batches if batch.key.credential in self._context.keyring]
        next_due = min((at for batch in batches if (at := self._due_at(batch)) > now), default=math.inf)
        batches = [batch for batch in batches if self._due_at(batch) <= now]
        if account in self._polling or not batches:
            return next_due
        due = self._due(account, batches, now)
        if due > now and account not in self._reported_ended:
            return min(due, next_due)
        batch_quota = self._api.quota(batches[0].key.credential)
        if not batch_quota.can_ask(now):
            return batch_quota.ask_ready_at(now)
        self._polling.add(account)
        self._reported_ended.discard(account)
        self._context.background.spawn(self._poll(account, batches), f"poll {account[:8]}")
        return None

    def _due(self, account: str, batches: Sequence[Batch], now: float) -> float:
        last = self._polled_at.get(account)
        pace = self._context.policy.poll_interval_s
        if pace is None:
            pace = self._context.upstreams[batches[0].key.provider].dialect.limits.pace
        requests = self._api.quota(batches[0].key.credential).requests
        times = [next_poll(self._in_flight(batches), last, pace, requests, now)]
        times += [self._reconciler.due(batch, last) for batch in batches if _unresolved(batch)]
        if last is not None and any(batch.id in self._denials for batch in batches):
            times.append(last + DENIED_PACE_S)
        if any(map(_denied, batches)):  # the caller filtered out those that are not due yet
            times.append(now)
        return max(self._not_before.get(account, 0.0), min(times))

    def _in_flight(self, batches: Sequence[Batch]) -> list[InFlight]:
        ends_within = self._context.forecast.ends_within
        bought: defaultdict[BatchClass, list[float]] = defaultdict(list)
        for batch in filter(_ours, batches):
            bought[BatchClass.of(batch.key)].append(batch.resolved_at or batch.intended_at)
        return [InFlight(partial(ends_within, of=of), sorted(times)) for of, times in bought.items()]

    async def _poll(self, account: str, batches: list[Batch]) -> None:
        context = self._context
        upstream = context.upstreams[batches[0].key.provider]
        complete = False
        try:
            asked = context.now()
            reports = await self._list(upstream, batches)
            await context.reached("polled")
            identified = [batch for batch in batches if not _unresolved(batch)]
            processed = [await self._process(batch, upstream, reports) for batch in identified]
            unresolved = [batch for batch in batches if _unresolved(batch)]
            await self._reconciler.apply(upstream, unresolved, list(reports.values()), asked)
        except CarpoolError as error:  # any number of failed polls is harmless
            context.trouble("polling", error, upstream.provider, batches[0].key.credential)
        else:
            complete = all(processed)
            if complete:  # otherwise the provider may be unreachable: a single batch is not listed
                context.troubles.worked("polling", upstream.provider, batches[0].key.credential)
        finally:
            if complete:
                self._polled_at[account] = context.now()
                self._not_before.pop(account, None)
                del self._failures[account]
            else:  # Jitter, because two keys of one workspace share a rate limit: without it, a poll that needs several
                # requests might always lose some of them to the other key.
                self._failures[account] += 1
                pause = backoff(self._failures[account], FAILED_POLL_S, FAILED_POLL_MAX_S, context.rng.random())
                self._not_before[account] = context.now() + pause
            self._polling.discard(account)
            context.wake_now()

    async def _list(self, upstream: Upstream, batches: Sequence[Batch]) -> dict[str, BatchReport]:
        """Lists the provider's batches, newest first, back to the oldest of ours."""
        wanted_ids = {batch.provider_id for batch in batches if not _unresolved(batch)}
        if len(batches) == 1 and wanted_ids and batches[0].id not in self._denials:
            return {}  # one batch is requested by id; if that was denied, a list shows whether others exist
        oldest = min(batch.intended_at for batch in batches) + self._api.offsets.get(upstream.provider, 0.0) - 120
        unresolved = any(map(_unresolved, batches))
        reports: dict[str, BatchReport] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            limit = min(1000, 2 * len(batches) + 20)
            listing = upstream.dialect.listing(batches[0].key.headers, cursor, limit)
            response = await self._api.request(batches[0], listing)
            page, cursor = upstream.dialect.page(_body(response), cursor)
            reports.update((report.provider_id, report) for report in page)
            if cursor is None or (wanted_ids <= reports.keys() and not unresolved) or page[-1].created_at < oldest:
                break
        names = upstream.dialect.upload_names
        if names is None or not reports or not unresolved:
            return reports
        files = await self._api.request(batches[0], names.list_files(batches[0].key.headers))
        nonces = names.nonces(_body(files))
        return {name: replace(report, nonce=nonces.get(report.source or "", "")) for name, report in reports.items()}

    async def _process(self, batch: Batch, upstream: Upstream, reports: Mapping[str, BatchReport]) -> bool:
        """Processes one batch; False if that failed. One failing batch must not affect the others."""
        try:
            if _denied(batch):
                await self._watch(batch, upstream, reports)
            else:
                await self._apply(batch.id, await self._report(batch, upstream, reports))
        except CarpoolError as error:
            self._context.trouble(f"looking at batch {batch.id}", error, upstream.provider, batch.key.credential)
            return False
        self._context.troubles.worked(f"looking at batch {batch.id}", upstream.provider, batch.key.credential)
        return True

    async def _report(self, batch: Batch, upstream: Upstream, reports: Mapping[str, BatchReport]) -> BatchReport | None:
        """The report from the list, or requested by id if the list lags. None while the provider denies the batch."""
        assert batch.provider_id is not None
        if batch.provider_id in reports:
            return reports[batch.provider_id]
        ask = upstream.dialect.retrieve(batch.key.headers, batch.provider_id)
        response = await self._api.request(batch, ask)
        return None if response.status in GONE else upstream.dialect.report(_body(response))

    async def _watch(self, batch: Batch, upstream: Upstream, reports: Mapping[str, BatchReport]) -> None:
        """Checks whether a batch that was denied and abandoned exists after all. Then it is polled to its end."""
        context = self._context
        since = self._postpone(batch)
        report = await self._report(batch, upstream, reports)
        is_back = report is not None and (not report.ended or report.failure is not None)
        if report is not None and not is_back and report.results is not None:
            is_back = await self._collector.readable(batch, upstream, report.results)
        row = await context.store.batch(batch.id)
        if row is None or not _denied(row):
            return  # the caller saw an older state
        if is_back:
            self._not_due_until.pop(batch.id, None)
            await self._api.moved(batch, BatchState.OPEN)
        elif context.now() - since >= WATCH or (report is not None and report.results is None):
            self._not_due_until.pop(batch.id, None)
            await self._api.moved(batch, BatchState.LOST)

    def _due_at(self, batch: Batch) -> float:
        return self._not_due_until.get(batch.id, 0.0) if _denied(batch) else 0.0

    def _postpone(self, batch: Batch) -> float:
        """Schedules the next request for a denied batch. Returns since when it is denied."""
        now, since = self._context.now(), batch.ended_at or batch.intended_at
        self._not_due_until[batch.id] = now + watch_pace(now - since)
        return since

    async def _apply(self, number: int, report: BatchReport | None) -> None:
        context = self._context
        batch = await context.store.batch(number)
        if batch is None or not _ours(batch):
            return  # its state changed during the request
        if report is None:
            if self._denials.add(batch.id, context.now()):
                self._denials.clear(batch.id)
                self._postpone(batch)
                await self._collector.lose(batch, BatchState.ABANDONED, "the provider does not know it any more")
            return
        self._denials.clear(batch.id)
        if report.failure is not None:
            await self._buyer.refuse(batch, report.failure, report.files)
        elif report.ended and report.results is None:
            await self._collector.lose(batch, BatchState.LOST, "the provider no longer has its results")
        elif report.ended:
            await self._end_batch(batch, report)
        elif self._results_withheld(batch, report):
            await self._end_batch(batch, replace(report, ended=True, results=()))
        elif batch.state is BatchState.OPEN and not report.cancelling:
            context.learner.batch_in_flight(batch)
        elif batch.state is BatchState.OPEN:
            await self._api.stopping(batch, batch.note or "cancelled by somebody at the provider")

    def _results_withheld(self, batch: Batch, report: BatchReport) -> bool:
        """Whether an ended batch has announced results for so long, without a location, that none will come."""
        provider_now = self._context.now() + self._api.offsets.get(batch.key.provider, batch.clock_offset)
        return report.ended_at is not None and provider_now - report.ended_at >= NEVER_NAMED_S

    async def _end_batch(self, batch: Batch, report: BatchReport) -> None:
        context = self._context
        took = context.now() - (batch.resolved_at or batch.intended_at)
        ended = await self._api.moved(batch, BatchState.ENDED, ended_at=context.now())
        if ended is None:
            return
        offset = self._api.offsets.get(batch.key.provider, batch.clock_offset)
        context.learner.batch_ended(batch, context.now() if report.ended_at is None else report.ended_at - offset)
        self._api.freed(batch)
        context.emit_batch_event(BatchEnded, batch, report.provider_id, took)
        await context.reached("ended")
        self._collector.start(ended, report)

    def _alert(self, batch: Batch, now: float) -> None:
        """Reports uncollected results before the provider drops them."""
        if batch.provider_id is None or batch.id in self._alerted:
            return
        retention = self._context.upstreams[batch.key.provider].dialect.limits.retention
        drops_at = batch.intended_at + retention
        if now >= drops_at - min(ALERT_BEFORE_S, retention / 4):
            self._alerted.add(batch.id)
            self._context.emit_batch_event(RetentionNear, batch, batch.provider_id, drops_at)


def _ours(batch: Batch) -> bool:
    return batch.state in (BatchState.OPEN, BatchState.CANCELLING)


def _denied(batch: Batch) -> bool:
    """Bought, abandoned because the provider denies it, and still watched."""
    return batch.state is BatchState.ABANDONED and batch.provider_id is not None


def _unresolved(batch: Batch) -> bool:
    """Its create went unanswered, so only a list request can find it."""
    return not _ours(batch) and not _denied(batch)


def _body(response: WholeResponse) -> bytes:
    if not response.ok:
        raise MalformedResponse(f"The provider answered {response.status} when asked for its batches.")
    return response.body
