"""One line of a batch's results."""

from __future__ import annotations

import msgspec

from carpool.dialects.anthropic import errors, usage
from carpool.errors import Garbled
from carpool.ports import ResultLine


class _Result(msgspec.Struct, gc=False):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct, gc=False):
    custom_id: str
    result: _Result


_LINE = msgspec.json.Decoder(_Line)
_EXPIRED = errors.error(504, "timeout_error", "The batch expired before this request was processed.")
_CANCELED = errors.error(409, "conflict_error", "The batch was canceled before this request was processed.")


def result_line(line: bytes) -> ResultLine:
    try:
        read = _LINE.decode(line)
    except (ValueError, RecursionError) as error:
        raise Garbled(f"A result line can't be understood: {error}.") from None
    result = read.result
    match result.type:
        case "succeeded":
            message = bytes(result.message)
            if not message.startswith(b"{"):
                raise Garbled("A result line says that its call succeeded, but carries no message.")
            model, used = usage.model_and_usage(message)
            return ResultLine(read.custom_id, "succeeded", 200, message, model, used, False)
        case "errored":
            return _errored(read.custom_id, bytes(result.error))
        case "expired":
            return ResultLine(read.custom_id, "expired", 504, _EXPIRED, "", None, True)
        case "canceled":
            return ResultLine(read.custom_id, "canceled", 409, _CANCELED, "", None, True)
        case other:
            raise Garbled(f"A result line is of the unknown type {other[:40]!r}.")


def _errored(custom_id: str, raw: bytes) -> ResultLine:
    read = errors.read(raw)
    if read is None:
        raise Garbled("A result line says that its call failed, but carries no error.")
    return ResultLine(custom_id, "errored", errors.status_of(read), read.body, "", None, errors.is_passing(read))
