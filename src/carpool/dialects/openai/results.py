"""One line of a batch's output file, or of its error file."""

from __future__ import annotations

import msgspec

from carpool.dialects.openai import errors, usage
from carpool.errors import Garbled
from carpool.ports import ResultLine


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw(b"")

    def __repr__(self) -> str:  # never the body
        return f"<{type(self).__name__} {self.status_code}>"


class _Error(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_LINE = msgspec.json.Decoder(_Line)
_UNRUN = {  # as providers spell them
    "batch_expired": ("expired", 504, "timeout_error", "The batch expired before this request was processed."),
    "batch_cancelled": (
        "canceled",
        409,
        "conflict_error",
        "The batch was cancelled before this request was processed.",
    ),
}
_UNRUN["batch_canceled"] = _UNRUN["batch_cancelled"]


def result_line(line: bytes) -> ResultLine:
    try:
        read = _LINE.decode(line)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"A result line can't be understood: {error}.") from None
    if read.response is not None and read.response.status_code:
        return _answered(read.custom_id, read.response)
    if read.error is not None:
        return _unanswered(read.custom_id, read.error)
    raise Garbled("A result line carries neither a response nor an error.")


def _answered(custom_id: str, response: _Response) -> ResultLine:
    status, body = response.status_code, bytes(response.body)
    if 200 <= status < 300:
        if not body.startswith(b"{"):
            raise Garbled("A result line says that its call succeeded, but carries no answer.")
        model, used = usage.model_and_usage(body)
        return ResultLine(custom_id, "succeeded", 200, body, model, used, False)
    if not 400 <= status < 600:
        raise Garbled(f"A result line has the status {status}, which is neither an answer nor an error.")
    read = errors.read(body)
    if read is None:
        body = errors.error(status, "", f"The batch answered this request with {status}.")
    return ResultLine(custom_id, "errored", status, body, "", None, errors.is_passing(status, read))


def _unanswered(custom_id: str, error: _Error) -> ResultLine:
    """The request never ran. Why not is the batch's affair, so another one may run it."""
    result, status, code, said = _UNRUN.get(error.code or "", ("errored", 500, error.code or "server_error", ""))
    body = errors.error(status, code, error.message or said or "The batch did not run this request.")
    return ResultLine(custom_id, result, status, body, "", None, True)
