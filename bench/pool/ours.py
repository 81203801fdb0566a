"""carpool as a contestant, at two doors, always with a store in a file.

`carpool-sdk`: `FleetDispatcher.submit` with the real AsyncAnthropic; the answer is the SDK's own `Message`.
`carpool`: `Exchange.handle`, the door that every transport shares, with the bytes of the request as the SDK would
write them; the answer is the bytes of the message. What the SDK itself costs is the difference.
"""

from __future__ import annotations

import asyncio
import cProfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import job as bench
import msgspec

from carpool import FleetDispatcher, RoutingPolicy
from carpool.core.clock import SystemClock
from carpool.core.ports import RawRequest
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Keyring, Upstream
from carpool.frontends.library.exchange import InProcessExchange, Whole
from carpool.http import Http1Client
from carpool.planners.access.options import Options
from carpool.stores import open_store

encode = msgspec.json.encode  # the same bytes as the SDK writes
LARGEST = 100_000  # the provider's own limit
HEADERS = (
    ("accept", "application/json"),
    ("content-type", "application/json"),
    ("user-agent", "AsyncAnthropic/Python"),
    ("x-api-key", "sk-bench"),
    ("anthropic-version", "2023-06-01"),
)


def policy(job: bench.Job) -> RoutingPolicy:
    # One batch: nothing goes before the pool is full. At 100,000 it is the provider's own limit that fills it.
    size = None if job.calls >= LARGEST else job.calls
    alone = {"batch_max_size": size, "batch_window_ms": 600_000} if job.one_batch else {}
    return RoutingPolicy(linger_ms=job.linger_s * 1000, poll_interval_s=job.poll_s, batch_rpm=60_000, **alone)


@asynccontextmanager
async def through_the_sdk(job: bench.Job, store: str) -> AsyncIterator[tuple[bench.Ask, Any]]:
    from anthropic import AsyncAnthropic

    client = AsyncAnthropic(api_key="sk-bench", base_url=job.url, max_retries=0)
    async with FleetDispatcher(client, policy=policy(job), store=store) as fleet:

        async def ask(params: dict[str, Any]) -> str:
            message = await fleet.submit(**params)
            return str(message.content[0].text)

        yield ask, fleet._engine


@asynccontextmanager
async def through_the_exchange(job: bench.Job, path: str) -> AsyncIterator[tuple[bench.Ask, Any]]:
    clock, store = SystemClock(), await open_store(path)
    upstream = Upstream("anthropic", job.url, get_dialect("anthropic"), Http1Client())
    engine = Engine(
        store=store,
        clock=clock,
        upstreams={"anthropic": upstream},
        keyring=Keyring(store.pepper),
        policy=policy(job),
    )
    await engine.start()
    exchange, options = InProcessExchange(engine, upstream, clock), Options()

    async def ask(params: dict[str, Any]) -> str:
        body = encode(params)
        answer = await exchange.handle(RawRequest("POST", "/v1/messages", "", HEADERS, body), options)
        if not isinstance(answer, Whole) or answer.status != 200:
            raise SystemExit("a call was not answered by its batch")
        return answer.body.decode()

    try:
        yield ask, engine
    finally:
        await engine.close()


DOORS = {"carpool": through_the_exchange, "carpool-sdk": through_the_sdk}


def size_of(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).iterdir())


async def main(job: bench.Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with DOORS[job.contestant](job, f"{folder}/fleet.db") as (ask, engine):
            marks = bench.Marks(job.calls)
            profile = cProfile.Profile()
            if job.profile:
                profile.enable()
            watching = asyncio.create_task(marks.watch(lambda: engine.stats.batched_calls))
            result = await bench.run(job.calls, ask, marks)
            profile.disable()
            watching.cancel()
            if job.profile:
                profile.dump_stats(job.profile)
            result["batches"] = engine.stats.batches_submitted
            result["store_bytes"] = size_of(folder)
    bench.tell(result)


def loop_factory(name: str) -> Any:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop
    return None


if __name__ == "__main__":
    order = bench.Job.read()
    with asyncio.Runner(loop_factory=loop_factory(order.loop)) as runner:
        runner.run(main(order))
