"""Does its tasks through pydantic-ai."""

from __future__ import annotations

from typing import Any

from asking import Ask, Told, main
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import Tools, Trip, failure, options, told

MODELS: dict[str, tuple[Any, Any]] = {
    "messages": (AnthropicModel, AnthropicProvider),
    "chat": (OpenAIChatModel, OpenAIProvider),
    "responses": (OpenAIResponsesModel, OpenAIProvider),
}


async def answer(ask: Ask) -> list[Told]:
    kind, provider = MODELS[ask["endpoint"]]
    model, prompt, tools = kind(ask["model"], provider=provider(**options(ask))), ask["prompt"], Tools()
    match ask["task"]:
        case "text":
            return told((await Agent(model).run(prompt)).output)
        case "stream":
            async with Agent(model).run_stream(prompt) as run:
                return told("".join([part async for part in run.stream_text(delta=True)]))
        case "object":
            return told(made=(await Agent(model, output_type=Trip).run(prompt)).output)
        case "parts":
            async with Agent(model, output_type=Trip).run_stream(prompt) as run:
                return told(made=[part async for part in run.stream_output()][-1])
        case _:
            run = await Agent(model, tools=[tools.lookup]).run(prompt)
            return told(run.output, called=tools.called)


if __name__ == "__main__":
    main(answer, failure)
