"""Asks through the openai SDK for Python, blocking and asynchronous: chat completions and responses, whole and not."""

from __future__ import annotations

from typing import Any

import openai
from asking import FOUND, Ask, Told, client_options, main
from chatting import FUNCTION, as_told, chat, conversation, failure, sent


async def answer(ask: Ask) -> list[Told]:
    client: Any = (openai.OpenAI if ask["style"] == "blocking" else openai.AsyncOpenAI)(**client_options(ask))
    return await conversation(client, ask, chat if ask["endpoint"] == "chat" else respond)


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
    return as_told(
        final.output_text, functions, final.usage.input_tokens, final.usage.output_tokens, final.service_tier
    )


if __name__ == "__main__":
    main(answer, failure)
