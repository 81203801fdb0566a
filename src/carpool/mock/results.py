"""The result lines of an ended batch, in no useful order, rendered as they are asked for."""

import random
from collections.abc import Iterator

import msgspec

from carpool.mock.answers import message
from carpool.mock.batch import Batch, Outcome
from carpool.mock.digest import Failure
from carpool.mock.errors import error_body

_encode = msgspec.json.Encoder().encode


def lines(batch: Batch) -> Iterator[bytes]:
    """Every line, the batch's line faults applied. The order is the same at every fetch."""
    order = list(range(batch.size))
    random.Random(batch.seed).shuffle(order)  # noqa: S311 - a simulation, not a secret
    faults = batch.line_faults
    missing, double = faults["line_missing"], faults["line_duplicate"]
    unknown, malformed = faults["line_unknown"], faults["line_malformed"]
    for index in order:
        if index in missing:
            continue
        line = _line(batch, index)
        yield line[: len(line) // 2] + b"\n" if index in malformed else line
        if index in double:
            yield line
        if index in unknown:
            yield _encode({"custom_id": f"unknown-{index}", "result": {"type": "canceled"}}) + b"\n"


def chunks(batch: Batch, size: int = 500) -> Iterator[bytes]:
    part: list[bytes] = []
    for line in lines(batch):
        part.append(line)
        if len(part) == size:
            yield b"".join(part)
            part.clear()
    if part:
        yield b"".join(part)


def _line(batch: Batch, index: int) -> bytes:
    return _encode({"custom_id": batch.custom_ids[index], "result": _result(batch, index)}) + b"\n"


def _result(batch: Batch, index: int) -> dict[str, object]:
    outcome, request, usage = batch.outcomes[index], batch.requests[index], batch.usages[index]
    if outcome == Outcome.ERRORED:
        kind, text = _error(batch, index)
        return {"type": "errored", "error": error_body(kind, text, f"req_{batch.tag}{index:06x}")}
    if outcome == Outcome.SUCCEEDED and usage is not None and not isinstance(request, Failure):
        return {"type": "succeeded", "message": message(request, usage, f"msg_{batch.tag}{index:06x}", "batch")}
    return {"type": Outcome(outcome).name.lower()}


def _error(batch: Batch, index: int) -> tuple[str, str]:
    request = batch.requests[index]
    if isinstance(request, Failure):
        return request.kind, request.message
    if index in batch.line_faults["line_overloaded"]:
        return "overloaded_error", "Overloaded"
    return "api_error", "Internal server error"
