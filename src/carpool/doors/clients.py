"""The SDK clients that carpool sends through: what tells them apart, and which of their methods takes a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.dialects import OPENAI, relative_at, speaking
from carpool.doors.transport import flavour
from carpool.engine import Upstream
from carpool.errors import BadParams, WrongClient
from carpool.ports import Wire


@dataclass(frozen=True, slots=True)
class Kind:
    """One SDK. At `hello` its client introduces itself."""

    dialect: str
    asyncio: str
    blocking: str
    sign: str  # an attribute that only its clients have
    hello: str
    endpoints: tuple[str, ...]  # methods that take calls, as attributes of the client, less `create`
    default: Callable[[Mapping[str, Any]], str]
    relative: str | None = None  # whom it is made for, where that is one of OpenAI's relatives
    package: str | None = None  # where others' clients have that attribute, too
    path: str = ""  # below the client's base URL

    def fits(self, client: Any) -> bool:
        if not (hasattr(client, self.sign) and hasattr(client, "copy")):
            return False
        return self.package is None or self.package in _packages(client)

    @property
    def sdk(self) -> str:
        return self.package or self.dialect


def _packages(client: Any) -> set[str]:
    return {parent.__module__.partition(".")[0] for parent in type(client).__mro__}


def _openai_endpoint(params: Mapping[str, Any]) -> str:
    return "chat.completions" if "messages" in params else "responses"


def _anthropic_endpoint(params: Mapping[str, Any]) -> str:
    return "beta.messages" if "betas" in params else "messages"  # betas are known to the beta namespace only


KINDS = (
    Kind(
        "anthropic",
        "AsyncAnthropic",
        "Anthropic",
        "messages",
        "/v1/messages",
        ("messages", "beta.messages"),
        _anthropic_endpoint,
    ),
    Kind(
        "openai",
        "AsyncOpenAI",
        "OpenAI",
        "responses",
        "/chat/completions",
        ("chat.completions", "responses", "embeddings", "completions", "moderations"),
        _openai_endpoint,
    ),
    Kind(
        "openai",
        "AsyncGroq",
        "Groq",
        "chat",
        "/openai/v1/chat/completions",
        ("chat.completions", "embeddings"),
        lambda params: "chat.completions",
        relative="groq",
        package="groq",
        path="/openai/v1",
    ),
)


def kind_of(client: Any) -> Kind | None:
    return next((kind for kind in KINDS if kind.fits(client)), None)


def upstream_of(client: Any, wire: Wire, relative: str | None) -> Upstream:
    """The provider behind a client. `relative` says which of OpenAI's it is, where neither client nor host does."""
    kind = known_kind(client)
    base_url = str(client.base_url).rstrip("/") + kind.path
    if kind.dialect != OPENAI.name:
        if relative is not None:
            raise WrongClient(f"`relative` is for OpenAI's wire, and an {kind.asyncio} speaks another: leave it out.")
        return Upstream(kind.dialect, base_url, speaking(kind.dialect, base_url), wire)
    found = relative_at(base_url, relative or kind.relative)
    return Upstream(found.name, base_url, speaking(kind.dialect, base_url, found.name), wire)


def known_kind(client: Any) -> Kind:
    """Of a client whose HTTP library was found."""
    kind = kind_of(client)
    assert kind is not None
    return kind


def create_of(client: Any, params: Mapping[str, Any], endpoint: str | None = None) -> Any:
    """The SDK method that takes these parameters: the named one, or the one that they fit."""
    kind = known_kind(client)
    if endpoint is not None and endpoint not in kind.endpoints:
        raise BadParams(f"{str(endpoint)[:60]!r} is no endpoint here: name one of {', '.join(kind.endpoints)}.")
    found = client
    for part in (endpoint or kind.default(params)).split("."):
        found = getattr(found, part)
    return found.create


def http_flavour(client: Any, way: str) -> Any:
    """httpx or httpx2, whichever this SDK client is built on; a clear refusal for anything else."""
    inner, kind = inner_http(client), kind_of(client)
    lib = flavour(inner, way)
    if lib is not None and kind is not None:
        return lib
    name = f"{type(client).__module__.partition('.')[0]}.{type(client).__name__}"
    wanted = [one.asyncio if way == "AsyncClient" else one.blocking for one in ([kind] if kind else KINDS)]
    if kind is not None and flavour(inner, "Client") is not None:
        raise WrongClient(f"{name} is a blocking client. Use carpool.Fleet with it, or an {wanted[0]} here.")
    if kind is not None and flavour(inner, "AsyncClient") is not None:
        raise WrongClient(f"{name} is an asyncio client. Use carpool.FleetDispatcher with it, or an {wanted[0]} here.")
    ways = " or an ".join(f"{one.sdk}.{text}" for one, text in zip(KINDS, wanted, strict=False))
    raise WrongClient(f"carpool sends through an {ways}, and this is a {name}.")


def inner_http(client: Any) -> Any:
    """The HTTP client inside an SDK client. All these SDKs keep it under the same name, none shows it."""
    return getattr(client, "_client", None)
