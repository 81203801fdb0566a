"""Who comes with a virtual key: known in memory, so that no call waits for a look into the store.

The store is asked once a second whether a key was added or ended, by whichever process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from carpool.engine.desk import Desk
from carpool.errors import CarpoolError, KeyRefused
from carpool.keys import KeyState, VirtualKey
from carpool.model import Headers

LOOK_S = 1.0
USE_S = 60.0  # how often a key's last use is written at most

Lender = Callable[[str, str], Sequence[Headers]]  # of a provider and a variable: the key, in each form it is sent in

_WHY: Mapping[KeyState, str] = {
    KeyState.EXPIRED: "has expired",
    KeyState.ROTATED: "was replaced by a new one",
    KeyState.REVOKED: "was revoked",
}


@dataclass(slots=True, eq=False)
class Guest:
    """One key as it stands now. `credentials` are its own, one for each form in which its secret may be sent on."""

    key: VirtualKey
    secrets: Sequence[Headers] = field(default=(), repr=False)
    credentials: Sequence[str] = ()
    used: bool = False  # since the last look

    def lent(self, form: str) -> tuple[Headers, str]:
        """The provider's secret, sent in the header `form` where it may be, and the credential that it goes with."""
        for secret, credential in zip(self.secrets, self.credentials, strict=True):
            if secret[0][0] == form:
                return secret, credential
        return self.secrets[0], self.credentials[0]


class Guests:
    def __init__(self, desk: Desk, enrolled: Callable[[str], None]) -> None:
        self._desk = desk
        self._enrolled = enrolled
        self._lender: Lender = lambda provider, env: ()
        self._watching: asyncio.Task[None] | None = None
        self._looked = 0.0
        self._guests: dict[str, Guest] = {}
        self._written: dict[str, float] = {}
        self._change: int | None = None
        self.epoch = 0  # rises whenever somebody may be let in, or no more

    @property
    def expected(self) -> bool:
        """Whether there are keys that are still good."""
        return any(guest.key.live(self._desk.now()) for guest in self._guests.values())

    async def open(self, lender: Lender) -> None:
        """Reads the keys and takes in what they buy with: batches that were bought with it go on."""
        self._lender = lender
        await self._read()
        self._watching = self._desk.crew.spawn(self._watch(), "keys")

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def find(self, secret: str) -> Guest:
        """Whose key this is. Raises for one that is not good, and not any more."""
        guest = self._guests.get(self._desk.keyring.digest(secret))
        if guest is None:
            raise KeyRefused("carpool does not know this virtual key. Ask whoever runs it for one: carpool keys add.")
        state = guest.key.state(self._desk.now())
        if state in _WHY:
            raise KeyRefused(f"The virtual key {guest.key.name} {_WHY[state]}. Ask whoever runs carpool for a new one.")
        return guest

    # ------------------------------------------------------------ in the background

    async def _watch(self) -> None:
        desk = self._desk
        while True:
            await desk.clock.sleep(LOOK_S)
            try:
                await self._read()
                await self._write_uses()
            except CarpoolError as error:
                desk.trouble("reading the virtual keys", error)

    async def _read(self) -> None:
        found = await self._desk.store.keys(self._change)
        if found is not None:
            self._change, keys = found
            self._guests = {key.digest: self._guest(key) for key in keys}
            self.epoch += 1
        elif self._lapsed():
            self.epoch += 1
        self._looked = self._desk.now()

    def _guest(self, key: VirtualKey) -> Guest:
        """Ended keys too: what was bought with them is still to be collected."""
        desk, secrets = self._desk, self._lender(key.provider, key.env)
        base_url = desk.upstreams[key.provider].base_url if key.provider in desk.upstreams else ""
        credentials = [desk.keyring.lend(key.uid, key.provider, base_url, secret) for secret in secrets]
        passed = [desk.keyring.add(key.provider, base_url, secret) for secret in secrets]  # whoever passes it itself
        for name in [name for name, new in (*credentials, *passed) if new]:
            self._enrolled(name)
        before = self._guests.get(key.digest)
        return Guest(key, secrets, tuple(name for name, _ in credentials), before is not None and before.used)

    def _lapsed(self) -> bool:
        """Whether a key's time ran out since the last look."""
        now = self._desk.now()
        ends = [end for guest in self._guests.values() for end in (guest.key.expires_at, guest.key.ends_at) if end]
        return any(self._looked < end <= now for end in ends)

    async def _write_uses(self) -> None:
        now, uses = self._desk.now(), {}
        for digest, guest in self._guests.items():
            if guest.used and now - self._written.get(digest, 0.0) >= USE_S:
                uses[digest] = self._written[digest] = now
                guest.used = False
        if uses:
            await self._desk.store.used_keys(uses)
