"""Watching bought batches: one LIST per account tells of all of them, at a pace that fits their age."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from carpool.engine.collecting import Collector
from carpool.engine.desk import Desk
from carpool.engine.events import BatchEnded, RetentionNear
from carpool.engine.reconciling import Reconciler
from carpool.engine.refusing import refuse
from carpool.engine.sweeping import sweep
from carpool.engine.upstream import Answer, Upstream, whole
from carpool.errors import CarpoolError, Garbled
from carpool.lifecycle import BatchState
from carpool.model import Batch
from carpool.ports import Ask, BatchReport
from carpool.tracking import next_poll

ASK_SILENCE_S = 60.0
MAX_PAGES = 20
FAILED_POLL_S = 5.0
FAILED_POLL_MAX_S = 60.0
GONE_S = 600.0  # a batch that answers 404 for so long is gone
ALERT_BEFORE_S = 2 * 86_400.0


class Follower:
    def __init__(self, desk: Desk, collector: Collector, reconciler: Reconciler) -> None:
        self._desk = desk
        self._collector = collector
        self._reconciler = reconciler
        self._polling: set[str] = set()
        self._looked: dict[str, float] = {}  # account → last finished look
        self._not_before: dict[str, float] = {}  # account → when a look that failed may be tried again
        self._failures: Counter[str] = Counter()  # account → looks that failed since the last whole one
        self._missing: dict[int, float] = {}  # batch → since when the provider denies it
        self._alerted: set[int] = set()
        self._news: set[int] = set()  # batches, anybody's, that are said to have ended since the last step
        self._end: Callable[[], None] | None = None
        self._ended_perhaps: set[str] = set()  # accounts one of whose batches is said to have ended

    async def step(self, now: float) -> float | None:
        """Starts the polls that are due and the collection of what has ended. Says when to look again."""
        if self._news:
            self._match()
        by_account: dict[str, list[Batch]] = defaultdict(list)
        for batch in self._desk.batches:
            if batch.state is BatchState.ENDED:
                self._collector.start(batch)
            elif batch.state is not BatchState.SUBMITTING:
                by_account[self._desk.keyring.account(batch.key.credential)].append(batch)
            self._alert(batch, now)
        wakes = [self._poll_if_due(account, batches, now) for account, batches in by_account.items()]
        wakes.append(self._collector.wake(now))
        return min((wake for wake in wakes if wake is not None), default=None)

    def start(self) -> None:
        """Hears of webhooks that reach other doors."""
        self._end = self._desk.store.heed(self._told)

    def stop(self) -> None:
        if self._end is not None:
            self._end()

    def look_soon(self, provider: str, provider_id: str) -> None:
        """Somebody says that a batch has ended, or needs its answers. It is looked up at once by whoever follows it,
        which may be another engine: the store finds it."""
        mine = [one.id for one in self._desk.batches if (one.key.provider, one.provider_id) == (provider, provider_id)]
        if mine:
            self._told(mine)
        else:
            self._desk.crew.spawn(self._pass_on(provider, provider_id), "nudge")

    async def _pass_on(self, provider: str, provider_id: str) -> None:
        try:
            await self._desk.store.nudge(provider, provider_id)
        except CarpoolError as error:  # a hint only: its next look will find it
            self._desk.trouble("passing on a webhook", error)

    def _told(self, numbers: Sequence[int]) -> None:
        if self._desk.led or self._desk.batches:  # whoever leads nothing has nothing to look at
            self._news.update(numbers)
            self._desk.wake_now()

    def _match(self) -> None:
        """Finds the accounts of batches that are said to have ended, now that all of ours are known; the others are
        somebody else's."""
        news, self._news = self._news, set()
        for batch in self._desk.batches:
            if batch.id in news and batch.state is BatchState.ENDED:
                self._collector.hurry(batch)
            elif batch.id in news:
                self._ended_perhaps.add(self._desk.keyring.account(batch.key.credential))

    def _poll_if_due(self, account: str, batches: list[Batch], now: float) -> float | None:
        batches = [batch for batch in batches if batch.key.credential in self._desk.keyring]
        if account in self._polling or not batches:
            return None
        due = self._due(account, batches, now)
        if due > now and account not in self._ended_perhaps:
            return due
        road = self._desk.road(batches[0].key.credential)
        if not road.can_ask(now):
            return road.ask_ready_at(now)
        self._polling.add(account)
        self._ended_perhaps.discard(account)
        self._desk.crew.spawn(self._poll(account, batches), f"poll {account[:8]}")
        return None

    def _due(self, account: str, batches: Sequence[Batch], now: float) -> float:
        last = self._looked.get(account)
        looks = [self._look(batch, last) for batch in batches if _ours(batch)]
        times = [next_poll(looks, self._pace(batches[0]), now)] if looks else []
        times += [self._reconciler.due(batch, last) for batch in batches if not _ours(batch)]
        return max(self._not_before.get(account, 0.0), min(times))

    def _pace(self, batch: Batch) -> float | None:
        """What is set, else what the provider asks for."""
        chosen = self._desk.policy.poll_interval_s
        return self._desk.upstreams[batch.key.provider].dialect.limits.pace if chosen is None else chosen

    def _look(self, batch: Batch, last: float | None) -> tuple[float, float, float]:
        bought_at = batch.resolved_at or batch.intended_at
        expected = self._desk.forecast.expected_end(bought_at, batch.key.model, batch.key.size_class)
        return bought_at, bought_at if last is None else last, expected

    async def _poll(self, account: str, batches: list[Batch]) -> None:
        desk = self._desk
        upstream = desk.upstreams[batches[0].key.provider]
        self._not_before[account] = desk.now() + self._backoff(account)  # whatever goes wrong, not at once again
        try:
            asked = desk.now()
            reports = await self._list(batches[0].key.credential, upstream, batches)
            await desk.reached("polled")
            seen = [await self._look_at(batch, upstream, reports) for batch in batches if _ours(batch)]
            unresolved = [batch for batch in batches if not _ours(batch)]
            await self._reconciler.apply(upstream, unresolved, list(reports.values()), asked)
        except CarpoolError as error:  # any number of failed looks is survived
            desk.trouble("polling", error)
        else:
            if all(seen):
                self._looked[account] = desk.now()
                del self._not_before[account]
                del self._failures[account]
        finally:
            self._polling.discard(account)
            desk.wake_now()

    def _backoff(self, account: str) -> float:
        """Longer after every failure, and never twice the same: two keys of one workspace may take each other's turn,
        and a look that needs several requests would never get them all."""
        delay = min(FAILED_POLL_S * 2.0 ** min(self._failures[account], 10), FAILED_POLL_MAX_S)
        self._failures[account] += 1
        return float(delay * (0.75 + self._desk.rng.random() / 2))

    async def _list(self, credential: str, upstream: Upstream, batches: Sequence[Batch]) -> dict[str, BatchReport]:
        """The provider's batches, newest first, as far back as any of ours can be."""
        wanted = {batch.provider_id for batch in batches if _ours(batch)}
        if len(batches) == 1 and wanted:
            return {}  # a single batch is asked for by its id
        oldest = min(batch.intended_at for batch in batches) + self._desk.offsets.get(upstream.provider, 0.0) - 120
        unresolved = any(not _ours(batch) for batch in batches)
        reports: dict[str, BatchReport] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            limit = min(1000, 2 * len(batches) + 20)
            answer = await self._ask(
                credential, upstream, upstream.dialect.listing(batches[0].key.headers, cursor, limit)
            )
            page, cursor = upstream.dialect.page(_body(answer), cursor)
            reports.update((report.provider_id, report) for report in page)
            if cursor is None or (wanted <= reports.keys() and not unresolved) or page[-1].created_at < oldest:
                break
        return await self._named(credential, upstream, batches[0], reports) if unresolved else reports

    async def _named(
        self, credential: str, upstream: Upstream, batch: Batch, reports: dict[str, BatchReport]
    ) -> dict[str, BatchReport]:
        """The same with their nonces, where only the names of uploads tell them."""
        ask = upstream.dialect.naming(batch.key.headers)
        if ask is None or not reports:
            return reports
        nonces = upstream.dialect.nonces(_body(await self._ask(credential, upstream, ask)))
        return {name: replace(one, nonce=nonces.get(one.source or "", "")) for name, one in reports.items()}

    async def _look_at(self, batch: Batch, upstream: Upstream, reports: Mapping[str, BatchReport]) -> bool:
        """Whether it could be looked at. One batch that can't must not hide the others."""
        try:
            await self._apply(batch.id, await self._report(batch, upstream, reports))
        except CarpoolError as error:
            self._desk.trouble(f"looking at batch {batch.id}", error)
            return False
        return True

    async def _report(self, batch: Batch, upstream: Upstream, reports: Mapping[str, BatchReport]) -> BatchReport | None:
        """What LIST said of a batch; asked for by id where LIST lags. None while the provider denies it."""
        assert batch.provider_id is not None
        if batch.provider_id in reports:
            return reports[batch.provider_id]
        ask = upstream.dialect.retrieve(batch.key.headers, batch.provider_id)
        answer = await self._ask(batch.key.credential, upstream, ask)
        return None if answer.status == 404 else upstream.dialect.report(_body(answer))

    async def _ask(self, credential: str, upstream: Upstream, ask: Ask) -> Answer:
        desk = self._desk
        await desk.turn(credential)
        answer = await whole(await upstream.ask(ask, desk.keyring.secret(credential), timeout=ASK_SILENCE_S))
        desk.heard(upstream, credential, answer)
        if answer.status == 429:
            refusal = upstream.dialect.refusal(answer.status, answer.headers, answer.body)
            desk.pause(credential, FAILED_POLL_S if refusal.retry_after is None else refusal.retry_after)
        return answer

    async def _apply(self, number: int, report: BatchReport | None) -> None:
        desk = self._desk
        batch = await desk.store.batch(number)
        if batch is None or not _ours(batch):
            return  # it moved on while the provider was asked
        if report is None:
            await self._denied(batch)
            return
        self._missing.pop(batch.id, None)
        if report.failure is not None:
            await refuse(desk, batch, report.failure)
            await sweep(desk, batch, desk.upstreams[batch.key.provider], report.files)
        elif report.ended and report.results is None:
            await self._collector.lose(batch, "the provider no longer has its results")
        elif report.ended:
            await self._ended(batch, report)
        elif self._withheld(batch, report):
            await self._ended(batch, replace(report, ended=True, results=()))
        elif report.cancelling and batch.state is BatchState.OPEN:
            await desk.stopping(batch, "cancelled by somebody at the provider")

    def _withheld(self, batch: Batch, report: BatchReport) -> bool:
        """It is over, speaks of results, and has not named them for so long that it never will."""
        there = self._desk.now() + self._desk.offsets.get(batch.key.provider, batch.clock_offset)
        return report.ended_at is not None and there - report.ended_at >= GONE_S

    async def _ended(self, batch: Batch, report: BatchReport) -> None:
        desk, whose = self._desk, batch.key.credential
        took = desk.now() - (batch.resolved_at or batch.intended_at)
        ended = await desk.moved(batch, BatchState.ENDED, ended_at=desk.now())
        if ended is None:
            return
        desk.queues.freed(desk.keyring.account(whose), batch.key.model)
        desk.bulletin.tell(BatchEnded(desk.now(), batch.id, report.provider_id, took, credential=whose))
        await desk.reached("ended")
        self._collector.start(ended, report)

    async def _denied(self, batch: Batch) -> None:
        since = self._missing.setdefault(batch.id, self._desk.now())
        if self._desk.now() - since >= GONE_S:
            await self._collector.lose(batch, "the provider does not know it any more")

    def _alert(self, batch: Batch, now: float) -> None:
        """Before the provider drops what nobody collected, somebody should hear of it."""
        if batch.provider_id is None or batch.id in self._alerted:
            return
        retention = self._desk.upstreams[batch.key.provider].dialect.limits.retention
        drops_at = batch.intended_at + retention
        if now >= drops_at - min(ALERT_BEFORE_S, retention / 4):
            self._alerted.add(batch.id)
            whose = batch.key.credential
            self._desk.bulletin.tell(RetentionNear(now, batch.id, batch.provider_id, drops_at, credential=whose))


def _ours(batch: Batch) -> bool:
    return batch.state in (BatchState.OPEN, BatchState.CANCELLING)


def _body(answer: Answer) -> bytes:
    if not answer.ok:
        raise Garbled(f"The provider answered {answer.status} to a look at its batches.")
    return answer.body
