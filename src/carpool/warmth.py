"""Which conversations are warm on `now`: their last turn went there within the life of the provider's cache.

To move such a turn into a batch would save half the price and lose the cached prefix, which costs a tenth. Until lanes
are priced with their caches, a warm conversation stays where it is.
"""

from __future__ import annotations

from collections import OrderedDict

from carpool.model import Call, Lane
from carpool.routing import Decision

MOST = 50_000  # conversations remembered; the one that was silent longest is forgotten first


class Warmth:
    """No clock of its own: the time is handed in."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._until: OrderedDict[tuple[str, int], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def went(self, credential: str, conversation: int, life: float, now: float) -> None:
        """A turn went on `now`: what it read or wrote lives so long."""
        key = (credential, conversation)
        self._until[key] = max(now + life, self._until.get(key, 0.0))
        self._until.move_to_end(key)
        if len(self._until) > self._most:
            self._until.popitem(last=False)

    def warm(self, credential: str, conversation: int, now: float) -> bool:
        key = (credential, conversation)
        until = self._until.get(key)
        if until is None:
            return False
        if until <= now:
            del self._until[key]
            return False
        return True


def kept_warm(call: Call, decision: Decision, warmth: Warmth, now: float) -> Decision:
    """The decision, unless it would take a warm conversation off `now`. What goes there is remembered."""
    turn = call.turn
    if turn is None:
        return decision
    if decision.lane is not Lane.NOW:
        chosen = call.lane is not None  # by its client or by a rule: then it is obeyed
        if chosen or turn.opening or not warmth.warm(call.credential, turn.conversation, now):
            return decision
        decision = Decision(Lane.NOW, "Its conversation is warm on now.")
    warmth.went(call.credential, turn.conversation, turn.cache_life, now)
    return decision
