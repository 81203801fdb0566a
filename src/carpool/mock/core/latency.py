"""Latencies: small distributions, written as short strings.

constant:2
uniform:1,3
lognormal:median=100,sigma=0.5          (and floor=60: no draw is below it)
mixture:0.95*lognormal(100,0.5)+0.05*lognormal(1800,1)
"""

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Latency(Protocol):
    def draw(self, rng: random.Random) -> float:
        """One duration in seconds, never negative."""
        ...


class RequestLatencies(Protocol):
    """Latencies that belong to requests, known by their fingerprints, and not to the order in which they come."""

    def sync_s(self, fingerprint: str, now: float) -> float:
        """How long its answer takes if it begins at this time."""
        ...

    def batch_s(self, fingerprint: str, now: float) -> float:
        """From the creation of its batch at this time to its own end; infinite if it never begins. It executes at the
        end of that, for as long as its answer takes on the synchronous API."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    seconds: float

    def draw(self, rng: random.Random) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Uniform:
    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    median: float
    sigma: float
    floor: float = 0.0

    def draw(self, rng: random.Random) -> float:
        return max(self.floor, self.median * math.exp(rng.gauss(0.0, self.sigma)))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Each part gets its weight's share of the draws: for a heavy tail."""

    parts: tuple[tuple[float, Latency], ...]

    def draw(self, rng: random.Random) -> float:
        point = rng.random() * sum(weight for weight, _ in self.parts)
        for weight, part in self.parts:
            point -= weight
            if point < 0:
                return part.draw(rng)
        return self.parts[-1][1].draw(rng)


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "constant": ("seconds",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma", "floor"),
}
_MAKE: Mapping[str, Callable[..., Latency]] = {"constant": Constant, "uniform": Uniform, "lognormal": LogNormal}
_TERM = re.compile(r"(?:(?P<weight>[0-9.eE-]+)\*)?(?P<name>[a-z]+)(?:\((?P<args>[^()]*)\))")


def parse_latency(text: str) -> Latency:
    """The distribution that `text` names; a ValueError that explains the format if it names none."""
    name, _, rest = text.strip().partition(":")
    try:
        return _mixture(rest) if name == "mixture" else _simple(name, rest)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{text!r} is not a latency: {error}; write for example 'lognormal:median=100,sigma=0.5'"
        ) from error


def _mixture(text: str) -> Latency:
    parts: list[tuple[float, Latency]] = []
    for term in text.replace(" ", "").split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f"cannot read the part {term!r}")
        parts.append((float(match["weight"] or 1), _simple(match["name"], match["args"])))
    if any(weight <= 0 for weight, _ in parts):
        raise ValueError("every weight must be above 0")
    return Mixture(tuple(parts))


def _simple(name: str, args: str) -> Latency:
    if name not in _MAKE:
        raise ValueError(f"unknown distribution {name!r}, known are {', '.join(_MAKE)} and mixture")
    values: dict[str, float] = {}
    for position, arg in enumerate(args.split(",")):
        key, eq, value = arg.partition("=")
        field = key.strip() if eq else _FIELDS[name][position] if position < len(_FIELDS[name]) else "?"
        if field not in _FIELDS[name] or field in values:
            raise ValueError(f"{name} takes {', '.join(_FIELDS[name])}")
        values[field] = float(value if eq else key)
    if any(value < 0 for value in values.values()):
        raise ValueError("values must not be negative")
    return _MAKE[name](**values)
