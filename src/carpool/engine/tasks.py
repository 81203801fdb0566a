"""The tasks of this engine: binds calls to the deadline of their task, and counts what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b

from carpool.core.model import Call, Entry, Lane, Outcome, OutcomeKind
from carpool.core.ports import Clock
from carpool.planners.forecast import Forecast
from carpool.planners.tasks import TaskBook

_CONVERSATIONS = 8192  # names cached: every turn of a conversation needs its name


class Tasks:
    """`key` is a secret: the name of a conversation says nothing of its content to those who don't have it."""

    def __init__(self, clock: Clock, key: bytes, forecast: Forecast) -> None:
        self._clock = clock
        self._key = key
        self._forecast = forecast
        self._book = TaskBook()
        self.conversation_name: Callable[[str, int], str] = lru_cache(_CONVERSATIONS)(self._conversation_name)
        self.tickets = self._book.tickets

    def _conversation_name(self, credential: str, conversation: int) -> str:
        """The name of the task of a call that only its conversation tells."""
        text = f"{credential} {conversation}".encode()
        return f"conversation {blake2b(text, digest_size=6, key=self._key).hexdigest()}"

    def bound(self, call: Call) -> Call:
        """The call with the deadline that its task leaves it."""
        return self._book.bound(call, self._clock.now(), self._forecast)

    def asked(self, call: Call, *, again: bool = False) -> None:
        self._book.asked(call, self._clock.now(), again=again)

    def closed(self, entry: Entry, *, answered: bool) -> None:
        """A call that is not on disk has ended, with this purchase."""
        self._book.bought(entry)
        self._book.ended(entry.ticket, self._clock.now(), on_now=entry.lane is Lane.NOW, answered=answered)

    def failed(self, ticket: int) -> None:
        """A call that is not on disk has no answer."""
        self._book.ended(ticket, self._clock.now(), on_now=True, answered=False)

    def settled(self, ticket: int, outcome: Outcome | None, entry: Entry | None) -> None:
        """Something was bought for a call on disk, or it has its outcome."""
        if entry is not None:
            self._book.bought(entry)
        if outcome is not None:
            succeeded = outcome.kind is OutcomeKind.SUCCEEDED
            self._book.ended(ticket, self._clock.now(), on_now=outcome.lane is Lane.NOW, answered=succeeded)
