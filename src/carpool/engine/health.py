"""What does not work at the moment: since when, and after how many attempts. An event is sent when trouble begins,
changes or ends, but not for every attempt."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.core.model import Lane
from carpool.core.ports import Clock, Store
from carpool.engine.events import TroubleBegan, TroubleOver

FORGOTTEN_S = 600.0  # trouble without an attempt for this long counts as new
MOST = 1000  # troubles remembered; the oldest is dropped first

Place = tuple[str, str, str]  # provider, account, activity


@dataclass(slots=True)
class _OngoingTrouble:
    since: float
    last: float
    tries: int
    reason: str


class Troubles:
    """The state of everything that may fail, by provider, account and activity. An unreachable provider is one trouble,
    whichever activity notices."""

    def __init__(self) -> None:
        self._known: dict[Place, _OngoingTrouble] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def failed(self, place: Place, reason: str, now: float, then: str = "") -> TroubleBegan | None:
        """Records a failure. Returns an event if it is new or its reason changed."""
        ongoing = self._known.get(place)
        if ongoing is None or now - ongoing.last > FORGOTTEN_S:
            if len(self._known) >= MOST:
                del self._known[next(iter(self._known))]
            ongoing = self._known[place] = _OngoingTrouble(now, now, 0, "")
        ongoing.last, ongoing.tries = now, ongoing.tries + 1
        if ongoing.reason == reason:
            return None
        ongoing.reason = reason
        provider, account, doing = place
        return TroubleBegan(now, doing, reason, ongoing.since, ongoing.tries, provider, then, credential=account)

    def unreached(self, provider: str) -> bool:
        """Whether this provider is known to be unreachable."""
        return (provider, "", "") in self._known

    def worked(self, place: Place, now: float) -> TroubleOver | None:
        ongoing = self._known.pop(place, None)
        if ongoing is None:
            return None
        provider, account, doing = place
        return TroubleOver(now, doing, ongoing.since, ongoing.tries, provider, credential=account)


# ------------------------------------------------------------ lane refusals
# What providers refuse on principle is remembered for a while, so that it is not requested again.

BELIEVED_S = 3600.0  # an account may get the permission later
_KINDS = {Lane.BATCH: "cannot_batch", Lane.FLEX: "cannot_flex"}
_SAID = {Lane.BATCH: "can't batch", Lane.FLEX: "can't take the lane flex"}


class LaneRefusals:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._refused: dict[tuple[Lane, str], tuple[float, str]] = {}  # lane, account and model → (until, why)

    def why_not(self, lane: Lane, account: str, model: str) -> str | None:
        """Why this account, or this model of it, may not take a lane; None if it was not refused recently."""
        if not self._refused:
            return None
        for key in (account, _key(account, model)):
            until, why = self._refused.get((lane, key), (0.0, ""))
            if until > self._clock.now():
                return why
        return None

    async def refused(self, lane: Lane, account: str, model: str, message: str) -> None:
        """Remembers a refusal. `model` is empty if the whole account was refused."""
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
