"""A finished answer of any endpoint told again as a stream."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from carpool.dialects.openai import chat, errors, responses
from carpool.dialects.openai.frames import MEMBERS, one_line, text_of
from carpool.errors import Garbled

# The SDKs pass over comments. Codex does not count them as life: see `early.EarlyResponse`.
KEEP_ALIVE = b": still working on it\n\n"
USAGE = "usage"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Wishes(msgspec.Struct):
    stream_options: _StreamOptions | None = None


_WISHES = msgspec.json.Decoder(_Wishes)


def wish(body: bytes) -> str:
    """Whether the client of this request asked for the usage at the end of its stream."""
    if b"include_usage" not in body:
        return ""
    try:
        options = _WISHES.decode(body).stream_options
    except (ValueError, RecursionError):
        return ""
    return USAGE if options is not None and options.include_usage else ""


def replay(
    body: bytes, include_usage: bool = False, whole_calls: bool = False, closing: tuple[str, ...] = ()
) -> Iterator[bytes]:
    """Reads the whole answer before the first event, so that trouble is known while a status can still say so."""
    try:
        body.decode()
        flat = one_line(body)
        kind = text_of(MEMBERS.decode(flat), "object")
        if kind == "response":
            return iter(list(responses.sequence(flat)))
        if kind in ("chat.completion", "text_completion"):
            return iter(list(chat.chunks(flat, include_usage, whole_calls, closing)))
    except (KeyError, ValueError, RecursionError) as error:
        raise Garbled(f"The provider's answer can't be told as a stream: {error}.") from None
    raise Garbled(f"An answer of the kind {kind[:40]!r} can't be told as a stream.")


def stream_error(body: bytes) -> bytes:
    """An event that makes the SDKs raise on either wire. What fits no error of the provider (a page from a gateway,
    say) is not shown to the client's parser."""
    if errors.read(body) is None:
        body = errors.error(502, "api_error", "The provider's answer could not be understood.")
    return b"event: error\ndata: %b\n\n" % one_line(body)
