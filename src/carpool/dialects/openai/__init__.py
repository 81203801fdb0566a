"""The API of OpenAI and compatible providers: chat completions, Responses, embeddings, completions, batches of each."""

from __future__ import annotations

from collections.abc import Iterator

from carpool.core.model import Headers, Usage
from carpool.core.ports import (
    Allowances,
    Ask,
    BatchReport,
    Parsed,
    RawRequest,
    Refusal,
    ResultLine,
    UsageTap,
    WebhookEvent,
)
from carpool.dialects import json_object, rate_limits
from carpool.dialects.openai import errors, replay, reports, results, usage, webhooks
from carpool.dialects.openai.batches import Batches
from carpool.dialects.openai.parse import handles, parse, secret
from carpool.dialects.openai.providers import COMPATIBLE_PROVIDERS, OPENAI, CompatibleProvider, recognised

__all__ = ["COMPATIBLE_PROVIDERS", "CompatibleProvider", "OpenAI", "recognised"]

_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")


class OpenAI:
    """`ports.Dialect` for OpenAI's API, with the differences of a compatible provider."""

    name = "openai"
    mixes_models = False
    tells_nonces = True

    def __init__(self, provider: CompatibleProvider = OPENAI) -> None:
        self.provider = provider
        self.seller = provider.seller
        self.query = provider.query
        self.limits = provider.limits
        self.pages_results = provider.pages_results
        self.key_headers = provider.key_headers
        self._batches = Batches(provider)

    # from clients
    def handles(self, method: str, path: str) -> bool:
        return handles(method, path)

    def parse(self, raw: RawRequest) -> Parsed:
        return parse(raw, self.provider)

    def secret(self, headers: Headers) -> Headers:
        return secret(headers)

    def key_header(self, headers: Headers) -> str:
        return self.key_headers[0]

    def estimate_tokens(self, body: bytes) -> int:
        return (len(body) + 3) // 4

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return Ask("POST", endpoint, (*headers, *self.provider.headers, _JSON, _IDENTITY), body)

    def flexed(self, body: bytes) -> bytes:
        return json_object.read(body).having("service_tier", b'"flex"')

    def line_overhead(self, endpoint: str) -> int:
        return self._batches.line_overhead(endpoint)

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        return self._batches.line(endpoint, custom_id, body)

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return self._batches.frame(nonce)

    def upload(self, headers: Headers, nonce: str) -> Ask | None:
        return self._batches.upload(headers, nonce)

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        return self._batches.create(headers, endpoint, nonce, file_id, model)

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        return self._batches.listing(headers, after, limit)

    def naming(self, headers: Headers) -> Ask | None:
        return self._batches.naming(headers)

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return self._batches.retrieve(headers, provider_id)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return self._batches.cancel(headers, provider_id)

    def results_at(self, provider_id: str) -> tuple[str, ...] | None:
        return None  # results are in files with their own ids

    def results(self, headers: Headers, place: str) -> Ask:
        return self._batches.results(headers, place)

    def forget(self, headers: Headers, file_id: str) -> Ask | None:
        return self._batches.forget(headers, file_id)

    # from the provider
    def uploaded(self, body: bytes) -> str:
        return reports.uploaded(body)

    def report(self, body: bytes) -> BatchReport:
        return reports.report(self.provider, body)

    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        return reports.page(self.provider, body, after)

    def nonces(self, body: bytes) -> dict[str, str]:
        return reports.nonces(body)

    def result_page(self, place: str, body: bytes) -> tuple[list[bytes], str | None]:
        return results.result_page(place, body)

    def result_line(self, line: bytes) -> ResultLine:
        return results.result_line(self.provider, line)

    def usage(self, body: bytes) -> Usage | None:
        return usage.of_answer(body, self.provider.reasoning_apart)

    def usage_tap(self) -> UsageTap:
        return usage.tap(self.provider.reasoning_apart)

    def news(self, secret: str, headers: Headers, body: bytes, now: float) -> WebhookEvent:
        return webhooks.news(secret, headers, body, now)

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal:
        return errors.refusal(self.provider, status, headers, body)

    def requests_per_minute(self, headers: Headers) -> int | None:
        return None  # its headers are about synchronous calls only

    def allowances(self, headers: Headers) -> Allowances | None:
        return rate_limits.openai(headers)

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes:
        return errors.error(status, code, message)

    def wish(self, body: bytes) -> str:
        return replay.wish(body)

    def replay(self, body: bytes, wish: str = "") -> Iterator[bytes]:
        return replay.replay(body, wish == replay.USAGE, self.provider.whole_calls, self.provider.closing)

    def stream_error(self, body: bytes) -> bytes:
        return replay.stream_error(body)

    def keep_alive(self) -> bytes:
        return replay.KEEP_ALIVE
