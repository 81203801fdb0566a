"""The result lines of an ended batch, rendered on request."""

from collections.abc import Iterator

import msgspec

from carpool.mock.anthropic.answers import message
from carpool.mock.anthropic.digest import Failure
from carpool.mock.anthropic.message_batch import MessageBatch
from carpool.mock.core.batch import Outcome
from carpool.mock.core.errors import error_body
from carpool.mock.core.lines import bundled, told

_encode = msgspec.json.Encoder().encode


def lines(batch: MessageBatch) -> Iterator[bytes]:
    """Every line, with the batch's line faults applied. Every fetch has the same order."""
    return told(batch, lambda index: _line(batch, index), _unknown)


def chunks(batch: MessageBatch, size: int = 500) -> Iterator[bytes]:
    return bundled(lines(batch), size)


def _unknown(index: int) -> bytes:
    return _encode({"custom_id": f"unknown-{index}", "result": {"type": "canceled"}}) + b"\n"


def _line(batch: MessageBatch, index: int) -> bytes:
    return _encode({"custom_id": batch.custom_ids[index], "result": _result(batch, index)}) + b"\n"


def _result(batch: MessageBatch, index: int) -> dict[str, object]:
    outcome, request, usage = batch.outcomes[index], batch.requests[index], batch.usages[index]
    if outcome == Outcome.ERRORED:
        kind, text = _error(batch, index)
        return {"type": "errored", "error": error_body(kind, text, f"req_{batch.tag}{index:06x}")}
    if outcome == Outcome.SUCCEEDED and usage is not None and not isinstance(request, Failure):
        return {"type": "succeeded", "message": message(request, usage, f"msg_{batch.tag}{index:06x}", "batch")}
    return {"type": Outcome(outcome).name.lower()}


def _error(batch: MessageBatch, index: int) -> tuple[str, str]:
    request = batch.requests[index]
    if isinstance(request, Failure):
        return request.kind, request.message
    if index in batch.line_faults["line_overloaded"]:
        return "overloaded_error", "Overloaded"
    return "api_error", "Internal server error"
