"""Does its tasks through instructor, which is for answers in the form of a model."""

from __future__ import annotations

from typing import Any

import instructor
from anthropic import AsyncAnthropic
from asking import Ask, Told, main
from openai import AsyncOpenAI
from tasks import Trip, failure, options, told


def client_of(ask: Ask) -> Any:
    if ask["endpoint"] == "messages":
        return instructor.from_anthropic(AsyncAnthropic(max_retries=0, **options(ask)))
    modes = {"chat": instructor.Mode.TOOLS, "schema": instructor.Mode.JSON_SCHEMA}
    mode = modes.get(ask["endpoint"], instructor.Mode.RESPONSES_TOOLS)
    return instructor.from_openai(AsyncOpenAI(max_retries=0, **options(ask)), mode=mode)


async def answer(ask: Ask) -> list[Told]:
    client = client_of(ask)
    said = [{"role": "user", "content": ask["prompt"]}]
    asked: dict[str, Any] = {"model": ask["model"], "messages": said, "response_model": Trip, "max_retries": 0}
    if ask["endpoint"] == "messages":
        asked["max_tokens"] = 400
    if ask["task"] == "object":
        return told(made=await client.chat.completions.create(**asked))
    if ask["endpoint"] == "chat":
        asked["stream_options"] = {"include_usage": True}
    parts = [part async for part in client.chat.completions.create_partial(**asked)]
    return told(made=Trip.model_validate(parts[-1].model_dump()))


if __name__ == "__main__":
    main(answer, failure)
