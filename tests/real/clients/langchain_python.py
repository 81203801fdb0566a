"""Does its tasks through langchain-anthropic and langchain-openai."""

from __future__ import annotations

from typing import Any

from asking import Ask, Told, main
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from tasks import Tools, Trip, failure, options, told


def chat_model(ask: Ask) -> Any:
    if ask["endpoint"] == "messages":
        return ChatAnthropic(model=ask["model"], max_retries=0, max_tokens=400, **options(ask))
    responses = ask["endpoint"] == "responses"
    # With a base URL it asks for no usage in streams, unless told to.
    return ChatOpenAI(model=ask["model"], max_retries=0, use_responses_api=responses, stream_usage=True, **options(ask))


async def answer(ask: Ask) -> list[Told]:
    model, prompt, tools = chat_model(ask), ask["prompt"], Tools()
    match ask["task"]:
        case "text":
            return told((await model.ainvoke(prompt)).text)
        case "stream":
            return told("".join([part.text async for part in model.astream(prompt)]))
        case "object":
            return told(made=await model.with_structured_output(Trip).ainvoke(prompt))
        case "parts":
            parts = [part async for part in model.with_structured_output(Trip).astream(prompt)]
            return told(made=parts[-1])
        case _:
            lookup = StructuredTool.from_function(tools.lookup)
            able, said = model.bind_tools([lookup]), [HumanMessage(prompt)]
            asked = await able.ainvoke(said)
            found = [await lookup.ainvoke(call) for call in asked.tool_calls]
            return told((await able.ainvoke([*said, asked, *found])).text, called=tools.called)


if __name__ == "__main__":
    main(answer, failure)
