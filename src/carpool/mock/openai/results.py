"""The lines of OpenAI's output and error files, rendered on request."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from carpool.mock.core.batch import Outcome
from carpool.mock.core.errors import ApiError
from carpool.mock.core.lines import told
from carpool.mock.openai.batch import OpenAIBatch, Refused
from carpool.mock.openai.digest import Asked
from carpool.mock.openai.errors import error_body
from carpool.mock.openai.providers import TABLE
from carpool.mock.openai.sale import answer, name_of

_encode = msgspec.json.Encoder().encode
_NEVER_RAN = {
    Outcome.EXPIRED: ("batch_expired", "This request could not be executed before the completion window expired."),
    Outcome.CANCELED: ("batch_cancelled", "This request was not executed: its batch was cancelled."),
}


def output_lines(batch: OpenAIBatch) -> Iterator[bytes]:
    """Lines of requests that succeeded."""
    forgotten = batch.outcomes.find(Outcome.SUCCEEDED) if batch.forgets else -1
    return told(
        batch,
        lambda index: _line(batch, index),
        lambda index: _unknown(batch, index),
        lambda index: batch.outcomes[index] == Outcome.SUCCEEDED and index != forgotten,
    )


def error_lines(batch: OpenAIBatch) -> Iterator[bytes]:
    """Lines of requests that failed or never ran."""
    return filter(
        None,
        told(
            batch,
            lambda index: _line(batch, index),
            lambda index: _unknown(batch, index),
            lambda index: batch.outcomes[index] != Outcome.SUCCEEDED,
        ),
    )


def all_results(batch: OpenAIBatch) -> Iterator[dict[str, Any]]:
    """For results that are not in files. Lines that are not JSON can't be shown there."""
    for line in (*output_lines(batch), *error_lines(batch)):
        with suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line)


def _line(batch: OpenAIBatch, index: int) -> bytes:
    outcome = Outcome(batch.outcomes[index])
    error = None
    if outcome in _NEVER_RAN:
        code, message = _NEVER_RAN[outcome]
        error = {"code": code, "message": message}
    unique = f"{batch.tag}{index:06x}"
    return _tell(batch, unique, batch.custom_ids[index], None if error else _response(batch, index, unique), error)


def _unknown(batch: OpenAIBatch, index: int) -> bytes:
    error = {"code": "batch_cancelled", "message": "Nobody knows this request."}
    response = None if batch.house == "openai" else {"status_code": 400, "body": error_body(ApiError("api_error", ""))}
    return _tell(batch, f"{batch.tag}{index:06x}", f"unknown-{index}", response, error)


def _tell(batch: OpenAIBatch, unique: str, custom_id: str, response: object, error: object) -> bytes:
    line = TABLE[batch.house].line(unique, custom_id, response, error)
    return b"" if line is None else _encode(line) + b"\n"


def _response(batch: OpenAIBatch, index: int, unique: str) -> dict[str, object]:
    request, usage = batch.requests[index], batch.usages[index]
    if isinstance(request, Asked) and usage is not None:
        body = answer(request, usage, name_of(request, unique), int(batch.ends[index]))
        return {"status_code": 200, "request_id": f"req_{unique}", "body": body}
    if isinstance(request, Refused):
        return {"status_code": request.status, "request_id": f"req_{unique}", "body": request.body}
    overloaded = index in batch.line_faults["line_overloaded"]
    fault = ApiError("overloaded_error", "Overloaded") if overloaded else ApiError("api_error", "Internal server error")
    habits = TABLE[batch.house]
    return {"status_code": habits.status(fault), "request_id": f"req_{unique}", "body": habits.error(fault)}
