"""One request on its connection: where its answer goes, who asks, and whether it is still there."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.doors.asgi import Once
from carpool.doors.proxy.connection import Inform, Leaving
from carpool.doors.proxy.kinds import Client


@dataclass(slots=True)
class Visit:
    send: Once
    client: Client
    leaving: Leaving  # done when the client has hung up
    inform: Inform | None  # sends a 1xx answer
    address: str = ""  # where it asks from; empty on this machine

    @property
    def gone(self) -> bool:
        return self.leaving.done()
