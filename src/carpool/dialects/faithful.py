"""Reads a JSON object without re-encoding it: members keep the very bytes that the client wrote.

msgspec hands out each member's value as raw bytes, but neither its place in the body nor whether a name came twice.
A short walk over the members finds both.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from carpool.errors import BadCall

_FULL = msgspec.json.Decoder()
_SHALLOW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SORTED = msgspec.json.Encoder(order="sorted")

_NAME = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*:[ \t\r\n]*')
_CLOSE = re.compile(rb"[ \t\r\n]*\}[ \t\r\n]*")


class Document(msgspec.Struct, frozen=True):
    """A JSON object in its own bytes, and its values decoded."""

    text: bytes
    values: dict[str, Any]
    exact: bool  # False when a number is too big to decode; the member that holds it stands as UNSET

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """Where each member stands, from the name's first byte to the value's last."""
        return _spans(self.text, _SHALLOW.decode(self.text))

    def without(self, name: str) -> bytes:
        """The same bytes less one member."""
        if name not in self.values:
            return self.text
        spans = self.spans
        start, end = spans[name]
        names = list(spans)
        place = names.index(name)
        if place:  # the comma before it goes too
            start = spans[names[place - 1]][1]
        elif len(names) > 1:  # the comma after it goes too
            end = spans[names[1]][0]
        return self.text[:start] + self.text[end:]

    def having(self, name: str, value: bytes) -> bytes:
        """The same bytes with one member set to this value. `name` needs no escapes."""
        member, spans = b'"%b":%b' % (name.encode(), value), self.spans
        if name in spans:
            start, end = spans[name]
            return self.text[:start] + member + self.text[end:]
        if not spans:
            return b"{%b}" % member
        end = max(end for _, end in spans.values())
        return self.text[:end] + b"," + member + self.text[end:]

    def _less(self, name: str) -> dict[str, Any]:
        values = self.values
        return {one: values[one] for one in values if one != name} if name in values else values

    def canonical(self, without: str) -> bytes:
        """Equal for equal JSON, whatever the order of names and the white space.

        A number that can't be decoded can't be normalised either: then the bytes themselves are compared, which at
        worst tells two equal bodies apart and never takes two different ones for equal.
        """
        if not self.exact:
            return self.without(without)
        try:
            return _SORTED.encode(self._less(without))
        except RecursionError:  # nested so deep that it could only just be read
            return self.without(without)


def read(body: bytes) -> Document:
    """Understands a client's body, or says in a sentence why not."""
    try:
        values, exact = _decode(body)
        _check_once(body)
    except RecursionError:
        raise BadCall("The request body is nested too deeply.") from None
    except ValueError as error:
        raise BadCall(f"The request body is not JSON in UTF-8: {error}.") from None
    return Document(body, values, exact)


def _decode(body: bytes) -> tuple[dict[str, Any], bool]:
    exact = True
    try:
        values = _FULL.decode(body)
    except msgspec.ValidationError:  # sound JSON, but with a number beyond what msgspec decodes
        values = _decode_members(body)
        exact = False
    if not isinstance(values, dict):
        raise BadCall("The request body must be a JSON object.")
    return values, exact


def _decode_members(body: bytes) -> dict[str, Any] | None:
    body.decode()  # raw values are skipped without a look at their encoding
    values: dict[str, Any] = {}
    try:
        members = _SHALLOW.decode(body)
    except msgspec.ValidationError:
        return None
    for name, raw in members.items():
        try:
            values[name] = _FULL.decode(raw)
        except msgspec.ValidationError:
            values[name] = msgspec.UNSET
    return values


def _check_once(body: bytes) -> None:
    """Whenever a name came twice msgspec kept one value only. As nearly all clients write it, with no byte to spare, a
    body is just as long as its kept members then; any other is walked through."""
    members = _SHALLOW.decode(body)
    kept = sum(map(len, members)) + sum(map(len, members.values()))
    if 1 + kept + 4 * len(members) == len(body):  # two braces, and for each two quotes, a colon and, but once, a comma
        return
    if kept + 6 * len(members) != len(body) or _as_python_writes(members) != body:
        _spans(body, members)


def _as_python_writes(members: dict[str, msgspec.Raw]) -> bytes:
    """With a space behind every colon and comma: quicker to write again than to walk through."""
    pieces: list[bytes | msgspec.Raw] = []
    for name, raw in members.items():
        pieces += (b', "', name.encode(), b'": ', raw)
    pieces[0] = b'{"'
    return b"".join([*pieces, b"}"])


def _spans(body: bytes, members: dict[str, msgspec.Raw]) -> dict[str, tuple[int, int]]:
    """Where each member stands. The walk checks every value byte by byte: where a name came twice it can't arrive at
    the closing brace after the last of the kept members."""
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, raw in members.items():
        found = _NAME.match(body, at)
        if not found or not body.startswith(bytes(raw), found.end()):
            raise _twice()
        at = found.end() + len(raw)
        spans[name] = (found.start(1), at)
    if spans and not _CLOSE.fullmatch(body, at):
        raise _twice()
    return spans


def _twice() -> BadCall:
    return BadCall("The request body names a top-level field twice; send each field once.")
