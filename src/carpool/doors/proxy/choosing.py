"""Which provider a request goes to: the one that it names, else the one whose wire it speaks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from carpool.engine import Upstream
from carpool.errors import NoProvider
from carpool.model import Headers

# The first part of a path below /v1/. The shared ones are Anthropic's too.
_OPENAI = frozenset(
    {
        *("assistants", "audio", "batches", "chat", "completions", "containers", "conversations", "embeddings"),
        *("evals", "fine_tuning", "images", "moderations", "organization", "projects", "realtime", "responses"),
        *("threads", "uploads", "vector_stores", "videos"),
    }
)
_SHARED = frozenset({"files", "models"})
_UNDER_A_NAME = "/openai/v1/"  # where relatives of OpenAI have its paths


def below(path: str) -> str:
    """A path as every provider of a wire has it: some SDKs put OpenAI's under a name, and so do base URLs."""
    return path.removeprefix("/openai") if path.startswith(_UNDER_A_NAME) else path


def choose(
    wanted: str | None, path: str, headers: Headers, upstreams: Mapping[str, Upstream], defaults: Collection[str] = ()
) -> Upstream:
    """`wanted` is a provider's name, as the client asked for it; `defaults` are those that are marked so."""
    if wanted is not None:
        if wanted not in upstreams:
            raise NoProvider(f"There is no provider {wanted[:60]!r} here. Ask for {_or(sorted(upstreams))}.")
        return upstreams[wanted]
    if len(upstreams) == 1:
        return next(iter(upstreams.values()))
    speaks = wire_of(path, headers)
    if speaks is None:
        raise NoProvider(
            f"Nothing in this request says which provider it is for. Name one: send x-carpool-provider, or begin the "
            f"path with /@provider=NAME, where NAME is {_or(sorted(upstreams))}."
        )
    return _one_of(speaks, [upstream for upstream in upstreams.values() if upstream.dialect.name == speaks], defaults)


def wire_of(path: str, headers: Headers) -> str | None:
    """The dialect that a request speaks, by its path and by the headers that only one provider knows."""
    names = {name for name, _ in headers}
    part = path[4:].partition("/")[0] if path.startswith("/v1/") else ""
    if "anthropic-version" in names or part == "messages":
        return "anthropic"
    if "x-goog-api-key" in names:
        return "gemini"
    if part in _OPENAI or (part in _SHARED and "x-api-key" not in names):
        return "openai"
    return "anthropic" if "x-api-key" in names else None


def _one_of(speaks: str, speakers: Sequence[Upstream], defaults: Collection[str]) -> Upstream:
    if not speakers:
        raise NoProvider(f"This request speaks {speaks}, and no such provider is configured: add one to the config.")
    if len(speakers) == 1:
        return speakers[0]
    marked = [upstream for upstream in speakers if upstream.provider in defaults]
    marked = marked or [upstream for upstream in speakers if upstream.provider == speaks]
    if len(marked) == 1:
        return marked[0]
    names = sorted(upstream.provider for upstream in speakers)
    raise NoProvider(
        f"Several providers speak {speaks}: {', '.join(names)}. Send x-carpool-provider with the name of one, or mark "
        "one of them as the default in the config."
    )


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
