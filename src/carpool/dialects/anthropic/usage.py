"""Read the token usage of finished messages, and of event streams while they are forwarded."""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from carpool.core.model import Lane, Usage
from carpool.core.ports import Seen
from carpool.dialects.event_stream import Tap
from carpool.dialects.provider_api import Count, decode_or_none


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

    def end(self, whole: bool) -> Seen:
        """A complete message ends with `message_stop`. Without it the counts are those of its start."""
        return Seen(self.usage(), whole or self._stopped or self._failed, self._stopped)

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
