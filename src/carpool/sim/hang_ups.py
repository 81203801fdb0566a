"""How the clients of a world disconnect and return: at any moment, any number of times. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

AT_ONCE_S = 0.5  # a client that returns sooner reaches the same process


class Cut(StrEnum):
    """How a response ends whose client disconnects in the middle of it."""

    UNREAD = "unread"  # it was not acknowledged to the end
    RESET = "reset"  # it was acknowledged, and then the connection was reset


@dataclass(frozen=True, slots=True)
class HangUp:
    """How a client abandons one of its attempts."""

    after: float | None = None  # seconds after its request, if there is no response by then
    cut: Cut | None = None  # in the middle of the response
    away: float | None = None  # seconds until it returns; None: as after any failure
    marked: bool = False  # its next request is marked as a retry
    back: bool = True  # whether it returns at all


def one_timeout(after: float | None) -> tuple[HangUp, ...]:
    """A client that times out once."""
    return () if after is None else (HangUp(after),)


def random_hang_ups(rng: random.Random) -> tuple[HangUp, ...]:
    """A client that abandons its first attempts at random moments, sometimes for good."""
    count = rng.choice([0, 0, 0, 1, 1, 2, 4])
    hang_ups = [_hang_up(rng) for _ in range(count)]
    if hang_ups and rng.random() < 0.05:
        hang_ups[-1] = HangUp(hang_ups[-1].after, hang_ups[-1].cut, back=False)
    return tuple(hang_ups)


def _hang_up(rng: random.Random) -> HangUp:
    after = rng.choice([None, None, 0.0, 0.05, 0.6, 5.0, 200.0])
    cut = rng.choice(list(Cut))
    away = rng.choice([0.0, 0.02, 0.1, 0.5, 1.0, 30.0, 300.0])
    return HangUp(None if after is None else after * rng.random(), cut, away, rng.random() < 0.5)
