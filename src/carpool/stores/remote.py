"""A store that another process on this machine hosts: every method is a request over a Unix socket.

A frame is a length followed by a MessagePack array. A request has a number, the method's name and its arguments. A
response has the request's number, whether it succeeded, and the result or error. Number 0 marks a message that is
neither. The codec of each method is generated from its signature in the port.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import msgspec

from carpool.core import errors
from carpool.core.errors import CarpoolError, Closed, MalformedResponse, StoreError
from carpool.core.model import Admitted, Entry, Headers
from carpool.core.ports import Store
from carpool.stores import is_postgres
from carpool.stores.operations.store import BATCHES, POOLS, SETTLED, HintListeners
from carpool.stores.operations.writer import OnDone

UNASKED = 0
MOST = 1 << 30  # bytes of one frame; a chunk of a batch's lines has a few million, a single body may have more
_LENGTH = struct.Struct("<I")
_NO_METHODS = frozenset(
    {"lines", "subscribe", "on_pool_change", "on_batch_hint", "attempted", "completed", "aclose", "durable", "pepper"}
)


class Message(msgspec.Struct, array_like=True, frozen=True):
    """`head` is the method's name in a request, and whether it succeeded in a response."""

    number: int
    head: str | bool
    rest: msgspec.Raw


_MESSAGES = msgspec.msgpack.Decoder(Message)


class Frames:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MOST:
                raise MalformedResponse("A message between carpool's processes is too long.")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            yield _MESSAGES.decode(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]


def _plain(value: object) -> object:
    if isinstance(value, CarpoolError):
        return [type(value).__name__, str(value)]
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"{type(value).__name__} can't be sent to another process.")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(*parts: object) -> bytes:
    body = _ENCODER.encode(parts)
    return _LENGTH.pack(len(body)) + body


# ------------------------------------------------------------ methods of the port


class Method:
    """Encodes and decodes arguments and result of one method of the port, from its signature."""

    def __init__(self, name: str) -> None:
        method = getattr(Store, name)
        hints = get_type_hints(method)
        parameters = list(inspect.signature(method).parameters.values())[1:]  # without `self`
        extra = {parameter.name: dict[str, Any] for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD}
        self._signature = inspect.Signature(parameters)
        kinds: Any = tuple.__class_getitem__(tuple((hints | extra)[name] for name in self._signature.parameters))
        self._arguments = msgspec.msgpack.Decoder(kinds)
        self._admits = name == "admit_all"  # errors among its results arrive by name and message
        kind = list[Admitted | tuple[str, str]] if self._admits else hints["return"]
        awaited = getattr(get_origin(kind), "__name__", "") == "Awaitable"
        self._result = msgspec.msgpack.Decoder(get_args(kind)[0] if awaited else kind)

    def pack(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Returns the arguments in order, with extra keyword arguments as a dict at the end."""
        bound = self._signature.bind(*args, **named)
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def arguments(self, raw: msgspec.Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = OrderedDict(zip(self._signature.parameters, self._arguments.decode(raw), strict=True))
        bound = inspect.BoundArguments(self._signature, given)
        return bound.args, bound.kwargs

    def result(self, raw: msgspec.Raw) -> Any:
        result = self._result.decode(raw)
        if self._admits:
            return [admitted if isinstance(admitted, Admitted) else error(*admitted) for admitted in result]
        return result


def error(name: str, text: str) -> CarpoolError:
    """Recreates an error of carpool that was raised in the other process."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CarpoolError):
        with suppress(TypeError):  # an error whose constructor needs more than a message
            return kind(text)
    return StoreError(text)


@cache
def method(name: str) -> Method:
    """Returns the codec of a method. Raises `AttributeError` if the port lacks it, or if it is not a plain request."""
    if name.startswith("_") or name in _NO_METHODS:
        raise AttributeError(name)
    return Method(name)


# ------------------------------------------------------------ the connection

Secret = tuple[str, Headers]  # a provider and its credential headers

_LOST = "The process that hosts this store is gone. carpool's workers end with it: start it again."
_CHUNK = msgspec.msgpack.Decoder(list[tuple[int, bytes]] | None)
_NOTHING = msgspec.msgpack.Decoder(None)
_NUMBERS = msgspec.msgpack.Decoder(list[int])
_HINTS: dict[str, msgspec.msgpack.Decoder[Any]] = {SETTLED: _NUMBERS, BATCHES: _NUMBERS}
_HINTS[POOLS] = msgspec.msgpack.Decoder(list[str])
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
        self.listeners: dict[str, Callable[[msgspec.Raw], None]] = {}
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
        for received in self._frames.feed(data):
            if received.number == UNASKED:
                if (listener := self.listeners.get(str(received.head))) is not None:
                    listener(received.rest)
            else:
                self._resolve(received.number, received.head is True, received.rest)

    # requests

    def ask(self, read: Callable[[msgspec.Raw], Any], name: str, *args: Any) -> asyncio.Future[Any]:
        """Sends a request before it returns, so requests are sent in the order of the calls."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Not every caller awaits the response: an exception that is retrieved is not logged by asyncio.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._transport is None or self._idle is not None:
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

    def notify(self, name: str, *args: Any) -> None:
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


class RemoteStore(HintListeners):
    """Implements `ports.Store` over a `HubConnection`. Methods that are not defined here are forwarded as they are."""

    def __init__(self, connection: HubConnection, durable: bool, pepper: bytes) -> None:
        super().__init__()
        self._connection = connection
        self.durable = durable
        self.pepper = pepper
        for topic, decoder in _HINTS.items():
            connection.listeners[topic] = partial(self._notify_raw, topic, decoder)

    @classmethod
    async def over(cls, connection: HubConnection) -> Store:
        """Opens the store over a connection that may also be used for other messages."""
        durable, pepper = await connection.ask(_WELCOME.decode, "hello")
        return cast("Store", cls(connection, durable, pepper))

    def _notify_raw(self, topic: str, decoder: msgspec.msgpack.Decoder[Any], raw: msgspec.Raw) -> None:
        self.notify(topic, decoder.decode(raw))

    def __getattr__(self, name: str) -> Any:
        asked = method(name)

        def ask(*args: Any, **named: Any) -> Awaitable[Any]:
            return self._connection.ask(asked.result, name, *asked.pack(args, named))

        self.__dict__[name] = ask  # cached for the next access
        return ask

    async def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        number = await self._connection.ask(msgspec.msgpack.Decoder(int).decode, "lines", batch)
        try:
            while (chunk := await self._connection.ask(_CHUNK.decode, "more", number)) is not None:
                yield chunk
        finally:
            self._connection.notify("enough", number)

    def attempted(self, entry: Entry) -> bool:
        return False  # only the host knows when an entry is written

    def completed(self, entry: Entry, on_done: OnDone) -> None:
        recording = self._connection.ask(_NOTHING.decode, "record", entry, True)  # deferred
        recording.add_done_callback(lambda done: on_done(None if done.cancelled() else done.exception()))

    async def aclose(self) -> None:
        await self._connection.aclose()


def hosted(url: str | Path | None) -> bool:
    """Whether only one process may open this store, and so must host it for the others on its machine."""
    return not is_postgres(url)


async def connect(path: str) -> HubConnection:
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(HubConnection, path)
    except OSError as problem:
        raise StoreError(f"The process that hosts the store can't be reached ({problem.strerror}).") from problem
    return connection


class SecretSharing:
    """Shares secrets between workers, in memory only, so that a batch outlives the worker that received its key."""

    def __init__(self, connection: HubConnection, take: Callable[[str, Headers], object]) -> None:
        self._connection = connection
        self._take = take
        connection.listeners["secrets"] = self._taken
        connection.notify("secrets")

    def _taken(self, raw: msgspec.Raw) -> None:
        for provider, secret in _SECRETS.decode(raw):
            try:
                self._take(provider, secret)
            except (CarpoolError, KeyError):  # a provider that this worker does not have
                continue

    def give(self, provider: str, secret: Headers) -> None:
        self._connection.notify("secret", provider, secret)
