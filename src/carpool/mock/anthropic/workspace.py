"""A workspace: the batches, caches and limits that its credentials share."""

from carpool.mock.anthropic.answers import usage_of
from carpool.mock.anthropic.cache import PromptCache
from carpool.mock.anthropic.digest import Digest
from carpool.mock.anthropic.message_batch import MessageBatch
from carpool.mock.core.bill import Bill, Charge, Kind, Usage, price_nano
from carpool.mock.core.config import MockConfig
from carpool.mock.core.limits import TokenBucket
from carpool.mock.core.shelf import Shelf


class Workspace(Shelf[MessageBatch]):
    def __init__(self, id: str, config: MockConfig, bill: Bill, strangers_bill: Bill, now: float) -> None:  # noqa: A002
        super().__init__(id, bill, strangers_bill, now)
        self.batch_bucket = TokenBucket(config.batch_rpm, now)
        self.sync_bucket = TokenBucket(config.sync_rpm, now, config.sync_burst)
        self.storm_until = 0.0  # until then all requests are refused
        self._config = config
        # Synchronous and batch traffic do not see each other's entries.
        self._caches: dict[Kind, PromptCache] = {"sync": PromptCache(), "batch": PromptCache()}

    # -- billing

    def use(self, request: Digest, kind: Kind, start: float, end: float, may_hit: bool = True) -> Usage:
        """What a request that executes from `start` to `end` uses, after its traffic with the cache."""
        if request.plan is None:
            return usage_of(request)
        begins = start + self._config.first_token_share * (end - start)
        return usage_of(request, self._caches[kind].use(request.plan, start, begins, may_hit))

    def _use(self, batch: MessageBatch, index: int) -> Usage:
        start, end = batch.starts[index], batch.ends[index]
        return self.use(_digest(batch, index), "batch", start, end, index not in batch.unlucky)

    def _charge(self, batch: MessageBatch, index: int, usage: Usage) -> Charge:
        request, request_id = _digest(batch, index), f"{batch.tag}{index:06x}"
        return Charge(
            workspace=self.id,
            credential=batch.credential,
            kind="batch",
            batch_id=batch.id,
            custom_id=batch.custom_ids[index],
            request_id=f"req_{request_id}",
            message_id=f"msg_{request_id}",
            model=request.model,
            usage=usage,
            nano_usd=price_nano(request.spec, usage, "batch"),
            at=batch.ends[index],
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


def _digest(batch: MessageBatch, index: int) -> Digest:
    request = batch.requests[index]
    assert isinstance(request, Digest)  # a Failure never executes
    return request
