"""HTTP helpers for the endpoints, on plain ASGI."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from carpool.mock.core.errors import ApiError, ConnectionCut, invalid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    base_url: str
    request_id: str
    _receive: Receive

    async def body(self, limit: int) -> bytearray:
        """The whole body, refused as soon as it is known to be too large."""
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        body = bytearray()
        async for part in self.pieces():
            if len(body) + len(part) > limit:
                raise _too_large(limit)
            body += part
        return body

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        more = True
        while more:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ConnectionCut(after_acceptance=False)
            yield event.get("body", b"")
            more = event.get("more_body", False)

    async def json(self, limit: int) -> tuple[Any, bytearray]:
        raw = await self.body(limit)
        try:
            return msgspec.json.decode(raw), raw
        except msgspec.DecodeError as error:
            raise invalid(f"The request body is not valid JSON: {error}") from error


def _too_large(limit: int) -> ApiError:
    return ApiError("request_too_large", f"Request exceeds the maximum size of {limit} bytes.")


def read_request(scope: Scope, receive: Receive, request_id: str) -> Request:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]},{text}" if key in headers else text
    host = headers.get("host", "mock.invalid")
    return Request(
        method=scope["method"],
        path=_path(scope["path"]),
        query=dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"))),
        headers=headers,
        # The client gets the address that it used, whatever this server's own address is.
        base_url=f"{scope.get('scheme', 'http')}://{host}",
        request_id=request_id,
        _receive=receive,
    )


def _path(path: str) -> str:
    """Some OpenAI-compatible providers have its paths under a prefix."""
    return path.removeprefix("/openai") if path.startswith("/openai/v1/") else path


@dataclass(slots=True)
class Reply:
    status: int = 200
    body: bytes | AsyncIterator[bytes] = b""
    headers: dict[str, str] = field(default_factory=dict)

    async def send(self, send: Send, headers: Mapping[str, str], head_only: bool) -> None:
        merged = {**headers, **self.headers}
        if isinstance(self.body, bytes):
            merged["content-length"] = str(len(self.body))
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in merged.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": pairs})
        if isinstance(self.body, bytes):
            await send({"type": "http.response.body", "body": b"" if head_only else self.body})
            return
        async for part in self.body:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Reply:
    return Reply(status, _encode(value), {"content-type": "application/json", **(headers or {})})
