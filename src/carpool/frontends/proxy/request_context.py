"""One request on its connection: where the response goes, who the client is, and whether it is still connected."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.dialects.keep_alive import Client
from carpool.frontends.proxy.http.asgi import Once
from carpool.frontends.proxy.http.connection import Inform, Leaving, Receive
from carpool.frontends.proxy.http.liveness import ConnectionLost
from carpool.frontends.proxy.log import LogLine


@dataclass(slots=True)
class RequestContext:
    send: Once
    client: Client
    leaving: Leaving  # done when the client has disconnected
    inform: Inform | None  # sends a 1xx response
    line: LogLine  # its log line
    receive: Receive | None = None  # tells whether the client has the whole response
    address: str = ""  # of the client; empty if local

    @property
    def gone(self) -> bool:
        return self.leaving.done()

    async def received(self, lost: ConnectionLost = lambda: None) -> bool:
        """Whether the client has the whole response, after all of it was sent. `lost` is called if the client resets
        the connection afterwards, which shows that it did not read everything."""
        return not self.gone if self.receive is None else await self.receive(lost)
