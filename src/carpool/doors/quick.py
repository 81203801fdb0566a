"""The short way of a submit: past the SDK's machinery, to the same request and the same answer.

The SDK itself makes the first request of every kind, and the first answer; both serve as the pattern for the others,
of which only the body's values differ. Whatever is not provably alike goes through the SDK as before.
"""

from __future__ import annotations

import inspect
import json
import logging
import marshal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from msgspec.structs import replace

from carpool.doors.options import Options
from carpool.engine import Reply
from carpool.errors import CarpoolError
from carpool.model import Headers
from carpool.ports import RawRequest

MOST_KINDS = 256  # whoever sends other headers with every call learns nothing from them

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)  # as the SDK's own is set
_BESIDE_THE_BODY = frozenset({"betas", "extra_headers"})
_LISTS = (list, tuple)
_IDS = {"_request_id": "request-id", "_workspace_id": "anthropic-workspace-id"}
_WARNING = "anthropic.resources.messages.messages"  # the module that knows which models to warn of
_SDK_LOG = logging.getLogger("anthropic._base_client")

Kind = tuple[object, ...]
Settled = Reply | CarpoolError  # an error is for the SDK to wrap, as if it had met it itself


class Pattern:
    """What the SDK made of the first call of a kind."""

    __slots__ = ("answer", "ids", "names", "raw", "said")

    def __init__(self, raw: RawRequest, said: Options, names: tuple[str, ...]) -> None:
        self.raw = raw  # without a body
        self.said = said  # the options among its headers
        self.names = names  # of the body's fields, in the SDK's order
        self.answer: Any = None  # the type of the first answer
        self.ids: tuple[str, ...] = ()  # the attributes that it got from its headers


class Draft:
    """One call that may go the short way. Without a pattern yet, it goes through the SDK and becomes the pattern."""

    __slots__ = ("_kind", "_params", "_pattern", "_quick", "raw")

    def __init__(self, quick: Quick, kind: Kind, params: Mapping[str, Any], pattern: Pattern | None) -> None:
        self._quick, self._params, self._pattern = quick, params, pattern
        self._kind = kind if pattern is None else ()  # thousands of calls may wait
        body = encoded(params, names_of(params) if pattern is None else pattern.names)
        self.raw = None if pattern is None else replace(pattern.raw, body=body)

    def options(self, given: Options) -> Options:
        return given if self._pattern is None else given.over(self._pattern.said)

    def learn_request(self, raw: RawRequest, said: Options) -> None:
        """Keeps the SDK's own request as a pattern where the short way would have sent the same bytes."""
        if self._pattern is not None:
            return
        with suppress(RecursionError):  # nested so deep that it can be read only just not here
            names = tuple(json.loads(raw.body))
            if sorted(names) == sorted(names_of(self._params)) and encoded(self._params, names) == raw.body:
                headers = tuple(pair for pair in raw.headers if pair[0] != "content-length")
                self._pattern = Pattern(replace(raw, headers=headers, body=b""), said, names)
            self._quick.keep(self._kind, self._pattern)

    def learn_answer(self, message: Any) -> None:
        """The first answer of a kind is the SDK's own, and says of which type the others are."""
        if self._pattern is None or self._pattern.answer is not None:
            return
        kind = type(message)
        if kind.__module__.startswith("anthropic.types.") and hasattr(kind, "model_validate_json"):
            ids = tuple(name for name in vars(message) if name.startswith("_"))
            if _IDS.keys() >= frozenset(ids):
                self._pattern.ids, self._pattern.answer = ids, kind

    def message(self, settled: Settled) -> Any:
        """The answer as the SDK would give it; None where that is for the SDK to say, as errors always are."""
        pattern = self._pattern
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
            setattr(message, name, _said(outcome.headers, _IDS[name]))
        return message


class Quick:
    """The patterns of one client, and the question whether a call may follow one."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._plain = is_plain(client)
        self._patterns: dict[Kind, Pattern | None] = {}

    def draft(self, params: Mapping[str, Any]) -> Draft | None:
        """None for a call that must go through the SDK."""
        if not (self._plain and self._quiet() and _understood(params)):
            return None
        try:
            kind = self._kind(params)
            pattern = self._patterns.get(kind)
            if pattern is None and (kind in self._patterns or len(self._patterns) >= MOST_KINDS):
                return None
            return Draft(self, kind, params, pattern)
        except (TypeError, ValueError, RecursionError):  # no plain JSON: the SDK knows what to say to it
            return None

    def keep(self, kind: Kind, pattern: Pattern | None) -> None:
        """None for a kind whose calls the SDK changes on the way."""
        self._patterns[kind] = pattern

    def _kind(self, params: Mapping[str, Any]) -> Kind:
        """Whatever decides about the request beside the values of its body."""
        _check_types(params)
        given = self._client._custom_headers  # noqa: SLF001  the public property costs more than all the rest
        extra, betas = params.get("extra_headers") or {}, params.get("betas", ())
        if type(extra) is not dict or type(betas) not in _LISTS:
            raise TypeError
        if not all(type(text) is str for text in (*given, *given.values(), *extra, *extra.values(), *betas)):
            raise TypeError
        return (tuple(params), tuple(given.items()), tuple(extra.items()), tuple(betas))

    def _quiet(self) -> bool:
        """Whether nobody watches the SDK at work, and it sends nothing with its requests that changes by itself."""
        client = self._client
        methods = (type(client.messages).create, type(client.beta.messages).create)
        return (
            all(map(_own, methods))
            and not client.default_query
            and not _SDK_LOG.isEnabledFor(logging.DEBUG)
            and _untraced(client)
        )


def is_plain(client: Any) -> bool:
    """An SDK client as it is delivered: nothing customised that has a say in single requests."""
    sdk = sys.modules.get("anthropic")
    parts = ("_custom_headers", "default_query", "messages", "beta", "api_key", "auth_token", "custom_auth", "timeout")
    return (
        type(client) in (getattr(sdk, "AsyncAnthropic", None), getattr(sdk, "Anthropic", None))
        and all(hasattr(client, part) for part in parts)
        and hasattr(sys.modules.get(_WARNING), "DEPRECATED_MODELS")
        and all(type(secret) in (str, type(None)) for secret in (client.api_key, client.auth_token))
        and client.custom_auth is None
        and client.timeout is None  # or the SDK would refuse calls that may take long
        and not getattr(client, "_middleware", ())
        and getattr(client, "open_telemetry", {}).get("tracer_provider") is None
        and getattr(client, "_idempotency_header", "") is None
        and getattr(client, "_strict_response_validation", True) is False  # which copies of a client never are
        and all(_own(getattr(type(client), name, None)) for name in ("post", "request", "_build_request"))
        and all(_own(getattr(type(client), name, None)) for name in ("_prepare_options", "_prepare_request"))
    )


def _own(function: Any) -> bool:
    """Whether this is the SDK's own function and not one that somebody put in its place, to watch or to change."""
    return type(function) is FunctionType and function.__code__.co_filename.startswith(_home())


@cache
def _home() -> str:
    return str(Path(sys.modules["anthropic"].__file__ or "").parent)


def _untraced(client: Any) -> bool:
    """Whether the SDK's calls have no spans, and carry none that the caller stands in."""
    if getattr(client, "_tracer", None) is None:
        return True
    trace = sys.modules["opentelemetry.trace"]  # with a provider of its own, the client is not plain
    return type(trace.get_tracer_provider()) is trace.ProxyTracerProvider and (
        trace.get_current_span() is trace.INVALID_SPAN
    )


def _understood(params: Mapping[str, Any]) -> bool:
    model = params.get("model")
    return (
        type(model) is str
        and model not in _warned_of()
        and type(params.get("messages")) in _LISTS
        and type(params.get("tools", ())) in _LISTS
        and not params.get("stream")
    )


@cache
def _warned_of() -> frozenset[str]:
    """Models that the SDK has something to say about, to every caller."""
    module = sys.modules[_WARNING]
    return frozenset((*module.DEPRECATED_MODELS, *getattr(module, "MODELS_TO_WARN_WITH_THINKING_ENABLED", ())))


def _check_types(params: Any) -> None:
    """Built-in types only, and no subclass of one, which may mean more to the SDK than its value: marshal is strict."""
    marshal.dumps(params)


def names_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in params if name not in _BESIDE_THE_BODY)


def encoded(params: Mapping[str, Any], names: tuple[str, ...]) -> bytes:
    return _ENCODER.encode({name: params[name] for name in names}).encode()


def _said(headers: Headers, name: str) -> str | None:
    values = [value for known, value in headers if known == name]
    return ", ".join(values) if values else None


def uncount_extras(model: Any) -> None:
    """The SDK counts what it has no field for as set only where it validates, and the message itself it does not."""
    if model.model_extra:
        model.model_fields_set.difference_update(model.model_extra)
    kind: Any = type(model)
    for name in _parts(kind):
        uncount_extras(getattr(model, name))


@cache
def _parts(kind: Any) -> tuple[str, ...]:
    fields = kind.model_fields.items()
    return tuple(name for name, field in fields if inspect.isclass(field.annotation) and _is_model(field.annotation))


def _is_model(kind: type) -> bool:
    return hasattr(kind, "model_fields")
