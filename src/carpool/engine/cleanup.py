"""Cleanup: deletes old calls, the provider's files, and on close the batches of an in-memory store."""

from __future__ import annotations

from collections.abc import Iterable

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BOUGHT
from carpool.core.model import Batch
from carpool.core.upstream import Upstream, whole
from carpool.engine.context import EngineContext

RETAIN_EVERY_S = 600.0
RETAIN_STEP = 1000
UNDELIVERED_DAYS = 29.0  # the longest time a provider keeps results
DAY_S = 86_400.0


class Cleanup:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._retain_at = 0.0

    async def step(self, now: float) -> float:
        if now >= self._retain_at:
            self._retain_at = now + await self._retain(now)
        return self._retain_at

    async def _retain(self, now: float) -> float:
        """Removes old calls in small steps. Returns the seconds until the next step."""
        before = now - self._context.policy.retain_days * DAY_S
        removed = await self._context.store.retain(before, now - UNDELIVERED_DAYS * DAY_S, RETAIN_STEP)
        return 1.0 if removed >= RETAIN_STEP else RETAIN_EVERY_S

    async def stop(self) -> None:
        """Leaves the store. Batches of an in-memory store can't be collected later, so they are cancelled."""
        context = self._context
        try:
            if not context.store.durable:
                for batch in await context.store.batches(context.name):
                    if batch.state in BOUGHT and batch.provider_id is not None:
                        upstream = context.upstreams[batch.key.provider]
                        ask = upstream.dialect.cancel(batch.key.headers, batch.provider_id)
                        secret = context.keyring.secret(batch.key.credential)
                        await whole(await upstream.ask(ask, secret, timeout=5.0))
        except CarpoolError as error:
            context.trouble("cancelling batches at close", error)
        try:
            await context.store.leave(context.name)
        except CarpoolError as error:  # its pulse runs out by itself, and waiting clients must still be notified
            context.trouble("leaving the store", error)


# ------------------------------------------------------------ provider files
# Files that a batch needed at the provider are deleted when they are no longer needed.

SILENCE_S = 30.0


async def sweep(context: EngineContext, batch: Batch, upstream: Upstream, files: Iterable[str]) -> None:
    """Deletes files of a batch that is surely ours. Files that can't be deleted expire at the provider."""
    if not context.policy.delete_provider_files:
        return
    for file_id in files:
        ask = upstream.dialect.forget(batch.key.headers, file_id)
        if ask is None:
            continue
        try:
            await context.turn(batch.key.credential)
            await whole(await upstream.ask(ask, context.keyring.secret(batch.key.credential), timeout=SILENCE_S))
        except CarpoolError as error:
            context.trouble("deleting a provider's file", error)
