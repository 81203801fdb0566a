from __future__ import annotations

import httpx2
import pytest

from carpool.core.errors import NotConnected, WrongClient
from carpool.http import ThreadedHttpxClient

from .test_client import REQUEST, assert_untouched, defaults


async def test_a_blocking_clients_transport_is_used_without_its_defaults() -> None:
    seen: list[httpx2.Request] = []
    with httpx2.Client(**defaults(seen)) as client:
        wire = ThreadedHttpxClient(client)
        response = await wire.send(REQUEST)
        assert await response.read() == b"ok"
        await wire.aclose()
        assert not client.is_closed
        with pytest.raises(NotConnected, match="closed"):
            await wire.send(REQUEST)
    assert_untouched(seen[0])


async def test_other_clients_are_no_blocking_ones() -> None:
    async with httpx2.AsyncClient() as client:
        with pytest.raises(WrongClient, match="blocking"):
            ThreadedHttpxClient(client)
    with pytest.raises(WrongClient, match="blocking"):
        ThreadedHttpxClient(object())
