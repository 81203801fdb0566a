"""Read a JSON object without re-encoding it: members keep the bytes that the client sent.

msgspec returns each member's value as raw bytes, but neither its position in the body nor whether a name is repeated.
A short scan over the members finds both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from carpool.core.errors import BadCall

_FULL = msgspec.json.Decoder()
_SHALLOW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SORTED = msgspec.json.Encoder(order="sorted")

_NAME = re.compile(rb'[ \t\r\n]*[{,][ \t\r\n]*("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*:[ \t\r\n]*')
_CLOSE = re.compile(rb"[ \t\r\n]*\}[ \t\r\n]*")


class JsonObject(msgspec.Struct, frozen=True):
    """A JSON object: its original bytes, its decoded values, and each member as the client sent it."""

    text: bytes
    values: dict[str, Any]
    members: dict[str, msgspec.Raw]
    exact: bool  # False when a number is too big to decode; the member that holds it is UNSET

    def mistake(self, name: str, expected: str) -> BadCall:
        return BadCall(f"`{name}` must be {expected}." if name in self.values else f"`{name}` is missing.")

    def stream(self) -> bool:
        """Whether the client asks for a stream."""
        stream = self.values.get("stream")
        if stream is not None and not isinstance(stream, bool):
            raise self.mistake("stream", "true or false")
        return bool(stream)

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The position of each member, from the first byte of its name to the last of its value."""
        return _spans(self.text, self.members)

    def without(self, name: str) -> bytes:
        """The body without one member."""
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
        """The body with one member set to this value. `name` must not need escapes."""
        member, spans = b'"%b":%b' % (name.encode(), value), self.spans
        if name in spans:
            start, end = spans[name]
            return self.text[:start] + member + self.text[end:]
        if not spans:
            return b"{%b}" % member
        end = max(end for _, end in spans.values())
        return self.text[:end] + b"," + member + self.text[end:]

    def canonical(self, without: str) -> bytes:
        """A canonical form without one member: equal for equal JSON, whatever the order of names and the white space.

        A number that can't be decoded can't be normalised either. Then the bytes themselves are the form: at worst two
        equal bodies count as different, but never two different ones as equal.
        """
        values = self.values
        if not self.exact:
            return self.without(without)
        try:
            return _SORTED.encode({name: values[name] for name in values if name != without})
        except RecursionError:  # so deep that it could be decoded but not encoded
            return self.without(without)


def read(body: bytes) -> JsonObject:
    """Parse a client's body. Raises `BadCall` with the reason if that fails."""
    exact = True
    try:
        try:
            values = _FULL.decode(body)
        except msgspec.ValidationError:  # valid JSON, but with a number that msgspec can't decode
            values, exact = _decode_members(body), False
        if not isinstance(values, dict):
            raise BadCall("The request body must be a JSON object.")
        members = _SHALLOW.decode(body)
        _check_once(body, members)
    except RecursionError:
        raise BadCall("The request body is nested too deeply.") from None
    except ValueError as error:
        raise BadCall(f"The request body is not JSON in UTF-8: {error}.") from None
    return JsonObject(body, values, members, exact)


def _decode_members(body: bytes) -> dict[str, Any] | None:
    body.decode()  # msgspec does not check the encoding of raw values
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


def _check_once(body: bytes, members: dict[str, msgspec.Raw]) -> None:
    """Refuse repeated names. msgspec keeps only one of their values, so a compact body without repetitions is exactly
    as long as its members. Nearly all clients send compact JSON; other bodies are scanned."""
    kept = sum(map(len, members)) + sum(map(len, members.values()))
    if 1 + kept + 4 * len(members) == len(body):  # braces, and per member two quotes, a colon and (but one) a comma
        return
    if kept + 6 * len(members) != len(body) or _as_python_writes(members) != body:
        _spans(body, members)


def _as_python_writes(members: dict[str, msgspec.Raw]) -> bytes:
    """The body with a space after every colon and comma, as Python's `json` formats it: faster than a scan."""
    pieces: list[bytes | msgspec.Raw] = []
    for name, raw in members.items():
        pieces += (b', "', name.encode(), b'": ', raw)
    pieces[0] = b'{"'
    return b"".join([*pieces, b"}"])


def _spans(body: bytes, members: dict[str, msgspec.Raw]) -> dict[str, tuple[int, int]]:
    """The position of each member. The scan compares every value byte by byte: with a repeated name it does not reach
    the closing brace after the last member."""
    spans: dict[str, tuple[int, int]] = {}
    at = 0
    for name, raw in members.items():
        match = _NAME.match(body, at)
        if not match or not body.startswith(bytes(raw), match.end()):
            raise _repeated_field()
        at = match.end() + len(raw)
        spans[name] = (match.start(1), at)
    if spans and not _CLOSE.fullmatch(body, at):
        raise _repeated_field()
    return spans


_BLANK = re.compile(rb"[ \t\r\n]*")
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Span(NamedTuple):
    """A value within a text: its first byte, and the first one after it."""

    start: int
    end: int

    def of(self, text: bytes) -> bytes:
        return text[self.start : self.end]


def value_spans(text: bytes, where: Span) -> dict[str, Span]:
    """The positions of the values of an object. Raises `BadCall` for repeated names."""
    members = _members(where.of(text))
    spans = _spans(where.of(text), members)
    ends = {name: where.start + end for name, (_, end) in spans.items()}
    return {name: Span(ends[name] - len(raw), ends[name]) for name, raw in members.items()}


def element_spans(text: bytes, where: Span) -> list[Span]:
    """The positions of the elements of a list."""
    found, at = [], where.start
    for raw in _elements(where.of(text)):
        blank = _BLANK.match(text, at + 1)  # after the bracket or the comma
        assert blank is not None
        start = blank.end()
        found.append(Span(start, start + len(raw)))
        after = _BLANK.match(text, start + len(raw))
        assert after is not None
        at = after.end()
    return found


def spliced(text: bytes, splices: Iterable[tuple[int, int, bytes]]) -> bytes:
    """The text with parts replaced; all other bytes stay the same."""
    pieces, done = [], 0
    for start, end, replacement in sorted(splices):
        pieces += [text[done:start], replacement]
        done = end
    return b"".join([*pieces, text[done:]])


def _repeated_field() -> BadCall:
    return BadCall("The request body names a top-level field twice; send each field once.")
