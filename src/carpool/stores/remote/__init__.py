"""A store that another process on this machine hosts: every method is a request over a Unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from carpool.core.errors import CarpoolError, Closed, StoreError
from carpool.core.model import CallRow, Entry, Headers, Settled
from carpool.core.ports import Store
from carpool.stores.operations.codec import BIGGEST
from carpool.stores.operations.store import Listener, Listeners
from carpool.stores.remote.frames import UNASKED, Frames, Method, error, frame, message, method

Told = Callable[[BaseException | None], None]
Secret = tuple[str, Headers]  # a provider and its credential headers

_LOST = "The process that hosts this store is gone. carpool's workers end with it: start it again."
_CHUNK = msgspec.msgpack.Decoder(list[tuple[int, bytes]] | None)
_NUMBERS = msgspec.msgpack.Decoder(list[int])
_NAMES = msgspec.msgpack.Decoder(list[str])
_SECRETS = msgspec.msgpack.Decoder(list[Secret])
_ERROR = msgspec.msgpack.Decoder(tuple[str, str])
_WELCOME = msgspec.msgpack.Decoder(tuple[bool, bytes])


class HubConnection(asyncio.Protocol):
    """The connection to the host: sends requests and matches responses to them."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, tuple[asyncio.Future[Any], Callable[[msgspec.Raw], Any]]] = {}
        self._last = UNASKED
        self._idle: asyncio.Future[None] | None = None
        self.told: dict[str, Callable[[msgspec.Raw], None]] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transport only lacks the base class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(StoreError(_LOST))
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            received = message(body)
            if received.number == UNASKED:
                self.told.get(str(received.head), _ignore)(received.rest)
            else:
                self._resolve(received.number, received.head is True, received.rest)

    # requests

    def ask(self, read: Callable[[msgspec.Raw], Any], name: str, *args: Any) -> asyncio.Future[Any]:
        """Sends a request before it returns, so requests are sent in the order of the calls."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve_exception)  # not every caller awaits the response
        if self._transport is None:
            future.set_exception(Closed("The store is closed.") if self._idle is not None else StoreError(_LOST))
            return future
        self._last += 1
        try:
            data = frame(self._last, name, args)
        except (OverflowError, UnicodeError) as problem:
            future.set_exception(StoreError(f"The store can't hold such a value: {problem}."))
            return future
        self._waiting[self._last] = (future, read)
        self._transport.write(data)
        return future

    def tell(self, name: str, *args: Any) -> None:
        """Sends a message that needs no response."""
        if self._transport is not None:
            self._transport.write(frame(UNASKED, name, args))

    def _resolve(self, number: int, succeeded: bool, rest: msgspec.Raw) -> None:
        future, read = self._waiting.pop(number)
        if not future.done():  # the caller may have been cancelled
            if succeeded:
                future.set_result(read(rest))
            else:
                future.set_exception(error(*_ERROR.decode(rest)))
        if self._idle is not None and not self._waiting and not self._idle.done():
            self._idle.set_result(None)

    async def aclose(self) -> None:
        """Waits for outstanding responses, then closes the connection."""
        if self._idle is None:
            self._idle = asyncio.get_running_loop().create_future()
        if self._waiting and self._transport is not None:
            await self._idle
        if self._transport is not None:
            self._transport.close()
            await self.lost


def _ignore(rest: msgspec.Raw) -> None:
    """Drops a message that has no listener yet."""


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Marks an exception as retrieved, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class RemoteStore:
    """Implements `ports.Store` over a `HubConnection`. Methods that are not defined here are forwarded as they are."""

    def __init__(self, line: HubConnection, durable: bool, pepper: bytes) -> None:
        self._connection = line
        self.durable = durable
        self.pepper = pepper
        self._closed = False
        self._listeners: Listeners[int] = Listeners()
        self._watchers: Listeners[str] = Listeners()
        self._followers: Listeners[int] = Listeners()
        line.told["settled"] = lambda raw: self._listeners.tell(_NUMBERS.decode(raw))
        line.told["watched"] = lambda raw: self._watchers.tell(_NAMES.decode(raw))
        line.told["nudged"] = lambda raw: self._followers.tell(_NUMBERS.decode(raw))

    @classmethod
    async def open(cls, path: str) -> Self:
        return await cls._over(await connect(path))

    @classmethod
    async def over(cls, line: HubConnection) -> Store:
        """Opens the store over a connection that is also used for other messages."""
        return cast("Store", await cls._over(line))

    @classmethod
    async def _over(cls, line: HubConnection) -> Self:
        durable, pepper = await line.ask(_WELCOME.decode, "hello")
        return cls(line, durable, pepper)

    def __getattr__(self, name: str) -> Any:
        asked = method(name)

        def ask(*args: Any, **named: Any) -> Awaitable[Any]:
            return self._ask(name, asked, args, named)

        self.__dict__[name] = ask  # cached for the next access
        return ask

    def _ask(self, name: str, asked: Method, args: tuple[Any, ...], named: dict[str, Any]) -> Awaitable[Any]:
        if self._closed:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Closed("The store is closed."))
            return future
        return self._connection.ask(asked.result, name, *asked.pack(args, named))

    async def outcome(self, ticket: int, credential: str) -> Settled | None:
        if ticket > BIGGEST:  # no ticket has such a number, and it could not be encoded
            return None
        found: Settled | None = await self._ask("outcome", method("outcome"), (ticket, credential), {})
        return found

    async def listed_call(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        if ticket > BIGGEST:
            return None
        found: CallRow | None = await self._ask("listed_call", method("listed_call"), (ticket, credentials), {})
        return found

    async def entries(self, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
        if ticket > BIGGEST:
            return []
        found: list[Entry] = await self._ask("entries", method("entries"), (ticket, credentials), {})
        return found

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        number = await self._connection.ask(msgspec.msgpack.Decoder(int).decode, "lines", batch)
        try:
            while (chunk := await self._connection.ask(_CHUNK.decode, "more", number)) is not None:
                yield chunk
        finally:
            self._connection.tell("enough", number)

    def subscribe(self, listener: Listener[int]) -> Callable[[], None]:
        return self._listeners.subscribe(listener)

    def on_pool_change(self, listener: Listener[str]) -> Callable[[], None]:
        return self._watchers.subscribe(listener)

    def on_batch_hint(self, listener: Listener[int]) -> Callable[[], None]:
        return self._followers.subscribe(listener)

    def attempted(self, entry: Entry) -> bool:
        return False  # only the host knows when an entry is written

    def completed(self, entry: Entry, told: Told) -> None:
        asking = self._ask("record", method("record"), (entry,), {"unhurried": True})
        assert isinstance(asking, asyncio.Future)
        asking.add_done_callback(lambda done: told(None if done.cancelled() else done.exception()))

    async def aclose(self) -> None:
        self._closed = True
        await self._connection.aclose()


def hosted(url: str | Path | None) -> bool:
    """Whether only one process may open this store, and so must host it for the others on its machine."""
    return isinstance(url, Path) or str(url).partition("://")[0] not in ("postgresql", "postgres")


async def connect(path: str) -> HubConnection:
    try:
        _, line = await asyncio.get_running_loop().create_unix_connection(HubConnection, path)
    except OSError as problem:
        raise StoreError(f"The process that hosts the store can't be reached ({problem.strerror}).") from problem
    return line


class Handover:
    """Shares secrets between workers, in memory only, so that a batch outlives the worker that received its key."""

    def __init__(self, line: HubConnection, take: Callable[[str, Headers], object]) -> None:
        self._connection = line
        self._take = take
        line.told["secrets"] = self._taken
        line.tell("secrets")

    def _taken(self, raw: msgspec.Raw) -> None:
        for provider, secret in _SECRETS.decode(raw):
            try:
                self._take(provider, secret)
            except (CarpoolError, KeyError):  # a provider that this worker does not have
                continue

    def give(self, provider: str, secret: Headers) -> None:
        self._connection.tell("secret", provider, secret)
