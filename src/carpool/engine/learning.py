"""What providers refused on principle: remembered for a while, so that nobody has to be refused twice."""

from __future__ import annotations

from carpool.model import Lane
from carpool.ports import Clock, Store

BELIEVED_S = 3600.0  # an account may be given what it did not have
_KINDS = {Lane.BATCH: "cannot_batch", Lane.FLEX: "cannot_flex"}
_SAID = {Lane.BATCH: "can't batch", Lane.FLEX: "can't take the lane flex"}


class Learned:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._refused: dict[tuple[Lane, str], tuple[float, str]] = {}  # lane, account and model → (until, why)

    def why_not(self, lane: Lane, account: str, model: str) -> str | None:
        """Why this account, or this model of it, may not take a lane; None when nobody refused it lately."""
        if not self._refused:
            return None
        for key in (account, _key(account, model)):
            until, why = self._refused.get((lane, key), (0.0, ""))
            if until > self._clock.now():
                return why
        return None

    async def refused(self, lane: Lane, account: str, model: str, message: str) -> None:
        """`model` is empty where the whole account was refused."""
        key, now = _key(account, model), self._clock.now()
        self._note(lane, key, now + BELIEVED_S, message)
        await self._store.remember(_KINDS[lane], key, f"{now + BELIEVED_S} {message}", now)

    async def recall(self) -> None:
        for lane, kind in _KINDS.items():
            for key, memo in (await self._store.recall(kind)).items():
                until, _, message = memo.partition(" ")
                self._note(lane, key, float(until), message)

    def _note(self, lane: Lane, key: str, until: float, message: str) -> None:
        _, _, model = key.partition(" ")
        who = f"the model {model}" if model else "this credential"
        self._refused[lane, key] = (until, f"{who} {_SAID[lane]}: {message}")


def _key(account: str, model: str) -> str:
    return f"{account} {model}" if model else account
