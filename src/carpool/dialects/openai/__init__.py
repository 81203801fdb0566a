"""OpenAI's API: chat completions, Responses, embeddings, completions. Its batches are not spoken yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from carpool.dialects import limiting
from carpool.dialects.openai import errors, replay, usage
from carpool.dialects.openai.headers import secret
from carpool.dialects.openai.parse import CLOSED, handles, parse
from carpool.errors import Misuse
from carpool.model import Headers, Usage
from carpool.ports import Allowances, Ask, BatchReport, Limits, Parsed, RawRequest, Refusal, ResultLine, UsageTap

__all__ = ["OpenAI"]

_IDENTITY = ("accept-encoding", "identity")
_JSON = ("content-type", "application/json")


class OpenAI:
    """`ports.Dialect` for OpenAI's API.

    Every call is parsed as unbatchable, so nobody comes to ask for a batch; who does all the same is told so.
    """

    name = "openai"
    limits = Limits(max_count=50_000, max_bytes=200_000_000, window=24 * 3600.0, retention=30 * 24 * 3600.0)

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

    def line_overhead(self) -> int:
        _closed()

    def line(self, custom_id: str, body: bytes) -> bytes:
        _closed()

    def create(self, headers: Headers) -> Ask:
        _closed()

    def create_frame(self) -> tuple[bytes, bytes, bytes]:
        _closed()

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        _closed()

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        _closed()

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        _closed()

    def results(self, headers: Headers, provider_id: str) -> Ask:
        _closed()

    # from the provider
    def report(self, body: bytes) -> BatchReport:
        _closed()

    def page(self, body: bytes) -> tuple[list[BatchReport], str | None]:
        _closed()

    def result_line(self, line: bytes) -> ResultLine:
        _closed()

    def usage(self, body: bytes) -> Usage | None:
        return usage.of_answer(body)

    def usage_tap(self) -> UsageTap:
        return usage.tap()

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


def _closed() -> NoReturn:
    raise Misuse(f"{CLOSED} Send this call on the lane now.")
