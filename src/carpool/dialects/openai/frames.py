"""Pieces that both of OpenAI's streams are made of. What is not cut into deltas passes as the provider's own bytes."""

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


def one_line(body: bytes) -> bytes:
    """JSON has line breaks between tokens only; in an event each would begin a new field."""
    return body.replace(b"\r", b" ").replace(b"\n", b" ")


def data(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def opens(members: Members, name: str, sign: bytes) -> bool:
    """Whether there is a member of that name, and a value of the kind that begins so."""
    return name in members and bytes(members[name]).startswith(sign)


def text_of(members: Members, name: str) -> str:
    """The string of that name; empty where there is none."""
    return TEXT.decode(members[name]) if opens(members, name, b'"') else ""


def objects(members: Members, name: str) -> list[Members]:
    return LIST.decode(members[name]) if opens(members, name, b"[") else []
