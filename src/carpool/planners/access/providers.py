"""Choose the provider of a request: the one that it names, else the one whose API it uses. Adds the house's own key."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from carpool.core.errors import NoProvider
from carpool.core.keys import BEARER, bare
from carpool.core.model import Headers
from carpool.core.upstream import Upstream, versioned

# First path segments below /v1/. The shared ones exist at both providers.
_ANTHROPIC = frozenset({"complete", "messages", "organizations"})
_OPENAI = frozenset(
    {
        *("assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings"),
        *("evals", "fine_tuning", "images", "moderations", "organization", "projects", "realtime", "responses"),
        *("threads", "uploads", "vector_stores", "videos"),
    }
)
_SHARED = frozenset({"files", "models"})
_PREFIXED = "/openai/v1/"  # where some OpenAI-compatible providers have its paths
_ANTHROPIC_KEY_PREFIX = "sk-ant-"


def below(path: str) -> str:
    """The path without the `/openai` prefix, which some SDKs and base URLs put before OpenAI's paths."""
    return path.removeprefix("/openai") if path.startswith(_PREFIXED) else path


def completed(path: str, upstream: Upstream) -> str:
    """Add `/v1` where the client's base URL has no version and the provider's has one, so that the path is recognized.
    The upstream URL stays the same."""
    if upstream.dialect.name == "openai" and _first_segment(path) in _OPENAI | _SHARED and versioned(upstream.base_url):
        return "/v1" + path
    return path


def upgrade_refused(path: str, headers: Headers) -> int | None:
    """The status for a WebSocket request, else None. 426 makes clients fall back to HTTP at once, if they can."""
    if not any(name == "upgrade" and value.lower() == "websocket" for name, value in headers):
        return None
    return 426 if path == "/v1/responses" else 501


def choose(
    wanted: str | None, path: str, headers: Headers, upstreams: Mapping[str, Upstream], defaults: Collection[str] = ()
) -> Upstream:
    """Choose the provider. `wanted` is the name that the client asked for; `defaults` are marked so in the config."""
    if wanted is not None:
        if wanted not in upstreams:
            raise NoProvider(f"There is no provider {wanted[:60]!r} here. Ask for {_or(sorted(upstreams))}.")
        return upstreams[wanted]
    if len(upstreams) == 1:
        return next(iter(upstreams.values()))
    dialect = wire_of(path, headers)
    if dialect is None:
        raise NoProvider(
            f"Nothing in this request says which provider it is for. Name one: send x-carpool-provider, or begin the "
            f"path with /@provider=NAME, where NAME is {_or(sorted(upstreams))}."
        )
    candidates = [upstream for upstream in upstreams.values() if upstream.dialect.name == dialect]
    return _pick(dialect, candidates, defaults)


def wire_of(path: str, headers: Headers) -> str | None:
    """The dialect of a request, by its path, by headers that only one provider has, and by its key.

    OpenAI's clients send nothing but a bearer token, so a request that matches no other provider is OpenAI's. So its
    new endpoints work from the day they appear."""
    names = {name for name, _ in headers}
    segment = _first_segment(path[3:]) if path.startswith("/v1/") else ""
    if segment in _ANTHROPIC or any(name.startswith("anthropic-") for name in names):
        return "anthropic"
    if "x-goog-api-key" in names:
        return "gemini"
    if segment in _OPENAI:
        return "openai"
    tokens = [token for name, value in headers if name == BEARER and (token := bare(name, value)) is not None]
    if "x-api-key" in names or any(token.startswith(_ANTHROPIC_KEY_PREFIX) for token in tokens):
        return "anthropic"
    carries_key = bool(tokens) or "api-key" in names
    below_v1 = bool(segment) or _first_segment(path) in _OPENAI | _SHARED
    return "openai" if segment in _SHARED or (carries_key and below_v1) else None


def _first_segment(path: str) -> str:
    return path[1:].partition("/")[0]


def _pick(dialect: str, candidates: Sequence[Upstream], defaults: Collection[str]) -> Upstream:
    if not candidates:
        raise NoProvider(f"This request speaks {dialect}, and no such provider is configured: add one to the config.")
    if len(candidates) == 1:
        return candidates[0]
    preferred = [upstream for upstream in candidates if upstream.provider in defaults]
    preferred = preferred or [upstream for upstream in candidates if upstream.provider == dialect]
    if len(preferred) == 1:
        return preferred[0]
    names = sorted(upstream.provider for upstream in candidates)
    raise NoProvider(
        f"Several providers speak {dialect}: {', '.join(names)}. Send x-carpool-provider with the name of one, or mark "
        "one of them as the default in the config."
    )


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


# ---------------------------------------------------------------- house keys
# A house key is a provider key that carpool adds to requests of local clients without a key. A web page can make a
# browser post to carpool, though it can't read the response. Such a request has no key, and a house key would let it
# spend money. So requests from a page of another origin get none, and neither do forwarded requests.

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_PASSED_ON = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


class HouseKeys:
    """The house keys by provider, each a header name and value."""

    def __init__(self, keys: Mapping[str, tuple[str, str]]) -> None:
        self._keys = keys

    def add_house_key(self, provider: str, headers: Headers, carries_key: bool) -> Headers:
        if carries_key or provider not in self._keys or _from_foreign_page(headers) or is_forwarded(headers):
            return headers
        return (*headers, self._keys[provider])

    def __repr__(self) -> str:  # never the keys
        return f"<HouseKeys of {len(self._keys)}>"


def is_forwarded(headers: Headers) -> bool:
    """Whether a reverse proxy forwarded the request: then it may come from anywhere."""
    return any(name in _PASSED_ON for name, _ in headers)


def _from_foreign_page(headers: Headers) -> bool:
    for name, value in headers:
        if name == "sec-fetch-site" and value.strip().lower() not in ("same-origin", "none"):
            return True
        if name == "origin" and not _is_local(value):
            return True
    return False


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin.strip()).hostname in LOCAL
    except ValueError:
        return False
