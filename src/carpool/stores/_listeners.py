"""Who wants to hear of settled tickets, and of calls that came in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Listener = Callable[[Sequence[T]], None]


@dataclass(slots=True, eq=False)  # one listener may subscribe twice: these are two subscriptions
class _Subscription(Generic[T]):
    loop: asyncio.AbstractEventLoop
    listener: Listener[T]
    ended: bool = False

    def hear(self, names: Sequence[T]) -> None:
        if not self.ended:  # it may have ended between the telling and now
            self.listener(names)


class Listeners(Generic[T]):
    """Each hears on the event loop on which it subscribed, after the one who settled has gone on."""

    def __init__(self) -> None:
        self._subscriptions: list[_Subscription[T]] = []

    def __bool__(self) -> bool:
        return bool(self._subscriptions)

    def subscribe(self, listener: Listener[T]) -> Callable[[], None]:
        subscription = _Subscription(asyncio.get_running_loop(), listener)
        self._subscriptions.append(subscription)

        def end() -> None:
            if not subscription.ended:
                subscription.ended = True
                self._subscriptions.remove(subscription)

        return end

    def tell(self, names: Sequence[T]) -> None:
        """No names: some may have gone untold."""
        if not self._subscriptions:
            return
        here = _running_loop()
        for one in tuple(self._subscriptions):
            if one.loop is here:
                one.loop.call_soon(one.hear, names)
                continue
            try:
                one.loop.call_soon_threadsafe(one.hear, names)
            except RuntimeError:  # that loop is closed, nobody is left to be told
                continue


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """None in a thread that has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
