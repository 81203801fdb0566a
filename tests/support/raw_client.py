"""A client that is nothing but a socket: it sees every head that comes before the answer, and how the answer ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 20


@dataclass
class Head:
    status: int
    fields: dict[str, str]


@dataclass
class Said:
    """All heads in their order, 1xx among them, and the body of the last."""

    heads: list[Head] = field(default_factory=list)
    body: bytes = b""


async def exchange(
    url: str, body: Any, headers: dict[str, str], *, path: str = "/v1/messages", version: str = "1.1"
) -> Said:
    """Posts a call and reads the whole answer. One that breaks off raises, as a reset or an `IncompleteReadError`."""
    parts, content = urlsplit(url), json.dumps(body).encode()
    sent = {
        "host": parts.netloc,
        "x-api-key": "k",
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
        "content-length": str(len(content)),
        **headers,
    }
    lines = [f"POST {path} HTTP/{version}", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write("\r\n".join(lines).encode("latin-1") + content)
        async with asyncio.timeout(PATIENCE):
            return await _read(reader)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> Said:
    said = Said()
    while not said.heads or said.heads[-1].status < 200:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        pairs = (line.split(":", 1) for line in lines)
        said.heads.append(Head(int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}))
    fields = said.heads[-1].fields
    if fields.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            said.body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    elif "content-length" in fields:
        said.body = await reader.readexactly(int(fields["content-length"]))
    else:
        said.body = await reader.read()
    return said
