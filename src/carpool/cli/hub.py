"""What the workers of one machine share, in the process that started them: a store in a file, which only one process
may open, and the secrets that clients passed to any of them. Both over a Unix socket that is its user's alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from carpool.engine.tasks import Crew
from carpool.errors import CarpoolError, Garbled, StoreError
from carpool.model import Headers
from carpool.ports import Clock, Store
from carpool.stores._frames import UNASKED, Frames, Message, frame, message, method

HIGH_WATER = 8 << 20  # bytes that may wait for a worker before it is asked for nothing more, and told less

_NUMBER = msgspec.msgpack.Decoder(tuple[int])
_SECRET = msgspec.msgpack.Decoder(tuple[str, Headers])
_NO_STORE = "This store is not hosted here: each worker opens it for itself."


class Hub:
    """`ready` hears when a worker serves. Without a store only secrets are handed on."""

    def __init__(self, store: Store | None, clock: Clock, ready: Callable[[], None] = lambda: None) -> None:
        self.store = store
        self.clock = clock
        self.ready = ready
        self.crew = Crew()
        self._desks: set[Desk] = set()
        self._secrets: dict[tuple[str, Headers], None] = {}  # in memory, and nowhere else
        self._server: asyncio.Server | None = None
        self._closing = False

    async def open(self, path: Path) -> None:
        """In a directory that is its owner's alone, so that nobody can come between making and closing the door."""
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(lambda: Desk(self), str(path))
        finally:
            os.umask(before)

    async def aclose(self) -> None:
        self._closing = True
        if self._server is not None:
            self._server.close()
        for desk in tuple(self._desks):
            desk.hang_up()
        await self.crew.rest(5.0)

    def came(self, desk: Desk) -> None:
        self._desks.add(desk)

    def tell_secrets(self, desk: Desk) -> None:
        desk.tell("secrets", list(self._secrets))

    def went(self, desk: Desk, engines: Sequence[str]) -> None:
        self._desks.discard(desk)
        if self.store is not None and engines and not self._closing:
            self.crew.spawn(self._bury(self.store, engines), "bury")

    async def _bury(self, store: Store, engines: Sequence[str]) -> None:
        """Whoever hung up is dead: what it owned is free at once, and its clients find their tickets."""
        for engine in engines:
            await store.leave(engine)
        await store.take_over("", (), self.clock.now())

    def took(self, sender: Desk, provider: str, secret: Headers) -> None:
        if (provider, secret) not in self._secrets:
            self._secrets[provider, secret] = None
            for desk in self._desks - {sender}:
                desk.tell("secrets", [(provider, secret)])


class Desk(asyncio.Protocol):
    """One worker's connection."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._engines: set[str] = set()
        self._lines: dict[int, AsyncIterator[list[tuple[int, bytes]]]] = {}
        self._next = 0
        self._ends: list[Callable[[], None]] = []
        self._slow = False
        self._untold: set[str] = set()  # of what it was told less while it was slow

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its ancestors
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self._hub.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for end in self._ends:
            end()
        self._hub.went(self, sorted(self._engines))

    def pause_writing(self) -> None:
        """A worker that does not listen is asked for nothing more; what it is not told now, it is told of later."""
        self._slow = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._slow = False
        if self._transport is not None:
            self._transport.resume_reading()
        for name in sorted(self._untold):
            self.tell(name, ())
        self._untold.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for one in self._frames.feed(data):
                self._take(message(one))
        except (msgspec.DecodeError, Garbled):
            self.hang_up()

    def hang_up(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # what is said

    def tell(self, name: str, said: Sequence[Any]) -> None:
        if self._slow and name != "secrets":
            self._untold.add(name)
        elif self._transport is not None:
            self._transport.write(frame(UNASKED, name, said))

    def _answer(self, number: int, well: bool, said: Any) -> None:
        if self._transport is not None:
            self._transport.write(frame(number, well, said))

    # what is asked

    def _take(self, asked: Message) -> None:
        name = str(asked.head)
        if asked.number == UNASKED:
            self._told(name, asked.rest)
        else:  # tasks begin in the order of these lines, and so does what they write
            self._hub.crew.spawn(self._serve(asked.number, name, asked.rest), name)

    def _told(self, name: str, rest: msgspec.Raw) -> None:
        if name == "secret":
            self._hub.took(self, *_SECRET.decode(rest))
        elif name == "secrets":
            self._hub.tell_secrets(self)
        elif name == "enough":
            self._lines.pop(_NUMBER.decode(rest)[0], None)
        elif name == "ready":
            self._hub.ready()

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
                store.watch(lambda names: self.tell("watched", names)),
                store.heed(lambda batches: self.tell("nudged", batches)),
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
