"""What replays and keep-alives of event streams are built of. Members of objects keep the provider's own bytes."""

from __future__ import annotations

from typing import Any

import msgspec

Members = dict[str, msgspec.Raw]

MEMBERS = msgspec.json.Decoder(Members)
LIST = msgspec.json.Decoder(list[Members])
VALUES = msgspec.json.Decoder(list[msgspec.Raw])
TEXT = msgspec.json.Decoder(str)
NULL = msgspec.Raw(b"null")

_PIECE = 2048  # characters in a delta


def event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def one_line(body: bytes) -> bytes:
    """Replace line breaks by spaces. JSON has them between tokens only, and in an event each would start a new
    field."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


def pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def opens(members: Members, name: str, sign: bytes) -> bool:
    """Whether there is a member of that name whose value starts with `sign`, that is, has this JSON type."""
    return name in members and bytes(members[name]).startswith(sign)
