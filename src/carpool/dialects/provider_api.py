"""What requests to all providers' APIs, and reading their responses, have in common."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Final, TypeVar

from msgspec import Meta, Raw
from msgspec.json import Decoder

from carpool.core.errors import MalformedResponse, Misuse
from carpool.core.model import Headers
from carpool.core.ports import Ask, Dialect, Refusal
from carpool.dialects.headers import provider_wants_retry, retry_after

T = TypeVar("T")

IDENTITY: Final = ("accept-encoding", "identity")
JSON: Final = ("content-type", "application/json")

# A count out of this range is invalid: the usage is then unknown, not guessed.
Count = Annotated[int, Meta(ge=0, le=2**53)]

_UNREADABLE = (ValueError, RecursionError)
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID = re.compile(r"(?!\.+\Z)[a-zA-Z0-9_:.-]{1,200}")  # nothing that could change a path


def decode(decoder: Decoder[T], body: bytes | Raw, what: str) -> T:
    """Decodes a provider's words. Raises `MalformedResponse`, which names `what` they should be."""
    try:
        return decoder.decode(body)
    except _UNREADABLE as error:
        raise MalformedResponse(f"{what} can't be understood: {error}.") from None


def decode_or_none(decoder: Decoder[T], body: bytes | Raw) -> T | None:
    """Decodes what may have another format, or none."""
    try:
        return decoder.decode(body)
    except _UNREADABLE:
        return None


def checked_custom_id(name: str) -> bytes:
    if not _CUSTOM_ID.fullmatch(name):
        raise Misuse(f"{name[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
    return name.encode()


def path_of(under: str, name: str) -> str:
    """The path of a batch or a file."""
    if not _ID.fullmatch(name):
        raise Misuse(f"{name[:80]!r} can't be the id of a batch or a file.")
    return f"{under}/{name}"


def checked_id(name: str) -> str:
    """An id that the provider stated, if it is a valid one."""
    if not _ID.fullmatch(name):
        raise MalformedResponse(f"The provider named something {name[:80]!r}, which can't be an id.")
    return name


def moment(text: str) -> float:
    """The seconds of an ISO 8601 time; in UTC if it names no zone."""
    try:
        time = datetime.fromisoformat(text.upper())
    except ValueError:
        raise MalformedResponse(f"The provider wrote {text[:40]!r} where a time should be.") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# ------------------------------------------------------------ requests


class RestDialect(Dialect):
    """A dialect whose batches are resources below one path."""

    batches_path: str
    cancel_suffix: str = "/cancel"
    own_headers: Headers = ()  # on carpool's own requests

    def ask(self, method: str, path: str, headers: Headers, *more: tuple[str, str], body: bytes = b"") -> Ask:
        return Ask(method, path, (*headers, *self.own_headers, *more, IDENTITY), body)

    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return self.ask("POST", endpoint, headers, JSON, body=body)

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return self.ask("GET", path_of(self.batches_path, provider_id), headers)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return self.ask("POST", path_of(self.batches_path, provider_id) + self.cancel_suffix, headers)

    def results(self, headers: Headers, place: str) -> Ask:
        return self.ask("GET", place, headers)


# ------------------------------------------------------------ refusals
# The meaning of a refusal that is common to all providers. They differ in how they report spent credit.

_LATER = frozenset({408, 409, 429})
_LONGEST = 1000


def refused(status: int, headers: Headers, message: str, *, no_credit: bool) -> Refusal:
    """`no_credit`: the account has no credit left, so the same request can't succeed later."""
    should_retry = provider_wants_retry(headers)
    temporary = status in _LATER or status >= 500 if should_retry is None else should_retry
    return Refusal(
        status=status,
        message=message[:_LONGEST] or f"The provider answered {status}.",
        retryable=temporary and not no_credit,
        retry_after=retry_after(headers),
        cannot_batch=status in (401, 403, 404),
        too_large=status == 413,
    )
