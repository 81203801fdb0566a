"""The API of OpenAI and compatible providers: chat completions, Responses, embeddings, completions, batches of each."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import msgspec

from carpool.core.errors import MalformedResponse, Misuse
from carpool.core.model import Headers, Usage
from carpool.core.ports import Ask, BatchReport, Parsed, RawRequest, Refusal, ResultLine, UsageTap
from carpool.dialects import json_object, rate_limits
from carpool.dialects.event_stream import one_line
from carpool.dialects.openai import errors, replay, usage
from carpool.dialects.openai.caching import SteeredCacheEdits
from carpool.dialects.openai.parse import (
    PAYERS,
    SUBAGENT,
    claim,
    completed,
    endpoint_of,
    handles,
    parse,
    prompt_chain,
    secret,
)
from carpool.dialects.openai.providers import (
    COMPATIBLE_PROVIDERS,
    DAY,
    HOUR,
    OPENAI,
    RESPONSES,
    CompatibleProvider,
    compatible_provider,
)
from carpool.dialects.openai.results import XaiResultPages, result_line
from carpool.dialects.openai.shapes import NONCE_KEY, BatchShape, Shape, name_of, seconds
from carpool.dialects.openai.uploads import FILES, OpenAIUploads
from carpool.dialects.openai.webhooks import StandardWebhooks
from carpool.dialects.provider_api import JSON, RestDialect, checked_custom_id, checked_id, decode

__all__ = ["COMPATIBLE_PROVIDERS", "CompatibleProvider", "OpenAI", "compatible_provider"]

_RESULTS_PAGE = 250  # results per page; a page is kept in memory
_RUNNING = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_ENDED = frozenset({"failed", "completed", "expired", "cancelled"})

_NULL = msgspec.Raw(b"null")
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str | None)
_FLAG = msgspec.json.Decoder(bool | None)
_decoder = lru_cache(maxsize=32)(msgspec.json.Decoder)


class ServiceTier:
    """`ports.FlexTier`: a member of the body."""

    def requested(self, body: bytes) -> bytes:
        return json_object.read(body).having("service_tier", b'"flex"')


class OpenAI(RestDialect):
    """`ports.Dialect` for OpenAI's API, with the differences of a compatible provider."""

    name = "openai"
    shows_nonces = True
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

    flex = ServiceTier()
    uploads: OpenAIUploads

    def __init__(self, provider: CompatibleProvider = OPENAI) -> None:
        self.provider = provider
        self.vendor, self.home, self.key_headers = provider.name, provider.home, provider.key_headers
        self.seller, self.query, self.limits = provider.seller, provider.query, provider.limits
        self.models, self.pricing = provider.models, provider.pricing
        self.own_headers, self.batches_path, self.cancel_suffix = provider.headers, provider.batches, provider.cancel
        self.caching = SteeredCacheEdits() if provider is OPENAI else None
        self.uploads = OpenAIUploads(provider)
        self.upload_names = self.uploads if provider.nonce_in_file_name else None
        self.result_pages = XaiResultPages() if provider.pages_results else None
        self.webhooks = StandardWebhooks() if provider.hooks else None

    # ------------------------------------------------------------ from clients

    claim = staticmethod(claim)
    endpoint_of = staticmethod(endpoint_of)
    completed = staticmethod(completed)
    handles = staticmethod(handles)
    secret = staticmethod(secret)
    prompt_chain = staticmethod(prompt_chain)

    def parse(self, raw: RawRequest) -> Parsed:
        return parse(raw, self.provider)

    # ------------------------------------------------------------ calls

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        """A call as one line. JSON has line breaks between tokens only, so spaces can replace them."""
        way = b"" if self.provider.plain_lines else b'"method":"POST","url":"%b",' % endpoint.encode()
        return b'{"custom_id":"%b",%b"body":' % (checked_custom_id(custom_id), way) + one_line(body) + b"}"

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return self.uploads.frame(nonce)

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
        return self.ask("POST", self.provider.batches, headers, JSON, body=msgspec.json.encode(body))

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        paging = self.provider.paging
        # With page numbers, all pages must have the same size.
        size = paging.most if paging.next == "page" else min(max(limit, 1), paging.most)
        query = [f"{paging.limit}={size}"] if paging.limit else []
        query += [paging.more] if paging.more else []
        query += [f"{paging.cursor}={quote(after, safe='')}"] if after and paging.cursor else []
        return self.ask("GET", self.provider.batches + ("?" if query else "") + "&".join(query), headers)

    # ------------------------------------------------------------ from the provider

    allowances = staticmethod(rate_limits.openai)

    def report(self, body: bytes) -> BatchReport:
        wrapped, what = self.provider.wrapped, "The provider's description of a batch"
        if wrapped is not None and wrapped in (members := decode(_MEMBERS, body, what)):  # after a create only
            body = bytes(members[wrapped])
        shape: Shape = decode(_decoder(self.provider.shape), body, what)
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
        except (KeyError, ValueError, RecursionError) as error:
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
        files = [checked_id(name) for name in (batch.output_file_id, batch.error_file_id) if name]
        paged = self.result_pages is not None
        if ended and not files and not paged and state == "completed" and done:
            ended = False  # the batch has results but does not name their files yet
        uploaded = batch.source()
        source = checked_id(uploaded) if uploaded else None
        places = [f"{FILES}/{name}/content" for name in files]
        if paged:
            places = [f"{self.provider.batches}/{checked_id(batch.id)}/results?limit={_RESULTS_PAGE}"]
        return BatchReport(
            provider_id=checked_id(batch.id),
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
    stream_options = staticmethod(replay.stream_options)
    stream_error = staticmethod(replay.stream_error)

    def replay(self, body: bytes, stream_options: str = "") -> Iterator[bytes]:
        return replay.replay(body, stream_options == replay.USAGE, self.provider.whole_calls, self.provider.closing)
