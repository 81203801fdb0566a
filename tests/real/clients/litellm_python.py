"""Does its tasks through LiteLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm
from asking import Ask, Told, main
from tasks import LOOKUP_SCHEMA, Tools, Trip, failure, told

FUNCTION = {"name": "lookup", "description": "Looks something up.", "parameters": LOOKUP_SCHEMA}


async def answer(ask: Ask) -> list[Told]:
    tools = Tools()
    said: list[Any] = [{"role": "user", "content": ask["prompt"]}]
    house = "anthropic" if ask["endpoint"] == "messages" else "openai"
    common = {"model": f"{house}/{ask['model']}", "api_base": ask["url"], "api_key": ask["key"], "max_retries": 0}

    async def ask_for(**more: Any) -> Any:
        return await litellm.acompletion(messages=said, **common, **more)

    match ask["task"]:
        case "text":
            return told((await ask_for()).choices[0].message.content)
        case "stream" | "parts":
            wanted = {"response_format": Trip} if ask["task"] == "parts" else {}
            text = await joined(await ask_for(stream=True, stream_options={"include_usage": True}, **wanted))
            return told(made=Trip.model_validate_json(text)) if wanted else told(text)
        case "object":
            made = (await ask_for(response_format=Trip)).choices[0].message.content
            return told(made=Trip.model_validate_json(made))
        case _:
            given = [{"type": "function", "function": FUNCTION}]
            message = (await ask_for(tools=given)).choices[0].message
            said.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                found = tools.lookup(**json.loads(call.function.arguments))
                said.append({"role": "tool", "tool_call_id": call.id, "content": found})
            return told((await ask_for(tools=given)).choices[0].message.content, called=tools.called)


async def joined(chunks: Any) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


if __name__ == "__main__":
    main(answer, failure)
