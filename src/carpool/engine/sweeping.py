"""Leaving nothing behind: files that a batch needed at the provider are deleted when nobody needs them any more."""

from __future__ import annotations

from collections.abc import Iterable

from carpool.engine.desk import Desk
from carpool.engine.upstream import Upstream, whole
from carpool.errors import CarpoolError
from carpool.model import Batch

SILENCE_S = 30.0


async def sweep(desk: Desk, batch: Batch, upstream: Upstream, files: Iterable[str]) -> None:
    """Only files of a batch that is surely ours. What can't be deleted expires at the provider by itself."""
    if not desk.policy.delete_provider_files:
        return
    for file_id in files:
        ask = upstream.dialect.forget(batch.key.headers, file_id)
        if ask is None:
            continue
        try:
            await desk.turn(batch.key.credential)
            await whole(await upstream.ask(ask, desk.keyring.secret(batch.key.credential), timeout=SILENCE_S))
        except CarpoolError as error:
            desk.trouble("deleting a provider's file", error)
