"""`carpool serve --workers N`: a supervisor starts and restarts the workers, hosts what they share, and exits last.

They share a store in a file, which only one process may open, and the secrets that clients sent to any of them. Both
use a Unix socket that only the same user can open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from carpool.cli.console import StoreContents
from carpool.config import Config
from carpool.core.bounded import backoff
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, MalformedResponse, StoreError
from carpool.core.model import Headers
from carpool.core.ports import Clock, Store
from carpool.engine.background import BackgroundTasks
from carpool.stores import open_store
from carpool.stores.remote import UNASKED, Frames, Message, frame, hosted, method

log = logging.getLogger("carpool.serve")

SHORTEST_PAUSE_S = 0.5  # before a worker is restarted; doubles each time
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # after so long a worker's pause is reset
FAILED = 2
HIGH_WATER = 8 << 20  # bytes that may be buffered for a worker before its requests and hints are held back

Ready = Callable[[StoreContents], None]

_HOLDING = msgspec.msgpack.Decoder(StoreContents)
_NUMBER = msgspec.msgpack.Decoder(tuple[int])
_SECRET = msgspec.msgpack.Decoder(tuple[str, Headers])


class Workers:
    """`command` starts a worker. `begun` is called once, when all of them serve, with what the first one found in the
    store."""

    def __init__(self, count: int, command: Sequence[str], begun: Ready) -> None:
        self._count = count
        self._command = command
        self._begun = begun
        self._clock = SystemClock()
        self._background = BackgroundTasks()
        self._live: set[asyncio.subprocess.Process] = set()
        self._ready = 0
        self._found = StoreContents()
        self._served = asyncio.Event()
        self._stopping = asyncio.Event()
        self.code = 0

    # ------------------------------------------------------------ messages

    def ready(self, holding: StoreContents) -> None:
        """A worker serves. The others start only after the first one, so that an error is reported once."""
        self._ready += 1
        self._served.set()
        if self._ready == 1:
            self._found = holding
        if self._ready == self._count:
            self._begun(self._found)

    def stop(self, number: int) -> None:
        """Forward a signal. A second one is forwarded too, and means an immediate stop."""
        self._stopping.set()
        self._pass(number)

    def _pass(self, number: int) -> None:
        for process in self._live:
            if process.returncode is None:
                process.send_signal(number)

    # ------------------------------------------------------------ supervision

    async def run(self) -> int:
        """Run until all workers have ended; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._pass, signal.SIGHUP)
        try:
            keepers = [self._background.spawn_awaited(self._keep(1), "worker 1")]
            first = self._background.spawn_awaited(self._served.wait(), "first")
            await asyncio.wait((keepers[0], first), return_when=asyncio.FIRST_COMPLETED)
            if self._served.is_set() and not self._stopping.is_set():
                keepers += [
                    self._background.spawn_awaited(self._keep(n), f"worker {n}") for n in range(2, self._count + 1)
                ]
            await asyncio.gather(*keepers)
        finally:
            self._pass(signal.SIGKILL)
            self._background.abort()
        return self.code

    async def _keep(self, which: int) -> None:
        ended = 0  # exits in a row soon after the start
        while not self._stopping.is_set():
            started = self._clock.now()
            # In a new session, or Ctrl-C at a terminal would reach the workers twice.
            process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
            self._live.add(process)
            try:
                if self._stopping.is_set():
                    process.send_signal(signal.SIGTERM)
                code = await process.wait()
            finally:
                self._live.discard(process)
            if self._stopping.is_set():
                return
            if not self._served.is_set():  # it never served, so a restart would fail as well
                self.code = code if code > 0 else FAILED
                return
            lived = self._clock.now() - started
            ended = 1 if lived >= STEADY_S else ended + 1
            pause = backoff(ended, SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            log.warning("Worker %d ended (%s). It is started again in %g s.", which, how, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()


async def supervise(count: int, config: Config, port: int, begun: Ready) -> int:
    """Run the workers; host the store if only one process may open it, and share secrets between them."""
    store = await open_store(config.store, encrypt=config.encrypt) if hosted(config.store) else None
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:  # only its owner can enter
        path = Path(folder) / "hub"
        command = [sys.executable, "-m", "carpool", *sys.argv[1:], "--port", str(port), "--hub", str(path)]
        workers = Workers(count, command, begun)
        hub = Hub(store, SystemClock(), workers.ready)
        try:
            await hub.open(path)
            return await workers.run()
        finally:
            await hub.aclose()
            if store is not None:
                await store.aclose()


# ---------------------------------------------------------------- shared by the workers


class Hub:
    """`ready` is called when a worker serves, with what it found. Without a store only secrets are shared."""

    def __init__(self, store: Store | None, clock: Clock, ready: Ready = lambda holding: None) -> None:
        self.store = store
        self.clock = clock
        self.ready = ready
        self.background = BackgroundTasks()
        self.workers: set[WorkerConnection] = set()
        self.secrets: dict[tuple[str, Headers], None] = {}  # in memory only
        self._server: asyncio.Server | None = None
        self._closing = False

    async def open(self, path: Path) -> None:
        """Listen in a directory that only its owner can enter, so there is no moment when others could connect."""
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: WorkerConnection(self), str(path)
            )
        finally:
            os.umask(before)

    async def aclose(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        for worker in tuple(self.workers):
            worker.hang_up()
        await self.background.finish(5.0)

    def disconnected(self, worker: WorkerConnection, engines: Sequence[str]) -> None:
        self.workers.discard(worker)
        if self.store is not None and engines and not self._closing:
            self.background.spawn(self._release_engines(self.store, engines), "release engines")

    async def _release_engines(self, store: Store, engines: Sequence[str]) -> None:
        """A worker that disconnected is dead: release what it owned at once, so that its clients find their tickets."""
        for engine in engines:
            await store.leave(engine)
        await store.take_over("", (), self.clock.now())

    def share_secret(self, sender: WorkerConnection, provider: str, secret: Headers) -> None:
        if (provider, secret) not in self.secrets:
            self.secrets[provider, secret] = None
            for worker in self.workers - {sender}:
                worker.notify("secrets", [(provider, secret)])


class WorkerConnection(asyncio.Protocol):
    """The connection of a worker."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._engines: set[str] = set()
        self._lines: dict[int, AsyncIterator[list[tuple[int, bytes]]]] = {}
        self._next = 0
        self._ends: list[Callable[[], None]] = []
        self._slow = False
        self._skipped_hints: set[str] = set()  # hints that were held back while it was slow

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._hub.workers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for end in self._ends:
            end()
        self._hub.disconnected(self, sorted(self._engines))

    def pause_writing(self) -> None:
        """A worker that does not read gets no more requests; hints that are held back follow later."""
        self._slow = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._slow = False
        if self._transport is not None:
            self._transport.resume_reading()
        for name in sorted(self._skipped_hints):
            self.notify(name, ())
        self._skipped_hints.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._receive(message)
        except (msgspec.DecodeError, MalformedResponse):
            self.hang_up()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # outgoing messages

    def notify(self, name: str, content: Sequence[Any]) -> None:
        if self._slow and name != "secrets":
            self._skipped_hints.add(name)
        elif self._transport is not None:
            self._transport.write(frame(UNASKED, name, content))

    def _answer(self, number: int, succeeded: bool, content: Any) -> None:
        if self._transport is not None:
            self._transport.write(frame(number, succeeded, content))

    # incoming messages

    def _receive(self, message: Message) -> None:
        name, rest = str(message.head), message.rest
        if message.number != UNASKED:  # tasks start in this order, and so do their writes
            self._hub.background.spawn(self._serve(message.number, name, rest), name)
        elif name == "secret":
            self._hub.share_secret(self, *_SECRET.decode(rest))
        elif name == "secrets":
            self.notify("secrets", list(self._hub.secrets))
        elif name == "enough":
            self._lines.pop(_NUMBER.decode(rest)[0], None)
        elif name == "ready":
            self._hub.ready(_HOLDING.decode(rest))

    async def _serve(self, number: int, name: str, rest: msgspec.Raw) -> None:
        try:
            result = await self._call(name, rest)
        except CarpoolError as error:
            self._answer(number, False, (type(error).__name__, str(error)))
        except (AttributeError, msgspec.ValidationError):
            self._answer(number, False, ("StoreError", f"A store does not understand {name[:40]!r} so."))
        except BaseException:
            self._answer(number, False, ("StoreError", f"The process that hosts the store broke at {name[:40]!r}."))
            raise
        else:
            self._answer(number, True, result)

    async def _call(self, name: str, rest: msgspec.Raw) -> Any:
        store = self._hub.store
        if store is None:
            raise StoreError("This store is not hosted here: each worker opens it for itself.")
        if name == "hello":
            self._ends = [
                store.subscribe(lambda tickets: self.notify("settled", tickets)),
                store.on_pool_change(lambda names: self.notify("pools", names)),
                store.on_batch_hint(lambda batches: self.notify("batches", batches)),
            ]
            return store.durable, store.pepper
        if name == "lines":
            self._next += 1
            self._lines[self._next] = aiter(store.lines(_NUMBER.decode(rest)[0]))
            return self._next
        if name == "more":
            lines = self._lines.get(_NUMBER.decode(rest)[0])
            return None if lines is None else await anext(lines, None)
        args, named = method(name).arguments(rest)
        if name == "join":
            self._engines.add(args[0])
        elif name == "leave":
            self._engines.discard(args[0])
        return await getattr(store, name)(*args, **named)
