"""One family of errors. Each says whose fault it is, whether a retry helps, and which HTTP status fits.

CarpoolError
├── BadCall                  the caller's request is wrong (400)
│   ├── NoProvider           nothing says, or knows, which provider it is for (404)
│   ├── CallTooLarge         over a byte or token limit (413)
│   ├── KeyConflict          the same key came with another body (409)
│   ├── KeyRefused           the API key of this request is not good here (401)
│   ├── KeyForbidden         its key may not do this (403)
│   ├── Misdirected          carpool is asked under a name that is not its own (421)
│   └── BadParams            un-serialisable or unknown parameters (also a TypeError)
├── Misuse                   carpool is used in a way that can't work
│   ├── NotStarted           submit before `async with`
│   ├── Closed               the dispatcher is closed; the call is kept where the store is a file
│   │   └── Crowded          too many calls wait already (429)
│   └── WrongClient          not a client that carpool can send through (also a TypeError)
├── KeyUnready               what a virtual key buys with is not set, or not configured
├── ConfigError              a setting is wrong (also a ValueError)
├── StoreError               the store can't do its work
│   ├── StoreUnwritable · StoreLocked · StoreAway · StoreCorrupt · StoreTooNew · WrongSecret
│   ├── Undecided            not known yet: whether the client of an equal call is gone
│   └── IllegalMove          a transition that the lifecycle table forbids: a bug, never input
├── WireError                the provider could not be asked
│   ├── NotConnected         provably nothing was sent
│   │   ├── TooBusy          held back: the account's rate limit is reached (429)
│   │   └── Unwell           held back: the provider fails again and again (503)
│   └── Severed              something was sent, no whole answer came: the outcome is unknown
│       └── TimedOut
├── Garbled                  the provider's answer can't be understood
│   └── ResultsGone          it does not have the results of a batch any more
└── CallFailed               an accepted call ended without an answer; carries its ticket
    └── CallExpired · CallCancelled · CallLost · DeadlineMissed
"""

from __future__ import annotations

from typing import ClassVar, Literal

Fault = Literal["caller", "provider", "carpool", "machine"]


class CarpoolError(Exception):
    """Base of everything that carpool raises on purpose."""

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


class BadParams(BadCall, TypeError):
    pass


class Misuse(CarpoolError):
    fault: ClassVar[Fault] = "caller"


class NotStarted(Misuse):
    pass


class Closed(Misuse):
    status = 503
    retryable = True

    def __init__(self, message: str, ticket: str | None = None) -> None:
        super().__init__(message)
        self.ticket = ticket


class Crowded(Closed):
    status = 429
    code = "rate_limit_error"


class WrongClient(Misuse, TypeError):
    pass


class KeyUnready(CarpoolError):
    fault: ClassVar[Fault] = "machine"
    status = 503


class ConfigError(CarpoolError, ValueError):
    fault: ClassVar[Fault] = "caller"


class StoreError(CarpoolError):
    fault: ClassVar[Fault] = "machine"
    status = 503


class StoreUnwritable(StoreError):
    pass


class StoreLocked(StoreError):
    retryable = True


class StoreAway(StoreError):
    retryable = True


class StoreCorrupt(StoreError):
    pass


class StoreTooNew(StoreError):
    pass


class WrongSecret(StoreError):
    pass


class Undecided(StoreError):
    retryable = True


class IllegalMove(StoreError):
    fault: ClassVar[Fault] = "carpool"


class WireError(CarpoolError):
    fault: ClassVar[Fault] = "provider"
    retryable = True
    status = 502


class NotConnected(WireError):
    pass


class TooBusy(NotConnected):
    status = 429
    code = "rate_limit_error"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unwell(NotConnected):
    status = 503
    code = "overloaded_error"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Severed(WireError):
    pass


class TimedOut(Severed):
    status = 504
    code = "timeout_error"


class Garbled(CarpoolError):
    fault: ClassVar[Fault] = "provider"
    status = 502


class ResultsGone(Garbled):
    pass


class CallFailed(CarpoolError):
    """An accepted call that ended without an answer. `ticket` names it."""

    fault: ClassVar[Fault] = "provider"
    status = 502

    def __init__(self, message: str, ticket: str) -> None:
        super().__init__(message, ticket)  # both, so that it survives pickling
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


class CallLost(CallFailed):
    pass


class DeadlineMissed(CallFailed):
    status = 504
    code = "timeout_error"
