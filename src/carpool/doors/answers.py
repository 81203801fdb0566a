"""Answers of the in-process doors, in the words of the library that asked: `httpx` or `httpx2`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from carpool.errors import Closed, NotConnected, TimedOut, WireError
from carpool.model import Headers, Value


class Whole(Value, frozen=True, gc=False):
    """An answer that is complete: JSON, or the events of a finished message."""

    status: int
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Flow:
    """An answer on its way: its head is here, its body follows chunk by chunk."""

    status: int
    headers: Headers = field(repr=False)
    chunks: AsyncIterator[bytes]
    end: Callable[[], Awaitable[None]]  # gives the answer up, also when no chunk was ever asked for

    async def aclose(self) -> None:
        await self.end()


def async_response(lib: ModuleType, answer: Flow | Whole, request: Any) -> Any:
    if isinstance(answer, Whole):
        return lib.Response(answer.status, headers=list(answer.headers), content=answer.body)
    stream = _async_stream(lib)(answer, request)
    return lib.Response(answer.status, headers=list(answer.headers), stream=stream)


def blocking_response(
    lib: ModuleType, answer: Flow | Whole, request: Any, loop: asyncio.AbstractEventLoop | None
) -> Any:
    if isinstance(answer, Whole):
        return lib.Response(answer.status, headers=list(answer.headers), content=answer.body)
    stream = _blocking_stream(lib)(answer, request, loop)
    return lib.Response(answer.status, headers=list(answer.headers), stream=stream)


@cache
def _async_stream(lib: ModuleType) -> Any:
    class Stream(lib.AsyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, flow: Flow, request: Any) -> None:
            self._flow = flow
            self._request = request

        async def __aiter__(self) -> AsyncIterator[bytes]:
            try:
                async for chunk in self._flow.chunks:
                    yield chunk
            except WireError as error:
                raise http_error(lib, error, self._request) from error

        async def aclose(self) -> None:
            await self._flow.aclose()

    return Stream


@cache
def _blocking_stream(lib: ModuleType) -> Any:
    class Stream(lib.SyncByteStream):  # type: ignore[misc, name-defined]
        def __init__(self, flow: Flow, request: Any, loop: asyncio.AbstractEventLoop) -> None:
            self._flow = flow
            self._request = request
            self._loop = loop

        def __iter__(self) -> Iterator[bytes]:
            try:
                while (chunk := wait_for(_next(self._flow.chunks), self._loop)) is not None:
                    yield chunk
            except WireError as error:
                raise http_error(lib, error, self._request) from error

        def close(self) -> None:
            wait_for(self._flow.aclose(), self._loop)

    return Stream


def http_error(lib: ModuleType, error: WireError, request: Any) -> Exception:
    """A provider that can't be reached is, to the SDK, what it would be without carpool."""
    if isinstance(error, NotConnected):
        kind = lib.ConnectError
    else:
        kind = lib.ReadTimeout if isinstance(error, TimedOut) else lib.ReadError
    made: Exception = kind(str(error), request=request)
    return made


def wait_for(work: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Runs a coroutine on the engine's loop from another thread. An interrupt cancels it there."""
    if loop.is_closed():
        work.close()
        raise Closed("This fleet is closed. Make a new one.")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except CancelledError:
        raise Closed("carpool closed before this call was answered.") from None
    except BaseException:
        future.cancel()
        raise


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
