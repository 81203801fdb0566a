"""A provider that streams: the first event at once, the others every 10 ms. What is not asked as a stream is answered
as a whole when such a stream would end. `python stream.py PORT`"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import uvloop
from bodies import answers, events

PACE_S = 0.01
# The last header asks nginx to hand on every event at once; the others hand it through or drop it.
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\nx-accel-buffering: no\r\n\r\n"
)
ANSWERS = answers()
STREAMS = {path: events(path) for path in ANSWERS}


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            path, body = await read(reader)
            await (stream if asks_for_stream(body) else whole)(path, writer)
    writer.close()


def asks_for_stream(body: bytes) -> bool:
    return b'"stream":true' in body or b'"stream": true' in body


async def read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    path = lines[0].split()[1].partition("?")[0]
    if fields.get("transfer-encoding") == "chunked":
        return path, await reader.readuntil(b"\r\n0\r\n\r\n")
    return path, await reader.readexactly(int(fields.get("content-length", "0")))


async def stream(path: str, writer: asyncio.StreamWriter) -> None:
    first, *others = STREAMS[path]
    writer.write(HEAD + chunk(first))
    for event in others:
        await asyncio.sleep(PACE_S)
        writer.write(chunk(event))
    writer.write(b"0\r\n\r\n")


async def whole(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(PACE_S * (len(STREAMS[path]) - 1))
    body = ANSWERS[path]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def main() -> None:
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(main())
