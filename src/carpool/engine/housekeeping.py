"""Retention, and the end of a store in memory: what keeps an engine honest between purchases."""

from __future__ import annotations

from carpool.engine.desk import Desk
from carpool.engine.upstream import whole
from carpool.errors import CarpoolError
from carpool.lifecycle import BOUGHT

RETAIN_EVERY_S = 600.0
RETAIN_STEP = 1000
UNDELIVERED_DAYS = 29.0  # as long as the longest provider keeps results
DAY_S = 86_400.0


class Housekeeper:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._retain_at = 0.0

    async def step(self, now: float) -> float:
        if now >= self._retain_at:
            self._retain_at = now + await self._retain(now)
        return self._retain_at

    async def _retain(self, now: float) -> float:
        """Removes old calls in small steps; says how long until the next."""
        before = now - self._desk.policy.retain_days * DAY_S
        removed = await self._desk.store.retain(before, now - UNDELIVERED_DAYS * DAY_S, RETAIN_STEP)
        return 1.0 if removed >= RETAIN_STEP else RETAIN_EVERY_S

    async def stop(self) -> None:
        """Batches of a store in memory can never be collected again: what did not run yet should not be billed."""
        desk = self._desk
        try:
            if not desk.store.durable:
                for batch in await desk.store.batches(desk.name):
                    if batch.state in BOUGHT and batch.provider_id is not None:
                        upstream = desk.upstreams[batch.key.provider]
                        ask = upstream.dialect.cancel(batch.key.headers, batch.provider_id)
                        secret = desk.keyring.secret(batch.key.credential)
                        await whole(await upstream.ask(ask, secret, timeout=5.0))
        except CarpoolError as error:
            desk.trouble("cancelling batches at close", error)
        try:
            await desk.store.leave(desk.name)
        except CarpoolError as error:  # then its pulse stops by itself, and whoever waits must be told all the same
            desk.trouble("leaving the store", error)
