"""Serves the mock over real HTTP, with uvicorn's protocol and without its process management."""

import asyncio
import signal
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from carpool.mock.core.config import MockConfig
from carpool.mock.core.errors import ConnectionCut
from carpool.mock.core.provider import MockAnthropic

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class CuttingProtocol(HttpToolsProtocol):
    """Turns a ConnectionCut that leaves the app into a reset of the TCP connection."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            try:
                await app(scope, receive, send)
            except ConnectionCut:
                await asyncio.sleep(0)  # what was sent before the cut is on its way first
                cycle.disconnected = True
                reset(self.transport)

        super()._start_asgi_task(cycle, guarded)


def reset(transport: asyncio.Transport) -> None:
    """Ends a connection with RST rather than FIN, so that no client can take it for a complete answer."""
    peer = transport.get_extra_info("socket")
    if peer is not None and not transport.is_closing():
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    transport.abort()


class MockServer:
    def __init__(self, provider: MockAnthropic, url: str) -> None:
        self.provider = provider
        self.url = url


@asynccontextmanager
async def serve(
    config: MockConfig | None = None,
    *,
    provider: MockAnthropic | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> AsyncIterator[MockServer]:
    """A running server in this event loop, on a free port unless one is named."""
    provider = provider or MockAnthropic(config)
    settings = uvicorn.Config(provider.app, log_level="warning", date_header=False, lifespan="off", ws="none")
    settings.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: CuttingProtocol(settings, state, {}, loop), host, port, backlog=2048)
    hooks = asyncio.create_task(provider.carry_hooks())
    try:
        yield MockServer(provider, f"http://{host}:{server.sockets[0].getsockname()[1]}")
    finally:
        hooks.cancel()
        await _stop(server, state)
        with suppress(asyncio.CancelledError):
            await hooks


async def _stop(server: asyncio.Server, state: ServerState) -> None:
    """Ends at once: clients that still wait for an answer see the connection end."""
    server.close()
    for connection in list(state.connections):
        connection.transport.abort()
    tasks = list(state.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.wait_closed()


def run(
    config: MockConfig | None = None,
    host: str = "127.0.0.1",
    port: int = 8788,
    ready: Callable[[MockServer], None] | None = None,
) -> None:
    """Serves until it is interrupted or terminated; `ready` is called once it listens."""

    async def forever() -> None:
        stopped = asyncio.Event()
        with suppress(NotImplementedError):  # not on this platform
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        async with serve(config, host=host, port=port) as server:
            if ready is not None:
                ready(server)
            await stopped.wait()

    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(forever())


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return None
    return uvloop.new_event_loop


@contextmanager
def serve_in_thread(config: MockConfig | None = None) -> Iterator[MockServer]:
    """The same server in a separate thread, for tests of blocking clients."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mock-anthropic", daemon=True)
    thread.start()
    serving = serve(config)
    server = asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(10)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
