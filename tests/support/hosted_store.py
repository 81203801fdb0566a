"""A store as a worker has it: hosted by another, and asked over a socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from carpool.cli.workers import Hub
from carpool.core.clock import SystemClock
from carpool.stores import SqliteStore
from carpool.stores.remote import RemoteStore, connect


class Hosted(RemoteStore):
    """Ends its host with itself."""

    async def aclose(self) -> None:
        await super().aclose()
        if "hub" in self.__dict__:
            hub = self.__dict__.pop("hub")
            await hub.aclose()
            await hub.store.aclose()


async def hosted(directory: Path) -> Any:
    store = await SqliteStore.open(None)
    hub = Hub(store, SystemClock())
    await hub.open(directory / "hub")
    made = await Hosted.over(await connect(str(directory / "hub")))
    made.__dict__["hub"] = hub
    return made
