"""Clients that break their connection whenever they like, and answers that are long enough to be broken."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from carpool.mock import expected_text
from carpool.mock.anthropic import answers
from tests.support.sockets import Message, read_message, request

BUDGET = "X-Carpool-Budget: 30m"
HEADERS = ("X-Api-Key: k", "Anthropic-Version: 2023-06-01", "Content-Type: application/json")
LARGE = 5_000_000  # more than both kernels hold
MIDDLING = 200_000  # both kernels together take all of it
SMALL = 20_000  # the client's takes all of it


class Caller:
    """A client on a connection of its own, which it can break in whichever way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def close(self) -> None:
        self.writer.transport.abort()  # what lies unread makes a reset of it

    def reset(self) -> None:
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def calling(url: str, asked: Any, *headers: str) -> AsyncIterator[Caller]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=2**16)
    body = json.dumps(asked).encode()
    writer.write(request("POST /v1/messages", *HEADERS, BUDGET, *headers, body=body))
    try:
        yield Caller(reader, writer)
    finally:
        writer.close()


async def answered(url: str, asked: Any, *headers: str) -> Message:
    """Who stays until it has its answer."""
    async with calling(url, asked, *headers) as caller:
        answer = await read_message(caller.reader)
    assert answer.status == 200
    assert json.loads(answer.body)["content"][0]["text"] == expected_text(asked)
    return answer


def lengthen(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Lets the mock answer at length."""
    content: Callable[[Any], list[Any]] = answers._content
    more = {"type": "text", "text": "x" * size, "citations": None}
    monkeypatch.setattr(answers, "_content", lambda digest: [*content(digest), more])
