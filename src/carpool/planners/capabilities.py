"""A table of model capabilities: lanes, token limits, minimum prefix for prompt caching.

Rows are globs; the first that matches applies, and the config overrides it. A model without a row gets the defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final

from carpool.core.errors import ConfigError
from carpool.core.model import Lane
from carpool.core.settings import SWITCH, Check, Range, check, known, mapping


@dataclass(frozen=True, slots=True)
class Capability:
    """The capabilities of one model. None means unknown."""

    batch: bool = True
    flex: bool = False
    stream: bool = True
    context_tokens: int | None = None
    output_tokens: int | None = None
    cacheable_tokens: int | None = None  # a shorter prefix is not cached
    batch_price: float = 0.5  # price in a batch relative to `now`
    flex_price: float = 0.5  # price on `flex` relative to `now`


_CLAUDE: Final = Capability(context_tokens=1_000_000, output_tokens=128_000, cacheable_tokens=512)
_SMALLER: Final = replace(_CLAUDE, context_tokens=200_000, output_tokens=64_000)
_GPT: Final = Capability(context_tokens=922_000, output_tokens=128_000, cacheable_tokens=1024, flex=True)
_LONG_GPT: Final = replace(_GPT, context_tokens=1_050_000)
_OLDER_GPT: Final = Capability(cacheable_tokens=1024)
_NO_BATCH: Final = Capability(batch=False)

_OPENAI: Final = (
    *((pattern, _NO_BATCH) for pattern in ("*-codex*", "*-chat-latest", "*-cyber*", "*daybreak*")),
    *((pattern, _NO_BATCH) for pattern in ("*realtime*", "*audio*", "*-transcribe*", "*-tts*")),
    *((pattern, Capability(stream=False)) for pattern in ("text-embedding-*", "*-moderation-*")),
    ("gpt-6.1-terra*", replace(_GPT, flex=False)),
    ("gpt-6*", _GPT),
    ("gpt-5.6*", _GPT),
    ("gpt-5.5*", _LONG_GPT),
    ("gpt-5.4*", _LONG_GPT),
    *((pattern, replace(_OLDER_GPT, flex=True)) for pattern in ("gpt-5*", "o3*", "o4-mini*")),
    ("gpt-4*", _OLDER_GPT),
)

_TABLE: Final[Mapping[str, tuple[tuple[str, Capability], ...]]] = {
    "anthropic": (
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
    ),
    "openai": _OPENAI,
    # Flex is a preview for some kinds of deployment: off unless the config enables it.
    "azure": tuple((pattern, replace(row, flex=False)) for pattern, row in _OPENAI),
    "groq": (("*", Capability(flex_price=1.0)),),
    "mistral": (("*-embed*", Capability(stream=False)),),
    # A batch at the price of `now` has no benefit, so most models don't use one.
    "together": (("meta-llama/*Llama-3.3-70B-Instruct-Turbo", Capability()), ("*", _NO_BATCH)),
    "x-ai": (
        *((pattern, Capability(batch_price=0.8)) for pattern in ("grok-4.3*", "grok-4.20*")),
        ("*", _NO_BATCH),
    ),
}
_UNLISTED: Final = Capability()

_CHECKS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("batch", "flex", "stream"), SWITCH),
    **dict.fromkeys(("context_tokens", "output_tokens", "cacheable_tokens"), Range(0, 1_000_000_000, whole=True)),
    **dict.fromkeys(("batch_price", "flex_price"), Range(0, 1, whole=False)),
}
KEYS: Final = tuple(field.name for field in fields(Capability))

Overrides = Mapping[str, Mapping[str, Mapping[str, Any]]]  # provider → model or glob → capabilities


class Capabilities:
    def __init__(self, overrides: Overrides | None = None) -> None:
        self._overrides = overrides or {}
        self.of = lru_cache(maxsize=4096)(self._of)

    def against(self, lane: Lane, provider: str, seller: str, model: str) -> str | None:
        """Why a model can't take a lane; None if it can."""
        able = self.of(provider, seller, model)
        if able.batch if lane is Lane.BATCH else able.flex:
            return None
        return f"The model {model[:80]} is not offered on the lane {lane}."

    def _of(self, provider: str, seller: str, model: str) -> Capability:
        """Look up a model. The config's overrides are by `provider`, its name there; the table is by `seller`."""
        rows = _TABLE.get(seller, ())
        listed = next((row for pattern, row in rows if fnmatchcase(model, pattern)), _UNLISTED)
        overrides = self._overrides.get(provider, {})
        override = overrides.get(model)
        if not override:
            override = next((row for pattern, row in overrides.items() if fnmatchcase(model, pattern)), {})
        return replace(listed, **override)


def read_models(value: object, shown: str) -> dict[str, dict[str, Any]]:
    """Parse the models of a provider's section in a config."""
    models: dict[str, dict[str, Any]] = {}
    for pattern, content in mapping(value, shown).items():
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f'{shown} has a model that is no name: write names or globs, as in "my-model-*".')
        given = mapping(content, f"{shown}.{pattern}")
        models[pattern] = {}
        for key, setting in given.items():
            name = known(key, KEYS, f"{shown}.{pattern}.")
            check(_CHECKS[name], setting, f"{shown}.{pattern}.{name}")
            models[pattern][name] = setting
    return models
