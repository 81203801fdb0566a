"""Reads multipart/form-data as it arrives."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_NAME = re.compile(r'\bname="([^"]*)"')
_FILENAME = re.compile(r'\bfilename="([^"]*)"')
_BOUNDARY = re.compile(r'multipart/form-data;.*?\bboundary="?([^";]+)"?', re.IGNORECASE)
_MOST_HEADERS = 16_384


class FormError(ValueError):
    """Not a valid form; the message says why."""


@dataclass(slots=True)
class Part:
    name: str
    filename: str | None
    content: bytearray = field(default_factory=bytearray)


def boundary_of(content_type: str) -> bytes:
    match = _BOUNDARY.match(content_type)
    if match is None:
        raise FormError("the content-type is not multipart/form-data with a boundary")
    return match[1].encode("latin-1")


async def read_form(pieces: AsyncIterator[bytes], boundary: bytes) -> dict[str, Part]:
    """The form's parts by name. A part's content is copied once, when it arrives."""
    reader = _Reader(boundary)
    async for piece in pieces:
        reader.feed(piece)
    if not reader.ended:
        raise FormError("the form ends before its last boundary")
    return {part.name: part for part in reader.parts}


class _Reader:
    def __init__(self, boundary: bytes) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._delimiter = b"\r\n--" + boundary
        self._buffer = bytearray(b"\r\n")  # the first boundary has none before it
        self._in_content = False

    def feed(self, piece: bytes) -> None:
        self._buffer += piece
        while not self.ended and (self._content() if self._in_content or not self.parts else self._head()):
            pass

    def _content(self) -> bool:
        """Up to the next boundary; what precedes the first one is ignored."""
        at = self._buffer.find(self._delimiter)
        safe = at if at >= 0 else max(0, len(self._buffer) - len(self._delimiter) + 1)
        if self._in_content:
            self.parts[-1].content += self._buffer[:safe]
        del self._buffer[:safe]
        if at < 0:
            return False
        self._in_content = False
        return self._head()

    def _head(self) -> bool:
        """The boundary and the headers behind it, once they are all there."""
        start = len(self._delimiter)
        if self._buffer[start : start + 2] == b"--":
            self.ended = True
            return False
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEADERS:
                raise FormError("a part's headers are too long")
            return False
        self.parts.append(_part(self._buffer[start:end].decode("utf-8", "replace")))
        del self._buffer[: end + 4]
        self._in_content = True
        return True


def _part(headers: str) -> Part:
    disposition = next((line for line in headers.split("\r\n") if line.lower().startswith("content-disposition:")), "")
    name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
    if name is None:
        raise FormError("a part has no name")
    return Part(name[1], filename[1] if filename else None)
