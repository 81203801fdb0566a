"""Track which conversations are warm on `now`: their last turn was sent there within the lifetime of the prompt cache.

Moving such a turn to a batch would save half the price but lose the cached prefix, which costs a tenth. Until the price
of a lane includes its cache, a warm conversation stays on `now`.
"""

from __future__ import annotations

from collections import OrderedDict

from carpool.core.model import Call, Lane
from carpool.planners.routing import Decision

MOST = 50_000  # conversations to remember; the least recently used is forgotten first


class WarmConversations:
    """An LRU cache of conversations and when their prompt cache expires. The caller passes the time."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._until: OrderedDict[tuple[str, int], float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def went(self, credential: str, conversation: int, life: float, now: float) -> None:
        """A turn was sent on `now`: its prompt cache lives for `life` seconds."""
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


def kept_warm(call: Call, decision: Decision, warmth: WarmConversations, now: float) -> Decision:
    """Keep a warm conversation on `now`, and record every turn that is sent there."""
    turn = call.turn
    if turn is None:
        return decision
    if decision.lane is not Lane.NOW:
        chosen = call.lane is not None  # a lane that the client or a rule chose is respected
        if chosen or turn.opening or not warmth.warm(call.credential, turn.conversation, now):
            return decision
        decision = Decision(Lane.NOW, "Its conversation is warm on now.")
    warmth.went(call.credential, turn.conversation, turn.cache_life, now)
    return decision
