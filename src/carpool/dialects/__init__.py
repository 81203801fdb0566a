"""The API formats of the providers: pure translation between bytes and carpool's own types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from carpool.core.errors import ConfigError
from carpool.core.model import Headers
from carpool.core.ports import Claim, Dialect
from carpool.dialects.anthropic import Anthropic
from carpool.dialects.openai import COMPATIBLE_PROVIDERS, CompatibleProvider, OpenAI, compatible_provider

__all__ = [
    "ANTHROPIC",
    "COMPATIBLE_PROVIDERS",
    "DEFAULT_DIALECT",
    "DIALECTS",
    "OPENAI",
    "VENDOR_DIALECT",
    "Anthropic",
    "CompatibleProvider",
    "OpenAI",
    "below",
    "compatible_provider",
    "configured_dialect",
    "dialect_of_endpoint",
    "dialect_of_request",
    "get",
    "guessed_endpoint",
    "key_headers",
]

ANTHROPIC: Dialect = Anthropic()
OPENAI: Dialect = OpenAI()
DEFAULT_DIALECT = ANTHROPIC  # of errors to requests that show none; `--upstream` is about its provider
VENDOR_DIALECT = OPENAI  # what OpenAI-compatible providers speak: `vendor` in a config names one
_REGISTERED: dict[str, Dialect] = {dialect.name: dialect for dialect in (ANTHROPIC, OPENAI)}
DIALECTS = MappingProxyType(_REGISTERED)

_PREFIX = "/openai"  # which some SDKs and base URLs put before OpenAI's paths
_WITHOUT_DIALECT = {"x-goog-api-key": "gemini"}  # key headers of providers without a dialect


def get(name: str) -> Dialect:
    if name not in DIALECTS:
        raise ConfigError(f"There is no dialect {name!r}. carpool knows: {', '.join(sorted(DIALECTS))}.")
    return DIALECTS[name]


def below(path: str) -> str:
    """The path without a prefix of a provider."""
    return path.removeprefix(_PREFIX) if path.startswith(f"{_PREFIX}/v1/") else path


def key_headers() -> frozenset[str]:
    """The headers in which clients send a key, of whichever provider."""
    of_providers = [row.key_headers for row in COMPATIBLE_PROVIDERS.values()]
    return frozenset(_WITHOUT_DIALECT).union(*of_providers, *[dialect.key_headers for dialect in DIALECTS.values()])


def dialect_of_request(path: str, headers: Headers) -> str | None:
    """The name of the dialect of a request, by its path, by headers that only one provider has, and by its key."""
    claims = {name: dialect.claim(path, headers) for name, dialect in DIALECTS.items()}
    name = max(claims, key=claims.__getitem__)
    if claims[name] is not Claim.OWN:
        for header, _ in headers:
            if header in _WITHOUT_DIALECT:
                return _WITHOUT_DIALECT[header]
    return name if claims[name] else None


def dialect_of_endpoint(method: str, path: str) -> Dialect | None:
    """The dialect that parses an endpoint, whatever the headers: for requests whose destination is fixed already."""
    return next((dialect for dialect in DIALECTS.values() if dialect.handles(method, path)), None)


def guessed_endpoint(body: Mapping[str, Any]) -> str:
    """The endpoint of a body without a path."""
    return max((dialect.endpoint_of(body) for dialect in DIALECTS.values()), key=itemgetter(0))[1]


def configured_dialect(
    name: str, base_url: str, vendor: str | None = None, *, window: float | None = None, api_version: str = ""
) -> Dialect:
    """The dialect of a provider, with the differences of an OpenAI-compatible one."""
    if name != OPENAI.name:
        return get(name)
    row = compatible_provider(base_url, vendor)
    if window is not None:
        row = row.with_window(window)
    return OpenAI(replace(row, api_version=api_version or row.api_version))
