"""An `EngineContext` without an engine: one provider, one key, a store that accepts everything, a clock set by hand."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import AsyncMock, Mock

from carpool.core.model import Headers
from carpool.core.ports import HttpRequest
from carpool.core.prices import PriceBook
from carpool.core.upstream import Upstream, WholeResponse
from carpool.dialects import OPENAI
from carpool.engine.context import EngineContext
from carpool.engine.events import EventHooks
from carpool.engine.keyring import Keyring
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy

PLACE = "https://provider.invalid/v1"
SECRET: Headers = (("authorization", "Bearer sk-one"),)
START = 1000.0


class HandClock:
    """A clock that stands still unless a test sets it."""

    def __init__(self) -> None:
        self.time = START

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0)


class AlikeClient:
    """Answers every request alike, and remembers them. Implements `ports.HttpClient`."""

    def __init__(self, status: int = 200, headers: Headers = (), body: bytes = b"{}") -> None:
        self.response = WholeResponse(status, headers, body)
        self.requests: list[HttpRequest] = []

    async def send(self, request: HttpRequest) -> WholeResponse:
        self.requests.append(request)
        return self.response

    async def aclose(self) -> None:
        return


def engine_context(client: AlikeClient | None = None, **changes: Any) -> tuple[EngineContext, str]:
    """The context, and the name of its credential."""
    keyring = Keyring(b"p" * 32)
    keyring.add("openai", PLACE, [SECRET])
    settings: dict[str, Any] = {
        "store": AsyncMock(completed=Mock()),
        "clock": HandClock(),
        "policy": RoutingPolicy(),
        "forecast": Forecast(),
        "prices": PriceBook(),
        "keyring": keyring,
        "upstreams": {"openai": Upstream("openai", PLACE, OPENAI, client or AlikeClient())},
        "event_hooks": EventHooks(),
        "rng": random.Random(0),
        "name": "engine-test",
    }
    return EngineContext(**settings | changes), keyring.name("openai", PLACE, SECRET)
