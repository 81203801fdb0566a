"""Asks through the openai SDK for Python, blocking and asynchronous: chat completions and responses, whole and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
from asking import FOUND, LOOKUP, Ask, Told, client_options, main

FUNCTION = {"name": "lookup", "description": "Looks something up.", "parameters": LOOKUP}


async def answer(ask: Ask) -> list[Told]:
    client: Any = (openai.OpenAI if ask["style"] == "blocking" else openai.AsyncOpenAI)(**client_options(ask))
    converse = chat if ask["endpoint"] == "chat" else respond
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


# ---------------------------------------------------------------- chat completions


async def chat(client: Any, ask: Ask, said: list[Any]) -> Told:
    params = {"model": ask["model"], "messages": said, "max_completion_tokens": 400}
    params |= {"tools": [{"type": "function", "function": FUNCTION}]} if ask["tools"] else {}
    params |= {"stream_options": {"include_usage": True}} if ask["stream"] else {}
    parts = [part async for part in sent(client.chat.completions.create, ask, params)]
    text, calls = joined(parts) if ask["stream"] else whole(parts[0])
    said.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
    said += [{"role": "tool", "tool_call_id": call["id"], "content": FOUND} for call in calls]
    usage = parts[-1].usage
    functions = [{"id": call["id"], **call["function"]} for call in calls]
    return as_told(text, functions, usage.prompt_tokens, usage.completion_tokens)


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


# ---------------------------------------------------------------- responses


async def respond(client: Any, ask: Ask, said: list[Any]) -> Told:
    params = {"model": ask["model"], "input": said, "max_output_tokens": 400, "store": False}
    params |= {"tools": [{"type": "function", "strict": False, **FUNCTION}]} if ask["tools"] else {}
    parts = [part async for part in sent(client.responses.create, ask, params)]
    final = parts[-1].response if ask["stream"] else parts[0]
    streamed = (
        "".join(part.delta for part in parts if part.type == "response.output_text.delta") if ask["stream"] else None
    )
    if streamed not in (None, final.output_text):
        raise ValueError(f"The events said {streamed!r}, and the response {final.output_text!r}.")
    calls = [item for item in final.output if item.type == "function_call"]
    said += [{"role": "assistant", "content": final.output_text}] if final.output_text else []
    for call in calls:
        asked = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        said.append({"type": "function_call", **asked})
        said.append({"type": "function_call_output", "call_id": call.call_id, "output": FOUND})
    functions = [{"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in calls]
    return as_told(final.output_text, functions, final.usage.input_tokens, final.usage.output_tokens)


def as_told(text: str, functions: list[dict[str, Any]], read: int, written: int) -> Told:
    tools = [{"id": one["id"], "name": one["name"], "input": json.loads(one["arguments"])} for one in functions]
    return {"text": text, "tools": tools, "signatures": [], "usage": {"input": read, "output": written}}


def failure(error: Exception) -> Told:
    return {
        "status": getattr(error, "status_code", None),
        "kind": getattr(error, "type", None),
        "said": str(error)[:300],
    }


if __name__ == "__main__":
    main(answer, failure)
