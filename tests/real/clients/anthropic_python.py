"""Asks through the anthropic SDK for Python, blocking and asynchronous, whole answers and streams."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
from asking import FOUND, LOOKUP, Ask, Told, client_options, main

TOOL = {"name": "lookup", "description": "Looks something up.", "input_schema": LOOKUP}


async def answer(ask: Ask) -> list[Told]:
    blocking = ask["style"] == "blocking"
    client: Any = (anthropic.Anthropic if blocking else anthropic.AsyncAnthropic)(**client_options(ask))
    messages: list[Any] = []
    told = []
    for turn in ask["turns"]:
        messages.append({"role": "user", "content": [*results(messages), {"type": "text", "text": turn}]})
        params = {"model": ask["model"], "max_tokens": 400, "messages": messages}
        params |= {"tools": [TOOL]} if ask["tools"] else {}
        said = await (asyncio.to_thread(block, client, ask, params) if blocking else wait(client, ask, params))
        messages.append({"role": "assistant", "content": said.content})
        told.append(as_told(said))
    return told


def results(messages: list[Any]) -> list[dict[str, Any]]:
    """The results of the tools that the last answer asked for."""
    asked = [block for block in messages[-1]["content"] if block.type == "tool_use"] if messages else []
    return [{"type": "tool_result", "tool_use_id": block.id, "content": FOUND} for block in asked]


def block(client: Any, ask: Ask, params: dict[str, Any]) -> Any:
    if not ask["stream"]:
        return client.messages.create(**params)
    with client.messages.stream(**params) as stream:
        return stream.get_final_message()


async def wait(client: Any, ask: Ask, params: dict[str, Any]) -> Any:
    if not ask["stream"]:
        return await client.messages.create(**params)
    async with client.messages.stream(**params) as stream:
        return await stream.get_final_message()


def as_told(message: Any) -> Told:
    content = message.content
    usage = message.usage
    cached = (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
    return {
        "text": "".join(block.text for block in content if block.type == "text"),
        "tools": [as_tool(block) for block in content if block.type == "tool_use"],
        "signatures": [block.signature for block in content if block.type == "thinking"],
        "usage": {"input": usage.input_tokens + cached, "output": usage.output_tokens},
    }


def as_tool(block: Any) -> dict[str, Any]:
    return {"id": block.id, "name": block.name, "input": block.input}


def failure(error: Exception) -> Told:
    body = getattr(error, "body", None)
    kind = body.get("error", {}).get("type") if isinstance(body, dict) else None
    return {"status": getattr(error, "status_code", None), "kind": kind}


if __name__ == "__main__":
    main(answer, failure)
