"""OpenAI's API: chat completions, Responses, embeddings, completions, and batches of each."""

from __future__ import annotations

from collections.abc import Iterator

from carpool.dialects import faithful, limiting
from carpool.dialects.openai import batches, errors, hooks, replay, results, usage
from carpool.dialects.openai.headers import secret
from carpool.dialects.openai.parse import handles, parse
from carpool.model import Headers, Usage
from carpool.ports import Allowances, Ask, BatchReport, Limits, News, Parsed, RawRequest, Refusal, ResultLine, UsageTap

__all__ = ["OpenAI"]

_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")


class OpenAI:
    """`ports.Dialect` for OpenAI's API."""

    name = "openai"
    limits = Limits(max_count=50_000, max_bytes=200_000_000, window=24 * 3600.0, retention=30 * 24 * 3600.0)
    mixes_models = False
    tells_nonces = True

    # from clients
    def handles(self, method: str, path: str) -> bool:
        return handles(method, path)

    def parse(self, raw: RawRequest) -> Parsed:
        return parse(raw)

    def secret(self, headers: Headers) -> Headers:
        return secret(headers)

    def estimate_tokens(self, body: bytes) -> int:
        return (len(body) + 3) // 4

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return Ask("POST", endpoint, (*headers, _JSON, _IDENTITY), body)

    def flexed(self, body: bytes) -> bytes:
        return faithful.read(body).having("service_tier", b'"flex"')

    def line_overhead(self, endpoint: str) -> int:
        return batches.line_overhead(endpoint)

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        return batches.line(endpoint, custom_id, body)

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return batches.frame(nonce)

    def upload(self, headers: Headers, nonce: str) -> Ask | None:
        return batches.upload(headers, nonce)

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None) -> Ask:
        return batches.create(headers, endpoint, nonce, file_id)

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        return batches.listing(headers, after, limit)

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return batches.retrieve(headers, provider_id)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return batches.cancel(headers, provider_id)

    def results_at(self, provider_id: str) -> tuple[str, ...] | None:
        return None  # files have ids of their own

    def results(self, headers: Headers, place: str) -> Ask:
        return batches.results(headers, place)

    def forget(self, headers: Headers, file_id: str) -> Ask | None:
        return batches.forget(headers, file_id)

    # from the provider
    def uploaded(self, body: bytes) -> str:
        return batches.uploaded(body)

    def report(self, body: bytes) -> BatchReport:
        return batches.report(body)

    def page(self, body: bytes) -> tuple[list[BatchReport], str | None]:
        return batches.page(body)

    def result_line(self, line: bytes) -> ResultLine:
        return results.result_line(line)

    def usage(self, body: bytes) -> Usage | None:
        return usage.of_answer(body)

    def usage_tap(self) -> UsageTap:
        return usage.tap()

    def news(self, secret: str, headers: Headers, body: bytes, now: float) -> News:
        return hooks.news(secret, headers, body, now)

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal:
        return errors.refusal(status, headers, body)

    def requests_per_minute(self, headers: Headers) -> int | None:
        return None  # its headers speak of synchronous calls only

    def allowances(self, headers: Headers) -> Allowances | None:
        return limiting.openai(headers)

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes:
        return errors.error(status, code, message)

    def wish(self, body: bytes) -> str:
        return replay.wish(body)

    def replay(self, body: bytes, wish: str = "") -> Iterator[bytes]:
        return replay.replay(body, include_usage=wish == replay.USAGE)

    def stream_error(self, body: bytes) -> bytes:
        return replay.stream_error(body)

    def keep_alive(self) -> bytes:
        return replay.KEEP_ALIVE
