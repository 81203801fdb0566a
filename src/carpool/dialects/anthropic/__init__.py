"""The Claude API: Messages and Message Batches."""

from __future__ import annotations

from collections.abc import Iterator

from carpool.core.errors import Misuse
from carpool.core.model import Headers, Usage
from carpool.core.ports import (
    Allowances,
    Ask,
    BatchLimits,
    BatchReport,
    Parsed,
    RawRequest,
    Refusal,
    ResultLine,
    UsageTap,
    WebhookEvent,
)
from carpool.dialects import rate_limits
from carpool.dialects.anthropic import batches, errors, replay, usage
from carpool.dialects.anthropic.parse import KEY_HEADERS, SECRETS, handles, key_header, parse

__all__ = ["Anthropic"]


class Anthropic:
    """`ports.Dialect` for the Claude API."""

    name = seller = "anthropic"
    query = ""
    limits = BatchLimits(max_count=100_000, max_bytes=256_000_000, window=24 * 3600.0, retention=29 * 24 * 3600.0)
    mixes_models = True
    tells_nonces = False
    pages_results = False
    key_headers = KEY_HEADERS

    # from clients
    def handles(self, method: str, path: str) -> bool:
        return handles(method, path)

    def parse(self, raw: RawRequest) -> Parsed:
        return parse(raw)

    def secret(self, headers: Headers) -> Headers:
        return tuple(pair for pair in headers if pair[0] in SECRETS)

    def key_header(self, headers: Headers) -> str:
        return key_header(headers)

    def estimate_tokens(self, body: bytes) -> int:
        return (len(body) + 3) // 4

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return batches.send(endpoint, headers, body)

    def flexed(self, body: bytes) -> bytes:
        raise Misuse("There is no lane flex here.")

    def line_overhead(self, endpoint: str) -> int:
        return batches.LINE_OVERHEAD

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        return batches.line(custom_id, body)

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return batches.FRAME

    def upload(self, headers: Headers, nonce: str) -> Ask | None:
        return None

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        return batches.create(headers)

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        return batches.listing(headers, after, limit)

    def naming(self, headers: Headers) -> Ask | None:
        return None

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return batches.retrieve(headers, provider_id)

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return batches.cancel(headers, provider_id)

    def results_at(self, provider_id: str) -> tuple[str, ...] | None:
        return (batches.results_path(provider_id),)

    def results(self, headers: Headers, place: str) -> Ask:
        return batches.results(headers, place)

    def forget(self, headers: Headers, file_id: str) -> Ask | None:
        return None

    # from the provider
    def uploaded(self, body: bytes) -> str:
        raise Misuse("The lines of a batch travel with its create here: nothing is uploaded before.")

    def report(self, body: bytes) -> BatchReport:
        return batches.report(body)

    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        return batches.page(body)

    def nonces(self, body: bytes) -> dict[str, str]:
        raise Misuse("Nothing is uploaded here, so that nothing has a name.")

    def result_page(self, place: str, body: bytes) -> tuple[list[bytes], str | None]:
        raise Misuse("Results come in lines here.")

    def result_line(self, line: bytes) -> ResultLine:
        return batches.result_line(line)

    def usage(self, body: bytes) -> Usage | None:
        return usage.of_message(body)

    def usage_tap(self) -> UsageTap:
        return usage.tap()

    def news(self, secret: str, headers: Headers, body: bytes, now: float) -> WebhookEvent:
        raise Misuse("There are no webhooks here.")

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal:
        return errors.refusal(status, headers, body)

    def requests_per_minute(self, headers: Headers) -> int | None:
        return errors.requests_per_minute(headers)

    def allowances(self, headers: Headers) -> Allowances | None:
        return rate_limits.anthropic(headers)

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes:
        return errors.error(status, code, message)

    def wish(self, body: bytes) -> str:
        return ""

    def replay(self, body: bytes, wish: str = "") -> Iterator[bytes]:
        return replay.replay(body)

    def stream_error(self, body: bytes) -> bytes:
        return replay.stream_error(body)

    def keep_alive(self) -> bytes:
        return replay.PING
