"""Who wants to hear of settled tickets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Listener = Callable[[Sequence[int]], None]


@dataclass(slots=True, eq=False)  # one listener may subscribe twice: these are two subscriptions
class _Subscription:
    loop: asyncio.AbstractEventLoop
    listener: Listener
    ended: bool = False

    def hear(self, tickets: Sequence[int]) -> None:
        if not self.ended:  # it may have ended between the telling and now
            self.listener(tickets)


class Listeners:
    """Each hears on the event loop on which it subscribed, after the one who settled has gone on."""

    def __init__(self) -> None:
        self._subscriptions: list[_Subscription] = []

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        subscription = _Subscription(asyncio.get_running_loop(), listener)
        self._subscriptions.append(subscription)

        def end() -> None:
            if not subscription.ended:
                subscription.ended = True
                self._subscriptions.remove(subscription)

        return end

    def tell(self, tickets: Sequence[int]) -> None:
        if not tickets or not self._subscriptions:
            return
        here = asyncio.get_running_loop()
        for one in tuple(self._subscriptions):
            if one.loop is here:
                here.call_soon(one.hear, tickets)
                continue
            try:
                one.loop.call_soon_threadsafe(one.hear, tickets)
            except RuntimeError:  # that loop is closed, nobody is left to be told
                continue
