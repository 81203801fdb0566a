"""What the workers of one machine share, in the supervising process: a store in a file, which only one process may
open, and the secrets that clients sent to any of them. Both use a Unix socket that only the same user can open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from carpool.cli.announce import Holding
from carpool.core.errors import CarpoolError, Garbled, StoreError
from carpool.core.model import Headers
from carpool.core.ports import Clock, Store
from carpool.engine.context import BackgroundTasks
from carpool.stores.remote import UNASKED, Frames, Message, frame, message, method

HIGH_WATER = 8 << 20  # bytes that may be buffered for a worker before its requests and hints are held back

Ready = Callable[[Holding], None]

_HOLDING = msgspec.msgpack.Decoder(Holding)
_NUMBER = msgspec.msgpack.Decoder(tuple[int])
_SECRET = msgspec.msgpack.Decoder(tuple[str, Headers])
_NO_STORE = "This store is not hosted here: each worker opens it for itself."


class Hub:
    """`ready` is called when a worker serves, with what it found. Without a store only secrets are shared."""

    def __init__(self, store: Store | None, clock: Clock, ready: Ready = lambda holding: None) -> None:
        self.store = store
        self.clock = clock
        self.ready = ready
        self.background = BackgroundTasks()
        self._desks: set[WorkerConnection] = set()
        self._secrets: dict[tuple[str, Headers], None] = {}  # in memory only
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
        for desk in tuple(self._desks):
            desk.hang_up()
        await self.background.rest(5.0)

    def came(self, desk: WorkerConnection) -> None:
        self._desks.add(desk)

    def tell_secrets(self, desk: WorkerConnection) -> None:
        desk.tell("secrets", list(self._secrets))

    def went(self, desk: WorkerConnection, engines: Sequence[str]) -> None:
        self._desks.discard(desk)
        if self.store is not None and engines and not self._closing:
            self.background.spawn(self._release_engines(self.store, engines), "bury")

    async def _release_engines(self, store: Store, engines: Sequence[str]) -> None:
        """A worker that disconnected is dead: release what it owned at once, so that its clients find their tickets."""
        for engine in engines:
            await store.leave(engine)
        await store.take_over("", (), self.clock.now())

    def took(self, sender: WorkerConnection, provider: str, secret: Headers) -> None:
        if (provider, secret) not in self._secrets:
            self._secrets[provider, secret] = None
            for desk in self._desks - {sender}:
                desk.tell("secrets", [(provider, secret)])


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
        self._hub.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for end in self._ends:
            end()
        self._hub.went(self, sorted(self._engines))

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
            self.tell(name, ())
        self._skipped_hints.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._frames.feed(data):
                self._take(message(frame))
        except (msgspec.DecodeError, Garbled):
            self.hang_up()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # outgoing messages

    def tell(self, name: str, said: Sequence[Any]) -> None:
        if self._slow and name != "secrets":
            self._skipped_hints.add(name)
        elif self._transport is not None:
            self._transport.write(frame(UNASKED, name, said))

    def _answer(self, number: int, well: bool, said: Any) -> None:
        if self._transport is not None:
            self._transport.write(frame(number, well, said))

    # incoming messages

    def _take(self, asked: Message) -> None:
        name = str(asked.head)
        if asked.number == UNASKED:
            self._told(name, asked.rest)
        else:  # tasks start in this order, and so do their writes
            self._hub.background.spawn(self._serve(asked.number, name, asked.rest), name)

    def _told(self, name: str, rest: msgspec.Raw) -> None:
        if name == "secret":
            self._hub.took(self, *_SECRET.decode(rest))
        elif name == "secrets":
            self._hub.tell_secrets(self)
        elif name == "enough":
            self._lines.pop(_NUMBER.decode(rest)[0], None)
        elif name == "ready":
            self._hub.ready(_HOLDING.decode(rest))

    async def _serve(self, number: int, name: str, rest: msgspec.Raw) -> None:
        try:
            said = await self._done(name, rest)
        except CarpoolError as error:
            self._answer(number, False, (type(error).__name__, str(error)))
        except (AttributeError, msgspec.ValidationError):
            self._answer(number, False, ("StoreError", f"A store does not understand {name[:40]!r} so."))
        except BaseException:
            self._answer(number, False, ("StoreError", f"The process that hosts the store broke at {name[:40]!r}."))
            raise
        else:
            self._answer(number, True, said)

    async def _done(self, name: str, rest: msgspec.Raw) -> Any:
        store = self._hub.store
        if store is None:
            raise StoreError(_NO_STORE)
        if name == "hello":
            self._ends = [
                store.subscribe(lambda tickets: self.tell("settled", tickets)),
                store.on_pool_change(lambda names: self.tell("pools", names)),
                store.on_batch_hint(lambda batches: self.tell("batches", batches)),
            ]
            return store.durable, store.pepper
        if name == "lines":
            self._next += 1
            self._lines[self._next] = aiter(store.lines(_NUMBER.decode(rest)[0]))
            return self._next
        if name == "more":
            lines = self._lines.get(_NUMBER.decode(rest)[0])
            return None if lines is None else await anext(lines, None)
        return await self._asked(store, name, rest)

    async def _asked(self, store: Store, name: str, rest: msgspec.Raw) -> Any:
        args, named = method(name).arguments(rest)
        if name == "join":
            self._engines.add(args[0])
        elif name == "leave":
            self._engines.discard(args[0])
        return await getattr(store, name)(*args, **named)
