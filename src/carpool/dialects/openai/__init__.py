"""The API of OpenAI and compatible providers: chat completions, Responses, embeddings, completions, batches of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from carpool.core.errors import MalformedResponse, Misuse
from carpool.core.model import NONCE_LETTERS, TICKET_LETTERS, Headers, Usage
from carpool.core.ports import Ask, BatchReport, Dialect, Parsed, RawRequest, Refusal, ResultLine, UsageTap
from carpool.dialects import json_object, rate_limits
from carpool.dialects.events import one_line
from carpool.dialects.openai import errors, replay, usage, webhooks
from carpool.dialects.openai.parse import PAYERS, SUBAGENT, claim, completed, handles, parse, secret
from carpool.dialects.openai.providers import (
    COMPATIBLE_PROVIDERS,
    DAY,
    HOUR,
    OPENAI,
    RESPONSES,
    CompatibleProvider,
    recognised,
)
from carpool.dialects.openai.results import result_line, result_page
from carpool.dialects.openai.shapes import NONCE_KEY, BatchShape, Shape, name_of, nonce_of, seconds

__all__ = ["COMPATIBLE_PROVIDERS", "CompatibleProvider", "OpenAI", "recognised"]

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")
_FIELD = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_RESULTS_PAGE = 250  # results per page; a page is kept in memory
_CONTENT = (
    b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: application/jsonl\r\n\r\n'
)
FILES = "/v1/files"
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


_NULL = msgspec.Raw(b"null")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FILE = msgspec.json.Decoder(_File)
_FILES = msgspec.json.Decoder(_Files)
_TEXT = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)
_decoder = lru_cache(maxsize=32)(msgspec.json.Decoder)


class OpenAI(Dialect):
    """`ports.Dialect` for OpenAI's API, with the differences of a compatible provider."""

    name = "openai"
    tells_nonces = True
    keep_alive = replay.KEEP_ALIVE
    key_variable, url_variable = "OPENAI_API_KEY", "OPENAI_BASE_URL"
    payer_headers = PAYERS
    subagent_headers = frozenset({SUBAGENT})
    upgrade_paths = frozenset({RESPONSES})
    open_paths = frozenset(
        {
            *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/moderations"),
            *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
            *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
            *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
        }
    )

    def __init__(self, provider: CompatibleProvider = OPENAI) -> None:
        self.provider = provider
        self.home = provider.home
        self.seller, self.query, self.limits = provider.seller, provider.query, provider.limits
        self.models, self.pricing = provider.models, provider.pricing
        self.pages_results, self.key_headers = provider.pages_results, provider.key_headers

    # ------------------------------------------------------------ from clients

    claim = staticmethod(claim)
    completed = staticmethod(completed)
    handles = staticmethod(handles)
    secret = staticmethod(secret)

    def parse(self, raw: RawRequest) -> Parsed:
        return parse(raw, self.provider)

    # ------------------------------------------------------------ calls

    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return self._ask("POST", endpoint, headers, (_JSON,), body)

    def flexed(self, body: bytes) -> bytes:
        return json_object.read(body).having("service_tier", b'"flex"')

    # ------------------------------------------------------------ lines

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        """A call as one line. JSON has line breaks between tokens only, so spaces can replace them."""
        if not _CUSTOM_ID.fullmatch(custom_id):
            raise Misuse(f"{custom_id[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
        way = b"" if self.provider.plain_lines else b'"method":"POST","url":"%b",' % endpoint.encode()
        return b'{"custom_id":"%b",%b"body":' % (custom_id.encode(), way) + one_line(body) + b"}"

    def line_overhead(self, endpoint: str) -> int:
        """Includes the line break: exact for carpool's own ids in all but the last line."""
        return len(self.line(endpoint, "x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"")) + 1

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        """The multipart form around the lines. Lines have no line breaks, so none can contain the form's boundary."""
        boundary, name = _boundary(nonce).encode(), f"{name_of(nonce)}.jsonl"
        fields = [*self.provider.form, *((("file_name", name),) if self.provider.names_file else ())]
        head = b"".join(_FIELD % (boundary, key.encode(), value.encode()) for key, value in fields)
        return head + _CONTENT % (boundary, name.encode()), b"\n", b"\n\r\n--%b--\r\n" % boundary

    def upload(self, headers: Headers, nonce: str) -> Ask:
        form = ("content-type", f"multipart/form-data; boundary={_boundary(nonce)}")
        return self._ask("POST", self.provider.uploads, headers, (form,))

    # ------------------------------------------------------------ batches

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        if file_id is None:
            raise Misuse("A batch needs an uploaded file here.")
        window = self.provider.limits.window
        days, rest = divmod(window, DAY)
        order: dict[str, Any] = {
            "file": file_id,
            "files": [file_id],
            "endpoint": endpoint,
            "model": model,
            "window": f"{days:.0f}d" if days > 1 and not rest else f"{window / HOUR:.0f}h",  # `24h`, but `3d`
            "hours": int(window // HOUR),
            "metadata": {NONCE_KEY: nonce},
            "name": name_of(nonce),
        }
        body = {name: order[what] for name, what in self.provider.create.items()}
        return self._ask("POST", self.provider.batches, headers, (_JSON,), msgspec.json.encode(body))

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        paging = self.provider.paging
        # With page numbers, all pages must have the same size.
        size = paging.most if paging.next == "page" else min(max(limit, 1), paging.most)
        query = [f"{paging.limit}={size}"] if paging.limit else []
        query += [paging.more] if paging.more else []
        query += [f"{paging.cursor}={quote(after, safe='')}"] if after and paging.cursor else []
        return self._ask("GET", self.provider.batches + ("?" if query else "") + "&".join(query), headers)

    def naming(self, headers: Headers) -> Ask | None:
        return self._ask("GET", FILES, headers) if self.provider.nonce_in_file_name else None

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return self._ask("GET", _path(self.provider.batches, provider_id), headers)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return self._ask("POST", _path(self.provider.batches, provider_id) + self.provider.cancel, headers)

    def results(self, headers: Headers, place: str) -> Ask:
        return self._ask("GET", place, headers)

    def forget(self, headers: Headers, file_id: str) -> Ask:
        return self._ask("DELETE", _path(FILES, file_id), headers)

    def _ask(self, method: str, path: str, headers: Headers, more: Headers = (), body: bytes = b"") -> Ask:
        return Ask(method, path, (*headers, *self.provider.headers, *more, _IDENTITY), body)

    # ------------------------------------------------------------ from the provider

    result_page = staticmethod(result_page)
    read_webhook = staticmethod(webhooks.read_webhook)
    allowances = staticmethod(rate_limits.openai)

    def uploaded(self, body: bytes) -> str:
        try:
            return _checked_id(_FILE.decode(body).id)
        except _UNREADABLE as error:
            raise MalformedResponse(f"The provider's answer to an upload can't be understood: {error}.") from None

    def nonces(self, body: bytes) -> dict[str, str]:
        try:
            files = _FILES.decode(body).data
        except _UNREADABLE as error:
            raise MalformedResponse(f"The provider's list of files can't be understood: {error}.") from None
        return {file.id: nonce for file in files if (nonce := nonce_of(file.filename))}

    def report(self, body: bytes) -> BatchReport:
        wrapped = self.provider.wrapped
        try:
            if wrapped is not None and wrapped in (members := _MEMBERS.decode(body)):  # in responses to a create only
                body = bytes(members[wrapped])
            shape: Shape = _decoder(self.provider.shape).decode(body)
        except _UNREADABLE as error:
            raise MalformedResponse(f"The provider's description of a batch can't be understood: {error}.") from None
        return self._report(shape.batch())

    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        """One batch that can't be parsed fails the whole page: skipping it could hide a batch that is ours."""
        paging = self.provider.paging
        try:
            members = {} if paging.items is None else _MEMBERS.decode(body)
            items = body if paging.items is None else members[paging.items]
            listed: list[Shape] = _decoder(list[self.provider.shape]).decode(items)  # type: ignore[name-defined]
            reports = [self._report(shape.batch()) for shape in listed]
            return reports, self._following(members, reports, after) if reports else None
        except (KeyError, *_UNREADABLE) as error:
            raise MalformedResponse(f"The provider's list of batches can't be understood: {error}.") from None

    def _following(self, members: dict[str, msgspec.Raw], reports: list[BatchReport], after: str | None) -> str | None:
        """The cursor of the next page."""
        paging = self.provider.paging
        if paging.next == "page":
            return str(int(after or "0") + 1) if len(reports) >= paging.most else None
        if paging.next == "pagination_token":
            return _TEXT.decode(members.get("pagination_token", _NULL)) or None
        more = paging.next == "last_id" and _FLAG.decode(members.get("has_more", _NULL))
        return _TEXT.decode(members.get("last_id", _NULL)) or reports[-1].provider_id if more else None

    def _report(self, batch: BatchShape) -> BatchReport:
        state, (count, done) = batch.state(), batch.counts()
        ended_at = seconds(batch.completed_at or batch.failed_at or batch.expired_at or batch.cancelled_at)
        # An unknown state must neither end a running batch nor be polled forever.
        ended = state in _ENDED or (state not in _RUNNING and ended_at is not None)
        files = [_checked_id(name) for name in (batch.output_file_id, batch.error_file_id) if name]
        paged = self.provider.pages_results
        if ended and not files and not paged and state == "completed" and done:
            ended = False  # the batch has results but does not name their files yet
        uploaded = batch.source()
        source = _checked_id(uploaded) if uploaded else None
        places = [f"{FILES}/{name}/content" for name in files]
        if paged:
            places = [f"{self.provider.batches}/{_checked_id(batch.id)}/results?limit={_RESULTS_PAGE}"]
        return BatchReport(
            provider_id=_checked_id(batch.id),
            ended=ended,
            cancelling=state == "cancelling",
            count=count,
            created_at=seconds(batch.created_at) or 0.0,
            expires_at=seconds(batch.expires_at),
            ended_at=ended_at,
            results=tuple(places) if ended else None,
            archived=False,
            nonce=batch.nonce(),
            failure=errors.failure(batch.problems()) if state == "failed" and not files else None,
            files=(*((source,) if source else ()), *files),
            source=source,
        )

    def result_line(self, line: bytes) -> ResultLine:
        return result_line(self.provider, line)

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal:
        return errors.refusal(self.provider, status, headers, body)

    def usage(self, body: bytes) -> Usage | None:
        return usage.of_answer(body, self.provider.reasoning_apart)

    def usage_tap(self) -> UsageTap:
        return usage.tap(self.provider.reasoning_apart)

    # ------------------------------------------------------------ to clients

    error = staticmethod(errors.error)
    wish = staticmethod(replay.wish)
    stream_error = staticmethod(replay.stream_error)

    def replay(self, body: bytes, wish: str = "") -> Iterator[bytes]:
        return replay.replay(body, wish == replay.USAGE, self.provider.whole_calls, self.provider.closing)


def _boundary(nonce: str) -> str:
    return f"carpool-form-{nonce}"


def _path(under: str, name: str) -> str:
    if not _is_id(name):
        raise Misuse(f"{name[:80]!r} can't be the id of a batch or a file.")
    return f"{under}/{name}"


def _is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and not _DOTS.fullmatch(name)


def _checked_id(name: str) -> str:
    if not _is_id(name):
        raise MalformedResponse(f"The provider named something {name[:80]!r}, which can't be an id.")
    return name
