"""The models of the OpenAI mock, and what it charges for them (pico-dollars per token)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LONG_FROM = 272_000
_HALF = {"flex": 50}
_TWO_WAYS = {"flex": 50, "priority": 200}


@dataclass(frozen=True, slots=True)
class OpenAISpec:
    id: str
    input: int
    output: int
    read: int
    write: int | None = None
    """None if cache writes are free; else they are reported separately, and cost this."""
    tiers: Mapping[str, int] = field(default_factory=dict)
    """Service tiers other than the default, in percent of its price."""
    long: bool = False
    """Above 272,000 input tokens, input and cache cost 2x and output 1.5x."""
    thinks: bool = True
    dimensions: int = 0
    """Of its embeddings; 0 for all other models."""
    use: str = "talk"
    """`talk`, `embed`, `complete` or `moderate`: which endpoints it serves."""
    batch: bool = True
    house: str = "openai"
    """Its provider: a row of `providers.TABLE`."""


def _line(id: str, usd: float, out: float, read: float, **more: object) -> OpenAISpec:  # noqa: A002
    """Dollars per million tokens."""
    return OpenAISpec(id, _pico(usd), _pico(out), _pico(read), **more)  # type: ignore[arg-type]


def _new(id: str, usd: float, out: float, read: float) -> OpenAISpec:  # noqa: A002
    """Since GPT-5.6 a cache write costs 1.25x the input."""
    return _line(id, usd, out, read, write=_pico(usd) * 5 // 4, tiers=_TWO_WAYS, long=True)


def _pico(usd: float) -> int:
    return round(usd * 1_000_000)


CATALOGUE: dict[str, OpenAISpec] = {
    spec.id: spec
    for spec in (
        _new("gpt-6-astra", 10, 50, 1.0),
        _new("gpt-6.1-sol", 2, 10, 0.1),
        _new("gpt-6-sol", 2, 10, 0.2),
        _new("gpt-6.1-terra", 1, 5, 0.05),
        _new("gpt-6-luna", 0.1, 0.5, 0.01),
        _new("gpt-5.6-terra", 2, 12, 0.2),
        _new("gpt-5.6-luna", 0.2, 1.2, 0.02),
        _line("gpt-5.5", 5, 30, 0.5, tiers=_HALF, long=True),
        _line("gpt-5.4-mini", 0.75, 4.5, 0.075, tiers=_TWO_WAYS),
        _line("gpt-5.3-codex", 1.75, 14, 0.175, tiers={"priority": 200}, batch=False),
        _line("gpt-5.2", 1.75, 14, 0.175, tiers={"priority": 200}),
        _line("gpt-5", 1.25, 10, 0.125, tiers=_TWO_WAYS),
        _line("gpt-5-mini", 0.25, 2, 0.025, tiers={"flex": 50, "priority": 180}),
        _line("gpt-5-nano", 0.05, 0.4, 0.005, tiers=_HALF),
        _line("o3", 2, 8, 0.5, tiers={"flex": 50, "priority": 175}),
        _line("gpt-4.1", 2, 8, 0.5, tiers={"priority": 175}, thinks=False),
        _line("gpt-4.1-mini", 0.4, 1.6, 0.1, tiers={"priority": 175}, thinks=False),
        _line("gpt-4o", 2.5, 10, 1.25, tiers={"priority": 170}, thinks=False),
        _line("gpt-4o-mini", 0.15, 0.6, 0.075, thinks=False),
        _line("text-embedding-3-large", 0.13, 0, 0, dimensions=3072, use="embed"),
        _line("text-embedding-3-small", 0.02, 0, 0, dimensions=1536, use="embed"),
        _line("gpt-3.5-turbo-instruct", 1.5, 2, 0, thinks=False, use="complete"),
        _line("omni-moderation-latest", 0, 0, 0, thinks=False, use="moderate"),
    )
}

_SAME = {"flex": 100}  # larger limits, the same price

COMPATIBLE_CATALOGUE: dict[str, OpenAISpec] = {
    spec.id: spec
    for spec in (
        _line("openai/gpt-oss-120b", 0.15, 0.6, 0.075, tiers=_SAME, thinks=False, house="groq"),
        _line("qwen/qwen3.8-27b", 0.8, 4, 0, tiers=_SAME, thinks=False, house="groq"),
        _line("meta-llama/Llama-3.3-70B-Instruct-Turbo", 0.88, 0.88, 0, thinks=False, house="together"),
        _line("mistral-small-latest", 0.15, 0.6, 0.015, thinks=False, house="mistral"),
        _line("mistral-large-latest", 0.5, 1.5, 0.05, thinks=False, house="mistral"),
        _line("mistral-embed", 0.1, 0, 0, dimensions=1024, use="embed", house="mistral"),
        _line("grok-4.3", 1.25, 2.5, 0.2, thinks=False, house="xai"),
        _line("grok-4.7", 2, 6, 0.5, thinks=False, batch=False, house="xai"),
    )
}

_DATED = re.compile(r"-\d{4}-\d{2}-\d{2}$")


def find_model(name: str) -> OpenAISpec | None:
    """The model called `name`; a dated snapshot (`…-2025-08-07`) is its family's model."""
    return CATALOGUE.get(name) or CATALOGUE.get(_DATED.sub("", name)) or COMPATIBLE_CATALOGUE.get(name)


def model_info(spec: OpenAISpec) -> dict[str, object]:
    return {"id": spec.id, "object": "model", "created": 1_767_225_600, "owned_by": "openai"}
