"""Read the responses of the Claude API: token usage, also of event streams while they are forwarded, batches and their
result lines."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from carpool.core.errors import MalformedResponse
from carpool.core.model import Headers, Lane, Usage
from carpool.core.ports import BatchReport, ResponseEnd, ResultLine
from carpool.dialects.anthropic import errors
from carpool.dialects.event_stream import Tap
from carpool.dialects.provider_api import Count, checked_id, decode, decode_or_none, moment, path_of

# ------------------------------------------------------------ usage


class _CacheCreation(msgspec.Struct, gc=False):
    ephemeral_5m_input_tokens: Count | None = None
    ephemeral_1h_input_tokens: Count | None = None


class _ServerTools(msgspec.Struct, gc=False):
    web_search_requests: Count | None = None


class WireUsage(msgspec.Struct, gc=False):
    """`usage` as the provider sends it; None means missing."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    cache_creation: _CacheCreation | None = None
    server_tool_use: _ServerTools | None = None
    inference_geo: str | None = None
    speed: str | None = None

    def override(self, later: WireUsage) -> None:
        """Counts are cumulative, so later values replace earlier ones; missing ones change nothing."""
        for field in self.__struct_fields__:
            if (value := getattr(later, field)) is not None:
                setattr(self, field, value)

    def words(self) -> Usage | None:
        """None while the input or the output count is missing: unknown is never zero."""
        if self.input_tokens is None or self.output_tokens is None:
            return None
        short, long = self._cache_writes()
        return Usage(
            self.input_tokens,
            self.output_tokens,
            self.cache_read_input_tokens or 0,
            short,
            long,
            (self.server_tool_use.web_search_requests or 0) if self.server_tool_use else 0,
            self.inference_geo,
            self.speed,
        )

    def _cache_writes(self) -> tuple[int, int]:
        """Cache writes for 5 minutes and for an hour; what the breakdown omits counts as 5 minutes, the default."""
        total = self.cache_creation_input_tokens or 0
        if self.cache_creation is None:
            return total, 0
        short = self.cache_creation.ephemeral_5m_input_tokens or 0
        long = self.cache_creation.ephemeral_1h_input_tokens or 0
        return max(short, total - long), long


class _Message(msgspec.Struct, gc=False):
    model: str = ""
    usage: WireUsage | None = None


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None  # of message_start
    usage: WireUsage | None = None  # of message_delta


_MESSAGE = msgspec.json.Decoder(_Message)
_EVENT = msgspec.json.Decoder(_Event)
_RELEVANT = re.compile(rb'"(?:message_start|message_delta|message_stop|error)"')


def of_message(body: bytes | msgspec.Raw) -> Usage | None:
    return model_and_usage(body)[1]


def model_and_usage(body: bytes | msgspec.Raw) -> tuple[str, Usage | None]:
    """The model and the usage of a message; empty and None if it can't be parsed."""
    message = decode_or_none(_MESSAGE, body) or _Message()
    return message.model, message.usage.words() if message.usage else None


class _Listener:
    """Combines the usage of a stream's events: counts are cumulative."""

    __slots__ = ("_failed", "_stopped", "_usage")

    def __init__(self) -> None:
        self._usage: WireUsage | None = None
        self._stopped = self._failed = False

    def usage(self) -> Usage | None:
        return self._usage.words() if self._usage else None

    def end(self, whole: bool) -> ResponseEnd:
        """A complete message ends with `message_stop`. Without it the counts are those of its start."""
        return ResponseEnd(self.usage(), whole or self._stopped or self._failed, self._stopped)

    def event(self, data: bytes) -> None:
        if _RELEVANT.search(data) is None:
            return
        event = decode_or_none(_EVENT, data)
        if event is None:
            return
        self._stopped |= event.type == "message_stop"
        self._failed |= event.type == "error"
        usage = event.message.usage if event.type == "message_start" and event.message else event.usage
        if event.type not in ("message_start", "message_delta") or usage is None:
            return
        if self._usage is None or event.type == "message_start":
            self._usage = usage
        else:
            self._usage.override(usage)


def tap() -> Tap:
    return Tap(_Listener(), of_message)


# ------------------------------------------------------------ surcharges
# They apply to tokens, not to fees.

_US_ONLY = Fraction(11, 10)
_US_ONLY_SINCE = (4, 6)
_FAST = Fraction(2)
_EVERYWHERE = (None, "", "global", "not_available")
_VERSION = re.compile(r"claude-[a-z]+-(\d{1,2})(?:[-.](\d{1,2}))?(?![\d.])")


def surcharge(model: str, lane: Lane, geo: str | None, speed: str | None) -> Fraction | None:
    factor = Fraction(1)
    if geo not in _EVERYWHERE:
        match = _VERSION.match(model)
        if geo != "us" or match is None:
            return None
        # `claude-opus-4-6` is (4, 6), `claude-sonnet-5-20260930` is (5, 0)
        if (int(match[1]), int(match[2] or 0)) >= _US_ONLY_SINCE:
            factor *= _US_ONLY
    if speed not in (None, "", "standard"):
        if speed != "fast" or lane is not Lane.NOW:
            return None
        factor *= _FAST
    return factor


# ------------------------------------------------------------ batches

BATCHES = "/v1/messages/batches"


def results_at(provider_id: str) -> tuple[str, ...]:
    """Built from the id: a URL from a response must not decide where a key is sent."""
    return (f"{path_of(BATCHES, provider_id)}/results",)


class _Batch(msgspec.Struct):
    id: str
    processing_status: str
    request_counts: dict[str, Count]
    created_at: str
    expires_at: str | None = None
    ended_at: str | None = None
    archived_at: str | None = None
    results_url: str | None = None


class _Page(msgspec.Struct):
    data: list[_Batch]
    has_more: bool = False
    last_id: str | None = None


_BATCH = msgspec.json.Decoder(_Batch)
_PAGE = msgspec.json.Decoder(_Page)


def requests_per_minute(headers: Headers) -> int | None:
    text = next((value.strip() for name, value in headers if name == "anthropic-ratelimit-requests-limit"), "")
    return int(text) or None if text.isascii() and text.isdigit() and len(text) < 10 else None


def report(body: bytes) -> BatchReport:
    return _report(decode(_BATCH, body, "The provider's description of a batch"))


def page(body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
    """One batch that can't be parsed fails the whole page: skipping it could hide a batch that is ours."""
    listed = decode(_PAGE, body, "The provider's list of batches")
    reports = [_report(batch) for batch in listed.data]
    if not listed.has_more or not reports:
        return reports, None
    return reports, listed.last_id or reports[-1].provider_id


def _report(batch: _Batch) -> BatchReport:
    return BatchReport(
        provider_id=checked_id(batch.id),
        # An unknown state must neither end a running batch nor be polled forever.
        ended=batch.processing_status == "ended"
        or (batch.processing_status not in ("in_progress", "canceling") and batch.ended_at is not None),
        cancelling=batch.processing_status == "canceling",
        count=sum(batch.request_counts.values()),
        created_at=moment(batch.created_at),
        expires_at=moment(batch.expires_at) if batch.expires_at else None,
        ended_at=moment(batch.ended_at) if batch.ended_at else None,
        results=results_at(batch.id) if batch.results_url else None,
        archived=batch.archived_at is not None,
    )


# ------------------------------------------------------------ result lines


class _Result(msgspec.Struct, gc=False):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    result: _Result


_LINE = msgspec.json.Decoder(_Line)
_EXPIRED = errors.error(504, "timeout_error", "The batch expired before this request was processed.")
_CANCELED = errors.error(409, "conflict_error", "The batch was canceled before this request was processed.")


def result_line(line: bytes) -> ResultLine:
    read = decode(_LINE, line, "A result line")
    result = read.result
    match result.type:
        case "succeeded":
            message = bytes(result.message)
            if not message.startswith(b"{"):
                raise MalformedResponse("A result line says that its call succeeded, but carries no message.")
            model, used = model_and_usage(message)
            return ResultLine(read.custom_id, "succeeded", 200, message, model, used, False)
        case "errored":
            error = errors.read(bytes(result.error))
            if error is None:
                raise MalformedResponse("A result line says that its call failed, but carries no error.")
            return ResultLine(read.custom_id, "errored", error.status, error.body, "", None, error.is_temporary)
        case "expired":
            return ResultLine(read.custom_id, "expired", 504, _EXPIRED, "", None, True)
        case "canceled":
            return ResultLine(read.custom_id, "canceled", 409, _CANCELED, "", None, True)
        case other:
            raise MalformedResponse(f"A result line is of the unknown type {other[:40]!r}.")
