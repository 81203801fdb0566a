"""The methods of a store as messages between processes on one machine.

A frame is a length followed by a MessagePack array. A request has a number, the method's name and its arguments. A
response has the request's number, whether it succeeded, and the result or error. Number 0 marks a message that is
neither.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from carpool.core import errors
from carpool.core.errors import CarpoolError, Garbled, StoreError
from carpool.core.model import Admitted
from carpool.core.ports import Store

UNASKED = 0
MOST = 1 << 30  # bytes of one frame; a chunk of a batch's lines has a few million, a single body may have more
_LENGTH = struct.Struct("<I")
_NO_METHODS = frozenset(
    {"lines", "subscribe", "on_pool_change", "on_batch_hint", "attempted", "completed", "aclose", "durable", "pepper"}
)


class Frames:
    """Splits a byte stream into frames."""

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
    """`head` is the method's name in a request, and whether it succeeded in a response."""

    number: int
    head: str | bool
    rest: msgspec.Raw


_MESSAGES = msgspec.msgpack.Decoder(Message)


def message(data: bytes) -> Message:
    return _MESSAGES.decode(data)


# ---------------------------------------------------------------- methods of the port


class Method:
    """Encodes and decodes arguments and result of one method of the port, from its signature."""

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
        """Returns the arguments in order, with extra keyword arguments as a dict at the end."""
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
    """Replaces an iterable type by a list, as which it arrives."""
    return list[get_args(kind)] if get_origin(kind) is Iterable else kind  # type: ignore[misc]


def _awaited(kind: Any) -> Any:
    origin = getattr(get_origin(kind), "__name__", "")
    return get_args(kind)[0] if origin == "Awaitable" else kind


def error(name: str, said: str) -> CarpoolError:
    """Recreates an error of carpool that was raised in the other process."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CarpoolError):
        try:
            return kind(said)
        except TypeError:  # an error whose constructor needs more than a message
            return StoreError(said)
    return StoreError(said)


def _admitted(found: list[Any]) -> list[Admitted | CarpoolError]:
    return [one if isinstance(one, Admitted) else error(*one) for one in found]


_RESULTS: dict[str, Any] = {"admit_all": list[Admitted | tuple[str, str]]}
_AFTER: dict[str, Callable[[Any], Any]] = {"admit_all": _admitted}


@cache
def method(name: str) -> Method:
    """Returns the codec of a method. Raises `AttributeError` if the port lacks it, or if it is not a plain request."""
    if name.startswith("_") or name in _NO_METHODS:
        raise AttributeError(name)
    return Method(name)
