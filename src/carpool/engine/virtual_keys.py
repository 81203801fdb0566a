"""Virtual keys, cached in memory, so that no call with a known key waits for the store. The store is polled once a
second for keys that any process added or ended, and read at once for a key that is unknown; last uses are written
behind the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from carpool.core.errors import CarpoolError, KeyRefused
from carpool.core.keys import KeyHolder, KeyState, VirtualKey
from carpool.core.model import Headers
from carpool.engine.context import EngineContext

KEYS_POLL_S = 1.0
USE_S = 60.0  # minimum time between two writes of a key's last use

# Takes a provider and an environment variable; returns the secret in each form in which it may be sent.
SecretLookup = Callable[[str, str], Sequence[Headers]]

_WHY: Mapping[KeyState, str] = {
    KeyState.EXPIRED: "has expired",
    KeyState.ROTATED: "was replaced by a new one",
    KeyState.REVOKED: "was revoked",
}


class VirtualKeyCache:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._find_secrets: SecretLookup = lambda provider, env: ()
        self._watching: asyncio.Task[None] | None = None
        self._polled_at = 0.0
        self._virtual_keys: dict[str, KeyHolder] = {}
        self._written: dict[str, float] = {}
        self._change: int | None = None
        self.epoch = 0  # increases whenever a key may have become valid or invalid

    @property
    def expected(self) -> bool:
        """Whether there are valid keys."""
        return any(holder.key.live(self._context.now()) for holder in self._virtual_keys.values())

    async def open(self, find_secrets: SecretLookup) -> None:
        """Reads the keys and adds their secrets to the keyring, so that batches bought with them continue."""
        self._find_secrets = find_secrets
        await self._read()
        self._watching = self._context.background.spawn(self._watch(), "keys")

    def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def find(self, secret: str) -> KeyHolder:
        """The holder of a key. Raises for a key that is unknown or no longer valid."""
        holder = self._virtual_keys.get(self._context.keyring.digest(secret))
        if holder is None:
            raise KeyRefused("carpool does not know this virtual key. Ask its operator for one: carpool keys add.")
        state = holder.key.state(self._context.now())
        if state in _WHY:
            raise KeyRefused(
                f"The virtual key {holder.key.name} {_WHY[state]}. Ask the operator of carpool for a new one."
            )
        return holder

    async def refresh(self) -> bool:
        """Reads the keys for a request whose key was refused: it may have been added since the last poll. Returns
        whether any key has changed."""
        before = self.epoch
        await self._read()
        return self.epoch != before

    # ------------------------------------------------------------ in the background

    async def _watch(self) -> None:
        context = self._context
        while True:
            await context.clock.sleep(KEYS_POLL_S)
            try:
                await self._read()
                await self._write_uses()
                context.troubles.worked("reading the virtual keys")
            except CarpoolError as error:
                context.trouble("reading the virtual keys", error)

    async def _read(self) -> None:
        changed = await self._context.store.keys(self._change)
        if changed is not None:
            self._change, keys = changed
            self._virtual_keys = {key.digest: self._holder(key) for key in keys}
            self.epoch += 1
        now = self._context.now()
        for holder in self._virtual_keys.values():  # one may have expired since the last poll
            ends = holder.key.expires_at, holder.key.ends_at
            self.epoch += any(end is not None and self._polled_at < end <= now for end in ends)
        self._polled_at = now

    def _holder(self, key: VirtualKey) -> KeyHolder:
        """Ended keys are included, because batches bought with them still have to be collected."""
        context, secrets = self._context, self._find_secrets(key.provider, key.env)
        base_url = context.upstreams[key.provider].base_url if key.provider in context.upstreams else ""
        names: Sequence[str] = ()
        if secrets:
            names, new = context.keyring.add_virtual_key(key.uid, key.provider, base_url, secrets)
            added = context.keyring.add(key.provider, base_url, secrets)  # clients may also send the secret itself
            if new or added:
                context.lead_again()
        before = self._virtual_keys.get(key.digest)
        return KeyHolder(key, secrets, names, before is not None and before.used)

    async def _write_uses(self) -> None:
        now, uses = self._context.now(), {}
        for digest, holder in self._virtual_keys.items():
            if holder.used and now - self._written.get(digest, 0.0) >= USE_S:
                uses[digest] = self._written[digest] = now
                holder.used = False
        if uses:
            await self._context.store.used_keys(uses)
