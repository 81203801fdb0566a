"""Read recorded traffic: which format a file has, how long agents pause, and which sessions to take.

Four formats are known, and told apart by their content (see `formats`): sessions of Claude Code, Mooncake's
conversation trace, Azure's trace of independent calls, and the turns of tau-bench's agents.

Agents are replayed in a closed loop: the next turn starts when the last one is answered and its pause is over. A pause
mixes the time of tools with that of people. `attended` keeps the pauses as they are; `unattended` caps them at a
minute, as if nobody had to be waited for. Independent calls are sessions of one turn, which start when they started.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from carpool.core.errors import ConfigError
from carpool.sim.money.formats import TraceFile, read_azure, read_claude_code, read_mooncake, read_tau
from carpool.sim.money.model import Trace, TraceSession

T = TypeVar("T")

PauseMode = Literal["attended", "unattended"]

LONGEST_UNATTENDED_S: Final = 60.0
SPREAD_S: Final = 3600.0  # agents whose start is not recorded start within this time
DEFAULT_MODEL: Final = "claude-sonnet-4-5"  # for traces that name no model

_Reader = Callable[[TraceFile], tuple[TraceSession, ...]]


def read_trace(
    path: str | Path,
    *,
    mode: PauseMode = "attended",
    sessions: int | None = None,
    seed: int = 0,
    spread_s: float = SPREAD_S,
    model: str | None = None,
    provider: str = "anthropic",
) -> Trace:
    """Read a trace. With `sessions` only so many are taken: agents at random, independent calls as one stretch, because
    single ones would share nothing. `model` replaces the recorded models, at `provider`."""
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} can't be read: {error}.") from error
    rng = random.Random(f"sessions {seed}")  # noqa: S311  a sample must be the same every time
    file = TraceFile(
        str(path),
        text,
        longest_pause=longest_pause(mode),
        model=model or DEFAULT_MODEL,
        keep_models=model is None,
        spread_s=spread_s,
        rng=rng,
        sample=lambda rows: _sampled(rows, sessions, rng),
        stretch=lambda rows: _stretch(rows, sessions, rng),
    )
    found = _reader(path, text)(file)
    return Trace(f"{path.stem}-{mode}", file.nodes, found, provider)


def longest_pause(mode: PauseMode) -> float:
    return LONGEST_UNATTENDED_S if mode == "unattended" else math.inf


def _reader(path: Path, text: str) -> _Reader:
    start = text.lstrip()[:200_000]
    first = start.partition("\n")[0]
    if first.startswith("TIMESTAMP,"):
        return read_azure
    if first.startswith("["):
        return read_tau
    if first.startswith("{") and '"hash_ids"' in first:
        return read_mooncake
    if first.startswith("{") and '"requests"' in first:
        return read_claude_code
    raise ConfigError(
        f"{path} is not a trace that carpool knows: expected are sessions of Claude Code, Mooncake's or Azure's trace, "
        "or tau-bench's turns."
    )


def _sampled(rows: Sequence[T], most: int | None, rng: random.Random) -> Sequence[T]:
    if most is None or most >= len(rows):
        return rows
    return [rows[index] for index in sorted(rng.sample(range(len(rows)), most))]


def _stretch(rows: Sequence[T], most: int | None, rng: random.Random) -> Sequence[T]:
    if most is None or most >= len(rows):
        return rows
    first = rng.randrange(len(rows) - most + 1)
    return rows[first : first + most]
