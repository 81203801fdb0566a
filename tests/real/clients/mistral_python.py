"""Asks through the mistralai SDK for Python, blocking and asynchronous. It waits five seconds, unless it is told to."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from asking import FOUND, Ask, Told, main
from chatting import FUNCTION, as_told, conversation
from mistralai.client import Mistral


async def answer(ask: Ask) -> list[Told]:
    patience = {} if ask["timeout"] is None else {"timeout_ms": int(ask["timeout"] * 1000)}
    client = Mistral(api_key=ask["key"], server_url=ask["url"], **patience)
    return await conversation(client, ask, chat)


async def chat(client: Any, ask: Ask, said: list[Any]) -> Told:
    params: dict[str, Any] = {"model": ask["model"], "messages": said, "max_tokens": 400}
    params |= {"tools": [{"type": "function", "function": FUNCTION}]} if ask["tools"] else {}
    parts = await (streamed if ask["stream"] else whole)(client, ask, params)
    messages = [choice.delta if ask["stream"] else choice.message for part in parts for choice in part.choices]
    text = "".join(message.content for message in messages if isinstance(message.content, str))
    calls = [call for message in messages for call in message.tool_calls or ()]
    told = [{"id": call.id, "name": call.function.name, "arguments": arguments(call)} for call in calls]
    said.append(
        {"role": "assistant", "content": text, **({"tool_calls": [as_call(one) for one in told]} if told else {})}
    )
    said += [{"role": "tool", "tool_call_id": one["id"], "content": FOUND} for one in told]
    usage = next(part.usage for part in reversed(parts) if part.usage)
    return as_told(text, told, usage.prompt_tokens, usage.completion_tokens, None)


async def whole(client: Any, ask: Ask, params: dict[str, Any]) -> list[Any]:
    if ask["style"] == "blocking":
        return [await asyncio.to_thread(lambda: client.chat.complete(**params))]
    return [await client.chat.complete_async(**params)]


async def streamed(client: Any, ask: Ask, params: dict[str, Any]) -> list[Any]:
    if ask["style"] == "blocking":
        return await asyncio.to_thread(lambda: [event.data for event in client.chat.stream(**params)])
    return [event.data async for event in await client.chat.stream_async(**params)]


def arguments(call: Any) -> str:
    given = call.function.arguments
    return given if isinstance(given, str) else json.dumps(given)


def as_call(one: dict[str, Any]) -> dict[str, Any]:
    return {"id": one["id"], "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}


def failure(error: Exception) -> Told:
    said = getattr(error, "body", None)
    return {
        "status": getattr(error, "status_code", None),
        "kind": json.loads(said).get("type") if isinstance(said, str) and said.startswith("{") else None,
        "said": str(error)[:300],
    }


if __name__ == "__main__":
    main(answer, failure)
