"""The supported SDK clients: how to recognise them, and which of their methods takes a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from carpool.core.errors import BadParams, WrongClient
from carpool.core.ports import HttpClient
from carpool.dialects import OPENAI, compatible_provider, configured_dialect
from carpool.engine import Upstream


@dataclass(frozen=True, slots=True)
class SdkKind:
    """One SDK. `hello` is the path of the request that reads a client's credential."""

    dialect: str
    asyncio: str
    blocking: str
    sign: str  # an attribute that only its clients have
    hello: str
    endpoints: tuple[str, ...]  # attributes of the client that have a `create` method for calls
    default: Callable[[Mapping[str, Any]], str]
    vendor: str | None = None  # the OpenAI-compatible provider it is made for
    package: str | None = None  # its package, if other SDKs have that attribute too
    path: str = ""  # to append to the client's base URL

    def fits(self, client: Any) -> bool:
        packages = {parent.__module__.partition(".")[0] for parent in type(client).__mro__}
        return hasattr(client, self.sign) and hasattr(client, "copy") and self.package in (None, *packages)

    def upstream(self, client: Any, http_client: HttpClient, vendor: str | None) -> Upstream:
        """The provider of a client. `vendor` names an OpenAI-compatible one that neither client nor host
        identifies."""
        base_url = str(client.base_url).rstrip("/") + self.path
        if self.dialect != OPENAI.name:
            if vendor is not None:
                raise WrongClient(f"`vendor` is for OpenAI's wire, and an {self.asyncio} speaks another: leave it out.")
            return Upstream(self.dialect, base_url, configured_dialect(self.dialect, base_url), http_client)
        provider = compatible_provider(base_url, vendor or self.vendor)
        return Upstream(provider.name, base_url, configured_dialect(self.dialect, base_url, provider.name), http_client)

    def create(self, client: Any, params: Mapping[str, Any], endpoint: str | None) -> Any:
        """The SDK method for these parameters: that of the named endpoint, or the one that they fit."""
        if endpoint is not None and endpoint not in self.endpoints:
            raise BadParams(f"{str(endpoint)[:60]!r} is no endpoint here: name one of {', '.join(self.endpoints)}.")
        resource = client
        for part in (endpoint or self.default(params)).split("."):
            resource = getattr(resource, part)
        return resource.create


KINDS = (
    SdkKind(
        *("anthropic", "AsyncAnthropic", "Anthropic", "messages", "/v1/messages", ("messages", "beta.messages")),
        lambda params: "beta.messages" if "betas" in params else "messages",  # only the beta namespace accepts betas
    ),
    SdkKind(
        *("openai", "AsyncOpenAI", "OpenAI", "responses", "/chat/completions"),
        ("chat.completions", "responses", "embeddings", "completions", "moderations"),
        lambda params: "chat.completions" if "messages" in params else "responses",
    ),
    SdkKind(
        *("openai", "AsyncGroq", "Groq", "chat", "/openai/v1/chat/completions", ("chat.completions", "embeddings")),
        lambda params: "chat.completions",
        vendor="groq",
        package="groq",
        path="/openai/v1",
    ),
)


def known_client(client: Any, way: str) -> tuple[ModuleType, SdkKind]:
    """The HTTP library of an SDK client, httpx or httpx2, and its kind. Raises `WrongClient` unless it is a supported
    client whose HTTP client has the class `way`."""
    inner, kind = inner_http(client), next((kind for kind in KINDS if kind.fits(client)), None)
    lib = _library(inner, way)
    if lib is not None and kind is not None:
        return lib, kind
    name = f"{type(client).__module__.partition('.')[0]}.{type(client).__name__}"
    wanted = [sdk.asyncio if way == "AsyncClient" else sdk.blocking for sdk in ([kind] if kind else KINDS)]
    if kind is not None and _library(inner, "Client") is not None:
        raise WrongClient(f"{name} is a blocking client. Use carpool.Fleet with it, or an {wanted[0]} here.")
    if kind is not None and _library(inner, "AsyncClient") is not None:
        raise WrongClient(f"{name} is an asyncio client. Use carpool.FleetDispatcher with it, or an {wanted[0]} here.")
    ways = " or an ".join(f"{sdk.package or sdk.dialect}.{text}" for sdk, text in zip(KINDS, wanted, strict=False))
    raise WrongClient(f"carpool sends through an {ways}, and this is a {name}.")


def inner_http(client: Any) -> Any:
    """The HTTP client inside an SDK client. All supported SDKs keep it in the same private attribute."""
    return getattr(client, "_client", None)


def _library(client: Any, kind: str) -> ModuleType | None:
    """The library, httpx or httpx2, of a client of class `kind`; None for any other client."""
    for parent in type(client).__mro__:
        root = parent.__module__.partition(".")[0]
        if root in ("httpx", "httpx2") and parent.__name__ == kind:
            return import_module(root)
    return None
