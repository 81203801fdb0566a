"""Asks through the groq SDK for Python, blocking and asynchronous."""

from __future__ import annotations

from functools import partial
from typing import Any

import groq
from asking import Ask, Told, client_options, main
from chatting import chat, conversation, failure


async def answer(ask: Ask) -> list[Told]:
    client: Any = (groq.Groq if ask["style"] == "blocking" else groq.AsyncGroq)(**client_options(ask))
    return await conversation(client, ask, partial(chat, asks_usage=False))  # its streams tell it without being asked


if __name__ == "__main__":
    main(answer, failure)
