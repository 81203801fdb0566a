"""The Claude API: Messages and Message Batches."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from carpool.core.model import Headers
from carpool.core.ports import Ask, BatchLimits, Capability
from carpool.dialects import rate_limits
from carpool.dialects.anthropic import responses
from carpool.dialects.anthropic.caching import MessagesCacheEdits
from carpool.dialects.anthropic.errors import error, refusal
from carpool.dialects.anthropic.parse import (
    ENDPOINT,
    KEY_HEADERS,
    claim,
    endpoint_of,
    handles,
    key_header,
    parse,
    prompt_chain,
    secret,
)
from carpool.dialects.anthropic.replay import PING, replay, stream_error
from carpool.dialects.anthropic.responses import BATCHES
from carpool.dialects.provider_api import JSON, RestDialect, checked_custom_id

__all__ = ["Anthropic"]

_CLAUDE = Capability(context_tokens=1_000_000, output_tokens=128_000, cacheable_tokens=512)
_SMALLER = replace(_CLAUDE, context_tokens=200_000, output_tokens=64_000)
_MODELS = (
    ("claude-mythos-preview*", replace(_CLAUDE, batch=False, cacheable_tokens=2048)),
    ("claude-opus-4-5*", replace(_SMALLER, cacheable_tokens=4096)),
    ("claude-opus-4-6*", replace(_CLAUDE, cacheable_tokens=4096)),
    ("claude-opus-4-7*", replace(_CLAUDE, cacheable_tokens=2048)),
    ("claude-opus-4-8*", replace(_CLAUDE, cacheable_tokens=1024)),
    ("claude-sonnet-4-5*", replace(_SMALLER, cacheable_tokens=1024)),
    ("claude-sonnet-4-6*", replace(_CLAUDE, cacheable_tokens=1024)),
    ("claude-sonnet-5-5*", _CLAUDE),
    ("claude-sonnet-5*", replace(_CLAUDE, cacheable_tokens=1024)),
    ("claude-haiku-4-5*", replace(_SMALLER, cacheable_tokens=4096)),
    ("claude-*-5*", _CLAUDE),
)


class Anthropic(RestDialect):
    """`ports.Dialect` for the Claude API."""

    name = seller = "anthropic"
    models = _MODELS
    limits = BatchLimits(max_count=100_000, max_bytes=256_000_000, window=24 * 3600.0, retention=29 * 24 * 3600.0)
    key_headers = KEY_HEADERS
    batches_path = BATCHES
    mixes_models = True
    keep_alive = PING
    home, key_variable, url_variable = "https://api.anthropic.com", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"
    free_paths = frozenset({"/v1/messages/count_tokens"})
    subagent_headers = frozenset({"x-claude-code-agent-id", "x-claude-code-parent-agent-id"})
    usual_headers = (("anthropic-version", "2023-06-01"),)
    caching = MessagesCacheEdits()
    open_paths = free_paths | {ENDPOINT, "/v1/complete"}

    # from clients
    claim = staticmethod(claim)
    endpoint_of = staticmethod(endpoint_of)
    handles = staticmethod(handles)
    parse = staticmethod(parse)
    prompt_chain = staticmethod(prompt_chain)
    secret = staticmethod(secret)
    key_header = staticmethod(key_header)

    # to the provider
    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        return b'{"custom_id":"%b","params":%b}' % (checked_custom_id(custom_id), body)

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return b'{"requests":[', b",", b"]}"

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        return self.ask("POST", BATCHES, headers, JSON)

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        cursor = f"&after_id={quote(after, safe='')}" if after else ""
        return self.ask("GET", f"{BATCHES}?limit={min(max(limit, 1), 1000)}{cursor}", headers)

    # from the provider
    results_at = staticmethod(responses.results_at)
    report = staticmethod(responses.report)
    page = staticmethod(responses.page)
    result_line = staticmethod(responses.result_line)
    usage = staticmethod(responses.of_message)
    usage_tap = staticmethod(responses.tap)
    surcharge = staticmethod(responses.surcharge)
    refusal = staticmethod(refusal)
    requests_per_minute = staticmethod(responses.requests_per_minute)
    allowances = staticmethod(rate_limits.anthropic)

    # to clients
    error = staticmethod(error)
    replay = staticmethod(replay)
    stream_error = staticmethod(stream_error)
