"""The batcher of inspect_ai as a contestant: `generate_for_request`, as its Anthropic provider calls it."""

from __future__ import annotations

import asyncio
from typing import Any

import job as bench
from anthropic import AsyncAnthropic
from inspect_ai._util.background import set_background_task_group
from inspect_ai.model import BatchConfig
from inspect_ai.model._providers._anthropic_batch import AnthropicBatcher
from inspect_ai.model._retry import model_retry_config

LARGEST = 100_000  # the provider's own limit


def batcher(job: bench.Job) -> AnthropicBatcher:
    client = AsyncAnthropic(api_key="sk-bench", base_url=job.url, max_retries=0)
    config = BatchConfig(
        size=job.calls if job.one_batch else LARGEST,
        max_size=LARGEST,
        send_delay=600.0 if job.one_batch else job.linger_s,
        tick=job.poll_s,
    )
    retry = model_retry_config("bench", 1, None, lambda _: False, lambda _: None, lambda _, __: None)
    return AnthropicBatcher(client, config, retry)


async def main(job: bench.Job) -> None:
    import anyio

    made, created = batcher(job), 0
    inner = made._create_batch

    async def counted(batch: list[Any]) -> str:
        nonlocal created
        created += 1
        return await inner(batch)

    made._create_batch = counted  # type: ignore[method-assign]
    asked = 0

    async def ask(params: dict[str, Any]) -> str:
        nonlocal asked
        asked += 1
        message = await made.generate_for_request(params)
        return str(message.content[0].text)

    async with anyio.create_task_group() as group:
        set_background_task_group(group)
        marks = bench.Marks(job.calls)
        watching = asyncio.create_task(marks.watch(lambda: asked))
        result = await bench.run(job.calls, ask, marks)
        watching.cancel()
        group.cancel_scope.cancel()
    result["batches"] = created
    bench.tell(result)


if __name__ == "__main__":
    asyncio.run(main(bench.Job.read()))
