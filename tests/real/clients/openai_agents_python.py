"""Does its tasks through openai-agents."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asking import Ask, Told, main
from openai import AsyncOpenAI
from tasks import Tools, Trip, failure, options, told


async def answer(ask: Ask) -> list[Told]:
    client, prompt, tools = AsyncOpenAI(max_retries=0, **options(ask)), ask["prompt"], Tools()
    kind = OpenAIResponsesModel if ask["endpoint"] == "responses" else OpenAIChatCompletionsModel
    shape: dict[str, Any] = {"name": "real", "model": kind(ask["model"], client)}
    shape["model_settings"] = ModelSettings(include_usage=True)  # in streams of chat completions
    match ask["task"]:
        case "text":
            return told((await Runner.run(Agent(**shape), prompt)).final_output)
        case "stream":
            run = Runner.run_streamed(Agent(**shape), prompt)
            events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
            return told("".join(one.delta for one in events if one.type == "response.output_text.delta"))
        case "object":
            return told(made=(await Runner.run(Agent(**shape, output_type=Trip), prompt)).final_output)
        case "parts":
            run = Runner.run_streamed(Agent(**shape, output_type=Trip), prompt)
            async for _ in run.stream_events():
                pass
            return told(made=run.final_output)
        case _:
            agent = Agent(**shape, tools=[function_tool(tools.lookup)])
            return told((await Runner.run(agent, prompt)).final_output, called=tools.called)


if __name__ == "__main__":
    set_tracing_disabled(True)
    main(answer, failure)
