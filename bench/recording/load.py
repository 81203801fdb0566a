"""A provider that answers every call alike, and clients that ask it as fast as they are answered; each a process."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "proxy"))

from bodies import HEADERS, PROSE, answers, compact, request, text

PATH = "/v1/messages"
CLIENTS = 32
_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length: "


class Framed(asyncio.Protocol):
    """Collects messages with a content length."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(_HEAD)) >= 0:
            head = bytes(self.buffer[:end]).lower()
            length = int(head.partition(_LENGTH)[2].partition(b"\r\n")[0] or 0)
            if len(self.buffer) < end + 4 + length:
                return
            del self.buffer[: end + 4 + length]
            self.message(head)

    def message(self, head: bytes) -> None:
        raise NotImplementedError


class Provider(Framed):
    ANSWER = answers()[PATH]

    def message(self, head: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(self.ANSWER)
        self.transport.write(head + self.ANSWER)


class Client(Framed):
    def __init__(self, sent: bytes) -> None:
        super().__init__()
        self.sent = sent
        self.answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.write(self.sent)

    def message(self, head: bytes) -> None:
        assert head.startswith(b"http/1.1 200"), head
        self.answered += 1
        self.transport.write(self.sent)


def agent() -> bytes:
    """A coding agent's call of about 100 KB: tools, a marked system prompt, 60 messages."""
    turns: list[dict[str, Any]] = []
    for number in range(59):
        block = {"type": "text", "text": text(1200) + str(number)}
        turns.append({"role": ("user", "assistant")[number % 2], "content": [block]})
    turns[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    tools = [{"name": f"tool_{number}", "description": PROSE * 5, "input_schema": {}} for number in range(20)]
    system = [{"type": "text", "text": text(15_000), "cache_control": {"type": "ephemeral"}}]
    body = {"model": "claude-haiku-4-5", "max_tokens": 256, "tools": tools, "system": system, "messages": turns}
    return compact(body)


async def provide() -> None:
    server = await asyncio.get_running_loop().create_server(Provider, "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def load(url: str, kind: str, seconds: float) -> None:
    body, address = request(PATH) if kind == "call" else agent(), urlsplit(url)
    lines = [f"POST {PATH} HTTP/1.1", f"host: {address.netloc}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items() if name != "authorization"]
    sent = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
    loop, begun = asyncio.get_running_loop(), time.perf_counter()
    clients = [
        await loop.create_connection(lambda: Client(sent), address.hostname, address.port) for _ in range(CLIENTS)
    ]
    await asyncio.sleep(seconds)
    count = sum(client.answered for _, client in clients)
    sys.stdout.write(json.dumps([count, time.perf_counter() - begun]) + "\n")


def last_line(text: str) -> tuple[float, float]:
    calls, seconds = json.loads(text.strip().splitlines()[-1])
    return calls, seconds


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    uvloop.run(provide() if what == "provider" else load(rest[0], rest[1], float(rest[2])))
