"""llmfleet as a contestant. Its dispatcher iterates over `results()` without awaiting it, so with the real SDK no
batched call is ever answered; `Results` stands in for that one method and lets it finish. All else is its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import job as bench
from anthropic import AsyncAnthropic
from llmfleet import FleetDispatcher, RoutingPolicy

LARGEST = 100_000  # the provider's own limit


class Results:
    """The batches of the SDK, with a `results` that can be iterated at once."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.create = batches.create
        self.retrieve = batches.retrieve

    async def results(self, batch_id: str) -> AsyncIterator[Any]:
        async for result in await self._batches.results(batch_id):
            yield result


class Messages:
    def __init__(self, messages: Any) -> None:
        self.create = messages.create
        self.batches = Results(messages.batches)


class Client:
    def __init__(self, client: AsyncAnthropic) -> None:
        self.messages = Messages(client.messages)


async def main(job: bench.Job) -> None:
    client = AsyncAnthropic(api_key="sk-bench", base_url=job.url, max_retries=0)
    window_ms = 600_000 if job.one_batch else int(job.linger_s * 1000)
    policy = RoutingPolicy(
        batch_window_ms=window_ms,
        batch_max_size=job.calls if job.one_batch else LARGEST,
        poll_interval_s=job.poll_s,
    )
    async with FleetDispatcher(Client(client), policy=policy) as fleet:
        asked = 0

        async def ask(params: dict[str, Any]) -> str:
            nonlocal asked
            asked += 1
            result = await fleet.submit(**params)
            return str(result.message.content[0].text)

        marks = bench.Marks(job.calls)
        watching = asyncio.create_task(marks.watch(lambda: asked))
        result = await bench.run(job.calls, ask, marks)
        watching.cancel()
        result["batches"] = fleet.stats.batches_submitted
    bench.tell(result)


if __name__ == "__main__":
    asyncio.run(main(bench.Job.read()))
