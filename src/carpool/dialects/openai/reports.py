"""Parse what OpenAI-compatible providers return about files and batches."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from carpool.core.errors import Garbled
from carpool.core.ports import BatchReport
from carpool.dialects.openai import errors
from carpool.dialects.openai.providers import CompatibleProvider
from carpool.dialects.openai.shapes import Shape, Told, nonce_of

FILES = "/v1/files"
RESULTS_PAGE = 250  # results per page; a page is kept in memory

_ID = re.compile(r"[a-zA-Z0-9_:.-]{1,200}")  # nothing that could change a path
_DOTS = re.compile(r"\.+")
_RUNNING = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
_UNREADABLE = (ValueError, RecursionError)


class _File(msgspec.Struct):
    id: str
    filename: str = ""


class _Files(msgspec.Struct):
    data: list[_File]


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FILE = msgspec.json.Decoder(_File)
_FILES = msgspec.json.Decoder(_Files)
_TEXT = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)


@lru_cache(maxsize=32)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and not _DOTS.fullmatch(name)


def uploaded(body: bytes) -> str:
    try:
        name = _FILE.decode(body).id
    except _UNREADABLE as error:
        raise Garbled(f"The provider's answer to an upload can't be understood: {error}.") from None
    return _checked_id(name)


def nonces(body: bytes) -> dict[str, str]:
    """The nonces in a list of uploads, by file id: those of files with carpool's naming scheme."""
    try:
        files = _FILES.decode(body).data
    except _UNREADABLE as error:
        raise Garbled(f"The provider's list of files can't be understood: {error}.") from None
    return {file.id: nonce for file in files if (nonce := nonce_of(file.filename))}


def report(provider: CompatibleProvider, body: bytes) -> BatchReport:
    try:
        members = _MEMBERS.decode(body)
        if provider.wrapped is not None and provider.wrapped in members:  # in responses to a create only
            body = bytes(members[provider.wrapped])
        told: Shape = _decoder(provider.shape).decode(body)
    except _UNREADABLE as error:
        raise Garbled(f"The provider's description of a batch can't be understood: {error}.") from None
    return _report(provider, told.told())


def page(provider: CompatibleProvider, body: bytes, after: str | None) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be parsed fails the whole page: skipping it could hide a batch that is ours."""
    items = provider.paging.items
    try:
        members = {} if items is None else _MEMBERS.decode(body)
        listed: list[Shape] = _decoder(list[provider.shape]).decode(body if items is None else members[items])  # type: ignore[name-defined]
        reports = [_report(provider, shape.told()) for shape in listed]
        return reports, _next(provider, members, reports, after) if reports else None
    except (KeyError, *_UNREADABLE) as error:
        raise Garbled(f"The provider's list of batches can't be understood: {error}.") from None


def _next(
    provider: CompatibleProvider, members: dict[str, msgspec.Raw], reports: list[BatchReport], after: str | None
) -> str | None:
    match provider.paging.next:
        case "last_id":
            more = "has_more" in members and _FLAG.decode(members["has_more"])
            named = _TEXT.decode(members["last_id"]) if "last_id" in members else None
            return (named or reports[-1].provider_id) if more else None
        case "pagination_token":
            return _TEXT.decode(members["pagination_token"]) or None if "pagination_token" in members else None
        case "page":
            return str(int(after or "0") + 1) if len(reports) >= provider.paging.most else None
    return None


def _report(provider: CompatibleProvider, told: Told) -> BatchReport:
    # An unknown state must neither end a running batch nor be polled forever.
    ended = told.status in _ENDED or (told.status not in _RUNNING and told.ended_at is not None)
    files = [_checked_id(name) for name in told.files]
    if ended and not files and not provider.pages_results and told.status == "completed" and told.done:
        ended = False  # the batch has results but does not name their files yet
    failed = told.status == "failed" and not files
    source = _checked_id(told.source) if told.source else None
    places = [f"{FILES}/{name}/content" for name in files]
    if provider.pages_results:
        places = [f"{provider.batches}/{_checked_id(told.id)}/results?limit={RESULTS_PAGE}"]
    return BatchReport(
        provider_id=_checked_id(told.id),
        ended=ended,
        cancelling=told.status == "cancelling",
        count=told.count,
        created_at=told.created_at,
        expires_at=told.expires_at,
        ended_at=told.ended_at,
        results=tuple(places) if ended else None,
        archived=False,
        nonce=told.nonce,
        failure=errors.failure(told.problems) if failed else None,
        files=(*((source,) if source else ()), *files),
        source=source,
    )


def _checked_id(name: str) -> str:
    if not is_id(name):
        raise Garbled(f"The provider named something {name[:80]!r}, which can't be an id.")
    return name
