"""One seed, several random streams: polling more often must not change the outcome of the next batch."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dice:
    ids: random.Random
    batches: random.Random
    sync: random.Random
    control: random.Random
    faults: random.Random
    openai: random.Random
    hooks: random.Random
    files: random.Random


def dice(seed: int) -> Dice:
    root = random.Random(seed)  # noqa: S311 - a simulation, not a secret
    return Dice(*(random.Random(root.getrandbits(64)) for _ in range(8)))  # noqa: S311
