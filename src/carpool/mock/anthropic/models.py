"""The models this provider offers, and what it charges for them (nano-dollars per token)."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    id: str
    input: int
    output: int
    write_5m: int
    write_1h: int
    read: int
    min_cacheable: int
    context: int = 1_000_000
    max_output: int = 128_000
    batch: bool = True
    geo_priced: bool = True
    long_context_from: int | None = None
    """Above this many input tokens, every token of the request costs `long_context_times` as much."""
    long_context_times: int = 1


def _line(id: str, usd: float, out: float, read: float, least: int, **more: object) -> ModelSpec:  # noqa: A002
    """Dollars per million tokens; cache writes cost 1.25x the input for 5 minutes, 2x for 1 hour."""
    nano = round(usd * 1000)
    return ModelSpec(id, nano, round(out * 1000), nano * 5 // 4, nano * 2, round(read * 1000), least, **more)  # type: ignore[arg-type]


_SMALL = {"context": 200_000, "max_output": 64_000, "geo_priced": False}

CATALOGUE: dict[str, ModelSpec] = {
    spec.id: spec
    for spec in (
        _line("claude-fable-5-1", 10, 50, 0.25, 512),
        _line("claude-mythos-5-1", 10, 50, 0.25, 512),
        _line("claude-fable-5", 10, 50, 1.0, 512),
        _line("claude-mythos-5", 10, 50, 1.0, 512),
        _line("claude-mythos-preview", 10, 50, 1.0, 2048, batch=False),
        _line("claude-opus-5-5", 4, 20, 0.2, 512),
        _line("claude-opus-5", 5, 25, 0.5, 512),
        _line("claude-opus-4-8", 5, 25, 0.5, 1024),
        _line("claude-opus-4-7", 5, 25, 0.5, 2048),
        _line("claude-opus-4-6", 5, 25, 0.5, 4096),
        _line("claude-opus-4-5", 5, 25, 0.5, 4096, **_SMALL),
        _line("claude-sonnet-5-5", 2, 10, 0.1, 512),
        _line("claude-sonnet-5", 2, 10, 0.2, 1024),
        _line("claude-sonnet-4-6", 3, 15, 0.3, 1024),
        _line("claude-sonnet-4-5", 3, 15, 0.3, 1024, **_SMALL),
        _line("claude-haiku-5-5", 0.1, 0.5, 0.01, 512, long_context_from=100_000, long_context_times=5),
        _line("claude-haiku-4-5", 1, 5, 0.1, 4096, **_SMALL),
    )
}

_DATED = re.compile(r"-(\d{8}|latest)$")


def find_model(name: str) -> ModelSpec | None:
    """The model called `name`; a dated snapshot (`…-20251001`) is its family's model."""
    return CATALOGUE.get(name) or CATALOGUE.get(_DATED.sub("", name))


def model_info(spec: ModelSpec) -> dict[str, object]:
    return {
        "id": spec.id,
        "type": "model",
        "display_name": spec.id.replace("-", " ").title(),
        "created_at": "2026-01-01T00:00:00Z",
        "deprecated_at": None,
        "lifecycle": "active",
        "line": spec.id.split("-")[1],
        "retires_at": None,
        "max_input_tokens": spec.context,
        "max_tokens": spec.max_output,
        "capabilities": {"batch": {"supported": spec.batch}, **_CAPABILITIES},
    }


def _supported(*parts: str) -> dict[str, object]:
    return {"supported": True, **{part: {"supported": True} for part in parts}}


_CAPABILITIES: dict[str, object] = {
    **{
        name: _supported() for name in ("citations", "code_execution", "context_management", "image_input", "pdf_input")
    },
    "structured_outputs": _supported(),
    "effort": _supported("low", "medium", "high", "max"),
    "server_tools": _supported("code_execution", "web_search"),
    "thinking": {"supported": True, "types": _supported("adaptive", "between_tools", "disabled", "enabled")},
}
