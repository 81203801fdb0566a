"""Requests to the files and batches endpoints of OpenAI-compatible providers."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import msgspec

from carpool.core.errors import Misuse
from carpool.core.model import NONCE_LETTERS, TICKET_LETTERS, Headers
from carpool.core.ports import Ask
from carpool.dialects.openai.providers import DAY, HOUR, CompatibleProvider
from carpool.dialects.openai.replay import one_line
from carpool.dialects.openai.reports import FILES, is_id
from carpool.dialects.openai.shapes import NONCE_KEY, name_of

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")
_FIELD = b'--%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_CONTENT = (
    b'--%b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: application/jsonl\r\n\r\n'
)


class Batches:
    """The requests to one provider."""

    def __init__(self, provider: CompatibleProvider) -> None:
        self._provider = provider

    # ------------------------------------------------------------ lines

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        """A call as one line. JSON has line breaks between tokens only, so spaces can replace them."""
        if not _CUSTOM_ID.fullmatch(custom_id):
            raise Misuse(f"{custom_id[:80]!r} can't name a call in a batch: 1 to 64 letters, digits, `_` and `-` can.")
        way = b"" if self._provider.plain_lines else b'"method":"POST","url":"%b",' % endpoint.encode()
        return b'{"custom_id":"%b",%b"body":' % (custom_id.encode(), way) + one_line(body) + b"}"

    def line_overhead(self, endpoint: str) -> int:
        """Includes the line break: exact for carpool's own ids in all but the last line."""
        return len(self.line(endpoint, "x" * (NONCE_LETTERS + 1 + TICKET_LETTERS), b"")) + 1

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        """The multipart form around the lines. Lines have no line breaks, so none can contain the form's boundary."""
        boundary, name = _boundary(nonce).encode(), file_name(nonce)
        fields = [*self._provider.form, *((("file_name", name),) if self._provider.names_file else ())]
        head = b"".join(_FIELD % (boundary, key.encode(), value.encode()) for key, value in fields)
        return head + _CONTENT % (boundary, name.encode()), b"\n", b"\n\r\n--%b--\r\n" % boundary

    def upload(self, headers: Headers, nonce: str) -> Ask:
        form = ("content-type", f"multipart/form-data; boundary={_boundary(nonce)}")
        return self._ask("POST", self._provider.uploads, headers, (form,))

    # ------------------------------------------------------------ batches

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str) -> Ask:
        if file_id is None:
            raise Misuse("A batch needs an uploaded file here.")
        hours = int(self._provider.limits.window // HOUR)
        order: dict[str, Any] = {
            "file": file_id,
            "files": [file_id],
            "endpoint": endpoint,
            "model": model,
            "window": window(self._provider.limits.window),
            "hours": hours,
            "metadata": {NONCE_KEY: nonce},
            "name": name_of(nonce),
        }
        body = {name: order[what] for name, what in self._provider.create.items()}
        return self._ask("POST", self._provider.batches, headers, (_JSON,), msgspec.json.encode(body))

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        paging = self._provider.paging
        # With page numbers, all pages must have the same size.
        size = paging.most if paging.next == "page" else min(max(limit, 1), paging.most)
        query = [f"{paging.limit}={size}"] if paging.limit else []
        query += [paging.more] if paging.more else []
        query += [f"{paging.cursor}={quote(after, safe='')}"] if after and paging.cursor else []
        return self._ask("GET", self._provider.batches + ("?" if query else "") + "&".join(query), headers)

    def naming(self, headers: Headers) -> Ask | None:
        return self._ask("GET", FILES, headers) if self._provider.nonce_in_file_name else None

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return self._ask("GET", _path(self._provider.batches, provider_id), headers)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return self._ask("POST", _path(self._provider.batches, provider_id) + self._provider.cancel, headers)

    def results(self, headers: Headers, place: str) -> Ask:
        return self._ask("GET", place, headers)

    def forget(self, headers: Headers, file_id: str) -> Ask:
        return self._ask("DELETE", _path(FILES, file_id), headers)

    def _ask(self, method: str, path: str, headers: Headers, more: Headers = (), body: bytes = b"") -> Ask:
        return Ask(method, path, (*headers, *self._provider.headers, *more, _IDENTITY), body)


def window(seconds: float) -> str:
    """`24h`, and `3d` for whole days beyond the first."""
    days, rest = divmod(seconds, DAY)
    return f"{days:.0f}d" if days > 1 and not rest else f"{seconds / HOUR:.0f}h"


def file_name(nonce: str) -> str:
    return f"{name_of(nonce)}.jsonl"


def _boundary(nonce: str) -> str:
    return f"carpool-form-{nonce}"


def _path(under: str, name: str) -> str:
    if not is_id(name):
        raise Misuse(f"{name[:80]!r} can't be the id of a batch or a file.")
    return f"{under}/{name}"
