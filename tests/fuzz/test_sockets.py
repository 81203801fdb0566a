"""Bytes over a real socket: whatever is sent, it is answered or let go, and the next good request is served."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.sockets import Peer, provider, proxied

from .seeds import SEEDS
from .test_fuzz import mutated

GOOD = SEEDS["requests"][0]
PATIENCE = 20.0
HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) ")


async def plain(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A proxy on an event loop of its own, in a thread: hypothesis knows no other time than its own."""
    ready: list[int] = []
    begun, ended = threading.Event(), threading.Event()

    async def main() -> None:
        async with provider(plain) as (url, _), proxied(url) as house:
            ready.append(int(house.url.rpartition(":")[2]))
            begun.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert begun.wait(PATIENCE)
    yield ready[0]
    ended.set()
    thread.join()


def said(port: int, data: bytes, pieces: int) -> bytes:
    """All that is said to these bytes. Who has sent everything closes its side, so that nobody waits for more."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as line:
        heard = b""
        try:
            step = max(1, len(data) // pieces)
            for start in range(0, len(data), step):
                line.sendall(data[start : start + step])
            line.shutdown(socket.SHUT_WR)
            while piece := line.recv(65536):
                heard += piece
        except ConnectionError:
            return heard
        return heard


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(mutated(SEEDS["requests"]), st.integers(1, 5))
def test_whatever_is_sent_the_next_is_served(port: int, data: bytes, pieces: int) -> None:
    for status in HEAD.findall(said(port, data, pieces)):
        assert status < b"500"
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as line:
        line.sendall(GOOD)
        assert line.recv(12) == b"HTTP/1.1 200"
