"""All errors of carpool. Each class states whose fault it is, whether a retry helps, and its HTTP status.

CarpoolError
├── BadCall                  the caller's request is wrong (400)
│   ├── NoProvider           the request names no provider, or an unknown one (404)
│   ├── CallTooLarge         over a byte or token limit (413)
│   ├── KeyConflict          the same idempotency key was used with a different body (409)
│   ├── KeyRefused           the API key of this request is invalid (401)
│   ├── KeyForbidden         the API key is not allowed to do this (403)
│   ├── Misdirected          the request's Host is not one of carpool's names (421)
│   └── BadParams            un-serialisable or unknown parameters (also a TypeError)
├── Misuse                   carpool's API is used in a way that can't work
│   ├── NotStarted           submit before `async with`
│   ├── Closed               the dispatcher is closed; the call is kept if the store is durable
│   │   └── TooManyWaiting          too many calls are waiting (429)
│   └── WrongClient          not a client that carpool can send through (also a TypeError)
├── KeyUnready               the provider key behind a virtual key is not set, or not configured
├── ConfigError              a setting is wrong (also a ValueError)
├── StoreError               the store can't do its work
│   ├── StoreUnwritable · StoreLocked · StoreAway · StoreCorrupt · StoreTooNew · WrongSecret
│   ├── Undecided            not known yet whether the client of an equal call is gone; retry
│   └── IllegalMove          a transition that the lifecycle table forbids: a bug, never input
├── WireError                the HTTP request to the provider failed
│   ├── NotConnected         provably nothing was sent
│   │   ├── TooBusy          not sent: the account's rate limit is reached (429)
│   │   └── ProviderFailing           not sent: the provider keeps failing (503)
│   └── ConnectionBroken              sent, but no complete response arrived: the outcome is unknown
│       └── TimedOut
├── MalformedResponse                  the provider's response can't be parsed
│   └── ResultsGone          the provider no longer has the results of a batch
└── CallFailed               an accepted call ended without an answer; carries its ticket
    └── CallExpired · CallCancelled · CallLost · DeadlineMissed
"""

from __future__ import annotations

import traceback
from typing import ClassVar, Literal

Fault = Literal["caller", "provider", "carpool", "machine"]


class CarpoolError(Exception):
    """Base class of every exception that carpool raises on purpose."""

    fault: ClassVar[Fault] = "carpool"
    retryable: ClassVar[bool] = False
    status: ClassVar[int] = 500
    code: ClassVar[str] = "api_error"


class BadCall(CarpoolError):
    fault: ClassVar[Fault] = "caller"
    status = 400
    code = "invalid_request_error"


class NoProvider(BadCall):
    status = 404
    code = "not_found_error"


class CallTooLarge(BadCall):
    status = 413
    code = "request_too_large"


class KeyConflict(BadCall):
    status = 409
    code = "conflict_error"


class KeyRefused(BadCall):
    status = 401
    code = "authentication_error"


class KeyForbidden(BadCall):
    status = 403
    code = "permission_error"


class Misdirected(BadCall):
    status = 421


class BadParams(BadCall, TypeError): ...


class Misuse(CarpoolError):
    fault: ClassVar[Fault] = "caller"


class NotStarted(Misuse): ...


class Closed(Misuse):
    status = 503
    retryable = True

    def __init__(self, message: str, ticket: str | None = None) -> None:
        super().__init__(message)
        self.ticket = ticket


class TooManyWaiting(Closed):
    status = 429
    code = "rate_limit_error"


class WrongClient(Misuse, TypeError): ...


class KeyUnready(CarpoolError):
    fault: ClassVar[Fault] = "machine"
    status = 503


class ConfigError(CarpoolError, ValueError):
    fault: ClassVar[Fault] = "caller"


class StoreError(CarpoolError):
    fault: ClassVar[Fault] = "machine"
    status = 503


class StoreUnwritable(StoreError): ...


class StoreLocked(StoreError):
    retryable = True


class StoreAway(StoreError):
    retryable = True


class StoreCorrupt(StoreError): ...


class StoreTooNew(StoreError): ...


class WrongSecret(StoreError): ...


class Undecided(StoreError):
    retryable = True


class IllegalMove(StoreError):
    fault: ClassVar[Fault] = "carpool"


class WireError(CarpoolError):
    fault: ClassVar[Fault] = "provider"
    retryable = True
    status = 502


class NotConnected(WireError): ...


class TooBusy(NotConnected):
    status = 429
    code = "rate_limit_error"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ProviderFailing(NotConnected):
    status = 503
    code = "overloaded_error"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConnectionBroken(WireError): ...


class TimedOut(ConnectionBroken):
    status = 504
    code = "timeout_error"


class MalformedResponse(CarpoolError):
    fault: ClassVar[Fault] = "provider"
    status = 502


class ResultsGone(MalformedResponse): ...


class CallFailed(CarpoolError):
    """An accepted call ended without an answer. `ticket` identifies the call."""

    fault: ClassVar[Fault] = "provider"
    status = 502

    def __init__(self, message: str, ticket: str) -> None:
        super().__init__(message, ticket)  # both arguments, so that the exception can be pickled
        self.ticket = ticket

    def __str__(self) -> str:
        return str(self.args[0])


class CallExpired(CallFailed):
    status = 504
    code = "timeout_error"


class CallCancelled(CallFailed):
    fault: ClassVar[Fault] = "caller"
    status = 409
    code = "conflict_error"


class CallLost(CallFailed): ...


class DeadlineMissed(CallFailed):
    status = 504
    code = "timeout_error"


# ------------------------------------------------------------ errors in logs
# Type and location, and the message only of carpool's own errors: the message of any other exception may quote the
# value that caused it, and that may be a key or a prompt.

MAX_FRAMES = 30


def error_name(error: BaseException) -> str:
    """Describes an exception in one line: type and message, or type and location."""
    if isinstance(error, CarpoolError):
        return f"{type(error).__name__}: {error}"
    last = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    return type(error).__name__ + (f" at {last.filename}:{last.lineno} in {last.name}" if last else "")


def plain_message(error: BaseException) -> str:
    """Returns the message of one of carpool's errors; for any other exception, type and location."""
    return str(error) if isinstance(error, CarpoolError) else error_name(error)


def safe_traceback(error: BaseException) -> str:
    """Formats the stack frames of an exception and of its causes, without source lines or values."""
    texts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = traceback.extract_tb(current.__traceback__)[-MAX_FRAMES:]
        lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
        texts.append("\n".join([*lines, error_name(current)]))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhich came of this:\n".join(texts)
