"""The methods of a store as messages between the processes of one machine.

A frame is its length and a MessagePack array: a request is its number, the method's name and its arguments; an answer
is the request's number, whether it went well, and the result or the error; number 0 is what nobody asked for.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from carpool import errors
from carpool.errors import CarpoolError, Garbled, StoreError
from carpool.model import Admitted
from carpool.ports import Store

UNASKED = 0
MOST = 1 << 30  # bytes of one frame; a chunk of a batch's lines is a few million, a body may be more
_LENGTH = struct.Struct("<I")
_NO_METHODS = frozenset(
    {"lines", "subscribe", "watch", "heed", "attempted", "completed", "aclose", "durable", "pepper"}
)


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > MOST:
                raise Garbled("A message between carpool's processes is longer than any can be.")
            if len(self._buffer) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            yield bytes(self._buffer[at : at + length])
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


class Message(msgspec.Struct, array_like=True, frozen=True):
    """A request: `head` names the method. An answer: `head` says whether it went well."""

    number: int
    head: str | bool
    rest: msgspec.Raw


_MESSAGES = msgspec.msgpack.Decoder(Message)


def message(data: bytes) -> Message:
    return _MESSAGES.decode(data)


# ---------------------------------------------------------------- what the port says of each method


class Method:
    """One method of the port: how its arguments and its result are read."""

    def __init__(self, name: str) -> None:
        method = getattr(Store, name)
        hints = get_type_hints(method)
        parameters = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
        self._loose = any(one.kind is one.VAR_KEYWORD for one in parameters)
        self._names = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
        self._by_place = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
        self._defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        kinds = tuple(_listed(hints[name]) for name in self._names)
        whole: Any = tuple.__class_getitem__((*kinds, dict[str, Any]))
        self._arguments = msgspec.msgpack.Decoder(whole)
        self._result = msgspec.msgpack.Decoder(_RESULTS.get(name) or _awaited(hints["return"]))
        self._after = _AFTER.get(name)

    def pack(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments in their order; those that only `**` takes stand at the end."""
        rest, given = dict(named), list(args)
        left = self._names[len(args) :]
        given += [rest.pop(name) if name in rest else self._defaults[name] for name in left]
        if rest and not self._loose:
            raise TypeError(f"Unknown arguments: {', '.join(rest)}.")
        return (*given, rest)

    def arguments(self, raw: msgspec.Raw) -> tuple[tuple[Any, ...], dict[str, Any]]:
        *given, rest = self._arguments.decode(raw)
        named = dict(zip(self._names[self._by_place :], given[self._by_place :], strict=True))
        return tuple(given[: self._by_place]), {**named, **rest}

    def result(self, raw: msgspec.Raw) -> Any:
        found = self._result.decode(raw)
        return found if self._after is None else self._after(found)


def _listed(kind: Any) -> Any:
    """An iterable arrives as a list."""
    return list[get_args(kind)] if get_origin(kind) is Iterable else kind  # type: ignore[misc]


def _awaited(kind: Any) -> Any:
    origin = getattr(get_origin(kind), "__name__", "")
    return get_args(kind)[0] if origin == "Awaitable" else kind


def error(name: str, said: str) -> CarpoolError:
    """carpool's own error again, as it was raised in the other process."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CarpoolError):
        try:
            return kind(said)
        except TypeError:  # one that needs more than its words
            return StoreError(said)
    return StoreError(said)


def _admitted(found: list[Any]) -> list[Admitted | CarpoolError]:
    return [one if isinstance(one, Admitted) else error(*one) for one in found]


_RESULTS: dict[str, Any] = {"admit_all": list[Admitted | tuple[str, str]]}
_AFTER: dict[str, Callable[[Any], Any]] = {"admit_all": _admitted}


@cache
def method(name: str) -> Method:
    """Raises `AttributeError` for what the port does not have, or not as a plain question."""
    if name.startswith("_") or name in _NO_METHODS:
        raise AttributeError(name)
    return Method(name)
