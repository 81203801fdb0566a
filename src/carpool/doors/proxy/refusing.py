"""Requests that are refused before there is anything to ask the application: what is said, and in whose words."""

from __future__ import annotations

from http import HTTPStatus

from carpool.dialects import get as get_dialect
from carpool.doors.proxy.choosing import wire_of

_CODES = {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}
_SPEAKERS = ("anthropic", "openai")


class Refused(Exception):
    """Why a connection ends. `again`: after so many seconds the same may be welcome."""

    def __init__(self, status: int, message: str, again: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.again = again

    def answer(self, target: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The whole answer. Whatever framing the request had, nobody reads on after it."""
        spoken = _spoken(target, headers)
        body = get_dialect(spoken).error(self.status, _CODES.get(self.status, "invalid_request_error"), self.message)
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}", "content-type: application/json"]
        if self.again is not None:
            lines.append(f"retry-after: {self.again}")
        lines += [f"content-length: {len(body)}", "connection: close", "", ""]
        return "\r\n".join(lines).encode("ascii") + body


MALFORMED = (
    "This is not HTTP/1.1 as carpool can read it without a doubt, so nothing of it was passed on. Send one "
    "content-length or transfer-encoding: chunked, and lines that end in CR LF."
)


def _spoken(target: bytes, headers: list[tuple[bytes, bytes]]) -> str:
    """As far as the request was read, it says whose client this is; both kinds find the message in either shape."""
    path = target.decode("latin-1").partition("?")[0]
    if path.startswith("/@"):
        path = "/" + path[1:].partition("/")[2]
    said = tuple([(name.decode("latin-1"), "") for name, _ in headers])
    spoken = wire_of(path, said)
    return spoken if spoken in _SPEAKERS else _SPEAKERS[0]
