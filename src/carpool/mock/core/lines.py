"""Result lines of an ended batch, in random order, with the faults drawn for its lines."""

import random
from collections.abc import Callable, Iterator

from carpool.mock.core.batch import Batch

Render = Callable[[int], bytes]


def told(
    batch: Batch, line: Render, unknown: Render, among: Callable[[int], bool] = lambda index: True
) -> Iterator[bytes]:
    """Every line of the requests `among`. Every fetch has the same order."""
    order = list(range(batch.size))
    random.Random(batch.seed).shuffle(order)  # noqa: S311 - a simulation, not a secret
    faults = batch.line_faults
    missing, double = faults["line_missing"], faults["line_duplicate"]
    surplus, malformed = faults["line_unknown"], faults["line_malformed"]
    for index in order:
        if index in missing or not among(index):
            continue
        whole = line(index)
        yield whole[: len(whole) // 2] + b"\n" if index in malformed else whole
        if index in double:
            yield whole
        if index in surplus:
            yield unknown(index)


def bundled(lines: Iterator[bytes], size: int) -> Iterator[bytes]:
    part: list[bytes] = []
    for line in lines:
        part.append(line)
        if len(part) == size:
            yield b"".join(part)
            part.clear()
    if part:
        yield b"".join(part)
