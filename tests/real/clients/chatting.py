"""Chat completions as the SDKs for OpenAI's wire are asked for them, blocking and asynchronous, whole and in parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from asking import FOUND, LOOKUP, Ask, Told

FUNCTION = {"name": "lookup", "description": "Looks something up.", "parameters": LOOKUP}

Converse = Callable[[Any, Ask, list[Any]], Awaitable[Told]]


async def conversation(client: Any, ask: Ask, converse: Converse) -> list[Told]:
    told: list[Told] = []
    said: list[Any] = []
    for turn in ask["turns"]:
        said.append({"role": "user", "content": turn})
        told.append(await converse(client, ask, said))
    return told


async def sent(create: Any, ask: Ask, params: dict[str, Any]) -> AsyncIterator[Any]:
    """The whole answer, or its parts."""
    params = {**params, "stream": True} if ask["stream"] else params
    if ask["style"] != "blocking":
        got = await create(**params)
        if ask["stream"]:
            async for part in got:
                yield part
            return
    else:
        got = await asyncio.to_thread(lambda: list(create(**params)) if ask["stream"] else create(**params))
    for part in got if ask["stream"] else [got]:
        yield part


async def chat(client: Any, ask: Ask, said: list[Any], asks_usage: bool = True) -> Told:
    params = {"model": ask["model"], "messages": said, "max_completion_tokens": 400}
    params |= {"tools": [{"type": "function", "function": FUNCTION}]} if ask["tools"] else {}
    params |= {"stream_options": {"include_usage": True}} if ask["stream"] and asks_usage else {}
    parts = [part async for part in sent(client.chat.completions.create, ask, params)]
    text, calls = joined(parts) if ask["stream"] else whole(parts[0])
    said.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
    said += [{"role": "tool", "tool_call_id": call["id"], "content": FOUND} for call in calls]
    usage = parts[-1].usage or parts[-1].x_groq.usage
    functions = [{"id": call["id"], **call["function"]} for call in calls]
    return as_told(text, functions, usage.prompt_tokens, usage.completion_tokens, tier_of(parts))


def tier_of(parts: list[Any]) -> str | None:
    """The service tier, as far as the SDK knows of one."""
    return next((tier for part in parts if (tier := getattr(part, "service_tier", None))), None)


def whole(answer: Any) -> tuple[str, list[dict[str, Any]]]:
    message = answer.choices[0].message
    return message.content or "", [as_call(call.id, call.function) for call in message.tool_calls or ()]


def as_call(name: str, function: Any) -> dict[str, Any]:
    return {
        "id": name,
        "type": "function",
        "function": {"name": function.name, "arguments": function.arguments or ""},
    }


def joined(chunks: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """The chunks of a stream, put together as a client that shows them would."""
    text, calls = "", {}
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        text += delta.content or ""
        for part in delta.tool_calls or ():
            if part.index not in calls:
                calls[part.index] = as_call(part.id, part.function)
            else:
                calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return text, list(calls.values())


def as_told(text: str, functions: list[dict[str, Any]], read: int, written: int, tier: str | None) -> Told:
    tools = [{"id": one["id"], "name": one["name"], "input": json.loads(one["arguments"])} for one in functions]
    usage = {"input": read, "output": written}
    return {"text": text, "tools": tools, "signatures": [], "usage": usage, "tier": tier}


def kind_in(body: Any) -> str | None:
    """As the provider said it: not every SDK shows it."""
    told = body.get("error", body) if isinstance(body, dict) else {}
    return told.get("type") if isinstance(told, dict) else None


def failure(error: Exception) -> Told:
    return {
        "status": getattr(error, "status_code", None),
        "kind": getattr(error, "type", None) or kind_in(getattr(error, "body", None)),
        "said": str(error)[:300],
    }
