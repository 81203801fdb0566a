"""A workspace: the batches, caches and limits that its credentials share."""

import heapq
from collections.abc import Iterator

import msgspec

from carpool.mock.answers import usage_of
from carpool.mock.batch import Batch, Outcome
from carpool.mock.bill import Bill, Charge, Kind, Usage, price_nano
from carpool.mock.cache import PromptCache
from carpool.mock.config import MockConfig
from carpool.mock.digest import Digest, Failure
from carpool.mock.limits import TokenBucket


class Workspace:
    def __init__(self, id: str, config: MockConfig, bill: Bill, strangers_bill: Bill, now: float) -> None:  # noqa: A002
        self.id = id
        self.batch_bucket = TokenBucket(config.batch_rpm, now)
        self.sync_bucket = TokenBucket(config.sync_rpm, now, config.sync_burst)
        self.storm_until = 0.0  # everybody is refused so long
        self.batches: list[Batch] = []
        self._config = config
        self._bill = bill
        self._strangers_bill = strangers_bill
        self._position: dict[str, int] = {}
        self._open: list[Batch] = []
        # Synchronous and batch traffic do not see each other's entries.
        self._caches: dict[Kind, PromptCache] = {"sync": PromptCache(), "batch": PromptCache()}
        self._executing: list[tuple[float, int, Charge]] = []
        self._charged = 0
        self._until = now

    # -- batches

    def add(self, batch: Batch) -> None:
        self._position[batch.id] = len(self.batches)
        self.batches.append(batch)
        self._open.append(batch)

    def find(self, batch_id: str) -> Batch | None:
        position = self._position.get(batch_id)
        if position is None or self.batches[position].deleted:
            return None
        return self.batches[position]

    def older(self, than: str | None) -> Iterator[Batch]:
        """Newest first, from the one before `than`, or from the newest."""
        position = len(self.batches) if than is None else self._position.get(than, 0)
        return (self.batches[i] for i in range(position - 1, -1, -1) if not self.batches[i].deleted)

    def newer(self, than: str) -> Iterator[Batch]:
        """Oldest first, from the one after `than`."""
        position = self._position.get(than, len(self.batches))
        return (self.batches[i] for i in range(position + 1, len(self.batches)) if not self.batches[i].deleted)

    def waiting(self) -> int:
        """Requests of all batches that have not started."""
        return sum(batch.waiting for batch in self._open if not batch.stranger)

    # -- time

    def advance(self, now: float) -> None:
        """Carries out what is due by `now`.

        Requests of different batches run in the order of their starts, because an earlier one may write the cache
        entry that a later one reads.
        """
        self._until = now
        due = [(batch.next_start, order, batch) for order, batch in enumerate(self._open) if batch.next_start <= now]
        heapq.heapify(due)
        while due:
            _, order, batch = heapq.heappop(due)
            batch.run(min(now, due[0][0]) if due else now, self._execute)
            if batch.next_start <= now:
                heapq.heappush(due, (batch.next_start, order, batch))
        for batch in self._open:
            batch.close(now)
        self._open = [batch for batch in self._open if not batch.closed]
        while self._executing and self._executing[0][0] <= now:
            self._bill.add(heapq.heappop(self._executing)[2])

    def hurry(self, batch: Batch, now: float) -> None:
        """Ends a batch now, with the charges of what was still executing."""
        self.advance(now)
        batch.hurry(now)
        for position, (_, order, charge) in enumerate(self._executing):
            if charge.batch_id == batch.id:
                self._executing[position] = (now, order, msgspec.structs.replace(charge, at=now))
        heapq.heapify(self._executing)
        self.advance(now)

    def _execute(self, batch: Batch, index: int) -> Outcome:
        request = batch.requests[index]
        faults = batch.line_faults
        if isinstance(request, Failure) or any(index in faults[name] for name in ("line_api_error", "line_overloaded")):
            return Outcome.ERRORED
        if index in faults["line_expired"] or batch.ends[index] > batch.expires:
            return Outcome.EXPIRED
        start, end = batch.starts[index], batch.ends[index]
        usage = batch.usages[index] = self.use(request, "batch", start, end, index not in batch.unlucky)
        request_id = f"{batch.tag}{index:06x}"
        charge = self._charge(batch, batch.custom_ids[index], request_id, request, usage, end)
        if batch.stranger:
            self._strangers_bill.add(charge)
        elif end <= self._until:
            self._bill.add(charge)
        else:
            self._charged += 1
            heapq.heappush(self._executing, (end, self._charged, charge))
        return Outcome.SUCCEEDED

    # -- money

    def use(self, request: Digest, kind: Kind, start: float, end: float, may_hit: bool = True) -> Usage:
        """What a request that executes from `start` to `end` uses, after its traffic with the cache."""
        if request.plan is None:
            return usage_of(request)
        begins = start + self._config.first_token_share * (end - start)
        return usage_of(request, self._caches[kind].use(request.plan, start, begins, may_hit))

    def _charge(
        self, batch: Batch, custom_id: str, request_id: str, request: Digest, usage: Usage, at: float
    ) -> Charge:
        return Charge(
            workspace=self.id,
            credential=batch.credential,
            kind="batch",
            batch_id=batch.id,
            custom_id=custom_id,
            request_id=f"req_{request_id}",
            message_id=f"msg_{request_id}",
            model=request.model,
            usage=usage,
            nano_usd=price_nano(request.spec, usage, "batch"),
            at=at,
            fingerprint=request.fingerprint,
        )

    def charge_sync(
        self, credential: str, request_id: str, message_id: str, request: Digest, usage: Usage, at: float
    ) -> None:
        price = price_nano(request.spec, usage, "sync")
        self._bill.add(
            Charge(
                self.id,
                credential,
                "sync",
                None,
                None,
                request_id,
                message_id,
                request.model,
                usage,
                price,
                at,
                request.fingerprint,
            )
        )
