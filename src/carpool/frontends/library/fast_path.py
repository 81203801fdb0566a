"""A fast path for submits that bypasses the SDK, with the same request and the same answer.

The SDK builds the first request of every kind, and the first answer. Both serve as the pattern for later calls of that
kind, which differ only in the values of the body. Calls that are not provably alike go through the SDK.
"""

from __future__ import annotations

import inspect
import json
import logging
import marshal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from msgspec.structs import replace

from carpool.core.errors import CarpoolError
from carpool.core.model import Headers
from carpool.core.ports import RawRequest
from carpool.engine import Reply
from carpool.planners.access.options import Options

MAX_KINDS = 256  # a caller with new headers on every call would gain nothing

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # with the SDK's settings
_BESIDE_THE_BODY = frozenset({"betas", "extra_headers"})
_LISTS = (list, tuple)
_IDS = {"_request_id": "request-id", "_workspace_id": "anthropic-workspace-id"}
_WARNING = "anthropic.resources.messages.messages"  # the module that lists the models to warn about
_SDK_LOG = logging.getLogger("anthropic._base_client")

Kind = tuple[object, ...]
Patterns = dict[Kind, "Pattern | None"]  # None for a kind whose calls the SDK changes
Settled = Reply | CarpoolError  # the SDK wraps an error as if it had occurred there


@dataclass(slots=True)
class Pattern:
    """The SDK's request and answer type for the first call of a kind."""

    raw: RawRequest  # without a body
    header_options: Options
    names: tuple[str, ...]  # the fields of the body, in the SDK's order
    answer: Any = None  # the type of the first answer
    ids: tuple[str, ...] = ()  # the attributes that the SDK sets from its headers


class Draft:
    """One call that may take the fast path. Without a pattern, it goes through the SDK and becomes the pattern."""

    __slots__ = ("_kind", "_params", "_patterns", "pattern", "raw")

    def __init__(self, patterns: Patterns, kind: Kind, params: Mapping[str, Any]) -> None:
        self._patterns, self._params, self.pattern = patterns, params, patterns.get(kind)
        self._kind = kind if self.pattern is None else ()  # not kept: thousands of calls may wait
        body = encoded(params, names_of(params) if self.pattern is None else self.pattern.names)
        self.raw = None if self.pattern is None else replace(self.pattern.raw, body=body)

    def options(self, given: Options) -> Options:
        return given if self.pattern is None else given.over(self.pattern.header_options)

    def learn_request(self, raw: RawRequest, header_options: Options) -> None:
        """Keeps the SDK's request as the pattern if the fast path would have sent the same bytes."""
        if self.pattern is not None:
            return
        with suppress(RecursionError):  # nested too deep for the parser at this stack depth
            names = tuple(json.loads(raw.body))
            if sorted(names) == sorted(names_of(self._params)) and encoded(self._params, names) == raw.body:
                headers = tuple(pair for pair in raw.headers if pair[0] != "content-length")
                self.pattern = Pattern(replace(raw, headers=headers, body=b""), header_options, names)
            self._patterns[self._kind] = self.pattern

    def learn_answer(self, message: Any) -> None:
        """Keeps the type of the SDK's first answer for later answers of this kind."""
        if self.pattern is None or self.pattern.answer is not None:
            return
        kind = type(message)
        if kind.__module__.startswith("anthropic.types.") and hasattr(kind, "model_validate_json"):
            ids = tuple(name for name in vars(message) if name.startswith("_"))
            if _IDS.keys() >= frozenset(ids):
                self.pattern.ids, self.pattern.answer = ids, kind

    def message(self, settled: Settled) -> Any:
        """The answer as the SDK would build it; None if the SDK must build it, as it must for errors."""
        pattern = self.pattern
        if pattern is None or pattern.answer is None or isinstance(settled, CarpoolError):
            return None
        outcome = settled.outcome
        if outcome.status != 200:
            return None
        try:
            message = pattern.answer.model_validate_json(outcome.body, strict=True)
        except ValueError:  # the SDK builds what it has no type for without validating it
            return None
        uncount_extras(message)
        for name in pattern.ids:
            setattr(message, name, _header(outcome.headers, _IDS[name]))
        return message


class FastPath:
    """The patterns of one client, and whether a call may use one."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._plain = is_plain(client)
        self._patterns: Patterns = {}

    def draft(self, params: Mapping[str, Any]) -> Draft | None:
        """None for a call that must go through the SDK."""
        if not (self._plain and self._unobserved() and _supported(params)):
            return None
        try:
            kind = self._kind(params)
            unknown = self._patterns.get(kind) is None
            if unknown and (kind in self._patterns or len(self._patterns) >= MAX_KINDS):
                return None
            return Draft(self._patterns, kind, params)
        except (TypeError, ValueError, RecursionError):  # not plain JSON: the SDK handles or refuses it
            return None

    def _kind(self, params: Any) -> Kind:
        """Everything that determines the request apart from the values of its body."""
        marshal.dumps(params)  # raises unless all types are built-in: the SDK may treat subclasses differently
        given = self._client._custom_headers  # noqa: SLF001  the public property is slower than everything else here
        extra, betas = params.get("extra_headers") or {}, params.get("betas", ())
        if type(extra) is not dict or type(betas) not in _LISTS:
            raise TypeError
        if not all(type(text) is str for text in (*given, *given.values(), *extra, *extra.values(), *betas)):
            raise TypeError
        return (tuple(params), tuple(given.items()), tuple(extra.items()), tuple(betas))

    def _unobserved(self) -> bool:
        """Whether nothing observes the SDK (patches, debug log, tracing), and its requests contain nothing variable."""
        client = self._client
        methods = (type(client.messages).create, type(client.beta.messages).create)
        return (
            all(map(_from_sdk, methods))
            and not client.default_query
            and not _SDK_LOG.isEnabledFor(logging.DEBUG)
            and _untraced(client)
        )


def is_plain(client: Any) -> bool:
    """Whether an SDK client is unmodified: nothing customised that affects single requests."""
    sdk = sys.modules.get("anthropic")
    parts = ("_custom_headers", "default_query", "messages", "beta", "api_key", "auth_token", "custom_auth", "timeout")
    return (
        type(client) in (getattr(sdk, "AsyncAnthropic", None), getattr(sdk, "Anthropic", None))
        and all(hasattr(client, part) for part in parts)
        and hasattr(sys.modules.get(_WARNING), "DEPRECATED_MODELS")
        and all(type(secret) in (str, type(None)) for secret in (client.api_key, client.auth_token))
        and client.custom_auth is None
        and client.timeout is None  # otherwise the SDK refuses long calls
        and not getattr(client, "_middleware", ())
        and getattr(client, "open_telemetry", {}).get("tracer_provider") is None
        and getattr(client, "_idempotency_header", "") is None
        and getattr(client, "_strict_response_validation", True) is False  # always False for copies of a client
        and all(_from_sdk(getattr(type(client), name, None)) for name in ("post", "request", "_build_request"))
        and all(_from_sdk(getattr(type(client), name, None)) for name in ("_prepare_options", "_prepare_request"))
    )


def _from_sdk(function: Any) -> bool:
    """Whether this is the SDK's own function, and not a patch."""
    return type(function) is FunctionType and function.__code__.co_filename.startswith(_sdk_directory())


@cache
def _sdk_directory() -> str:
    return str(Path(sys.modules["anthropic"].__file__ or "").parent)


def _untraced(client: Any) -> bool:
    """Whether the SDK creates no spans, and there is no current span to propagate."""
    if getattr(client, "_tracer", None) is None:
        return True
    trace = sys.modules["opentelemetry.trace"]  # a client with its own tracer provider is not plain
    return type(trace.get_tracer_provider()) is trace.ProxyTracerProvider and (
        trace.get_current_span() is trace.INVALID_SPAN
    )


def _supported(params: Mapping[str, Any]) -> bool:
    model = params.get("model")
    return (
        type(model) is str
        and model not in _models_with_warnings()
        and type(params.get("messages")) in _LISTS
        and type(params.get("tools", ())) in _LISTS
        and not params.get("stream")
    )


@cache
def _models_with_warnings() -> frozenset[str]:
    """Models for which the SDK emits a warning."""
    module = sys.modules[_WARNING]
    return frozenset((*module.DEPRECATED_MODELS, *getattr(module, "MODELS_TO_WARN_WITH_THINKING_ENABLED", ())))


def names_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in params if name not in _BESIDE_THE_BODY)


def encoded(params: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    return _ENCODER.encode({name: params[name] for name in names}).encode()


def _header(headers: Headers, name: str) -> str | None:
    values = [value for known, value in headers if known == name]
    return ", ".join(values) if values else None


def uncount_extras(model: Any) -> None:
    """Removes extra fields from `model_fields_set`: the SDK does not count them, because it does not validate."""
    if model.model_extra:
        model.model_fields_set.difference_update(model.model_extra)
    kind: Any = type(model)
    for name in _model_fields(kind):
        uncount_extras(getattr(model, name))


@cache
def _model_fields(kind: Any) -> tuple[str, ...]:
    kinds = {name: field.annotation for name, field in kind.model_fields.items()}
    return tuple(name for name, field in kinds.items() if inspect.isclass(field) and hasattr(field, "model_fields"))
