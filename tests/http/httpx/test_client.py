"""What is particular to sending through a user's client; the rest is in the contract's suite."""

from __future__ import annotations

import gzip
import subprocess
import sys
from typing import Any

import httpx2
import pytest

from carpool.core.errors import NotConnected, WrongClient
from carpool.core.ports import HttpRequest
from carpool.http import HttpxClient

REQUEST = HttpRequest("POST", "http://provider/v1", (("x-api-key", "mine"),), b"{}")


def defaults(seen: list[httpx2.Request]) -> dict[str, Any]:
    """A client with habits of its own, and a transport that notes what reaches it."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, content=b"ok")

    return {
        "transport": httpx2.MockTransport(handle),
        "headers": {"x-default": "theirs", "x-api-key": "theirs"},
        "cookies": {"a": "b"},
        "params": {"c": "d"},
        "auth": ("user", "password"),
        "base_url": "http://elsewhere/prefix",
        "follow_redirects": True,
    }


def assert_untouched(request: httpx2.Request) -> None:
    assert str(request.url) == "http://provider/v1"
    assert request.headers.get_list("x-api-key") == ["mine"]
    assert {"x-default", "cookie", "authorization", "user-agent"}.isdisjoint(request.headers)


async def test_the_clients_transport_is_used_without_its_defaults() -> None:
    seen: list[httpx2.Request] = []
    async with httpx2.AsyncClient(**defaults(seen)) as client:
        wire = HttpxClient(client)
        response = await wire.send(REQUEST)
        assert await response.read() == b"ok"
        await wire.aclose()
        assert not client.is_closed
    assert_untouched(seen[0])


async def test_a_closed_client_sends_nothing() -> None:
    client = httpx2.AsyncClient(transport=httpx2.MockTransport(lambda _: httpx2.Response(200)))
    await client.aclose()
    with pytest.raises(NotConnected, match="closed"):
        await HttpxClient(client).send(REQUEST)


@pytest.mark.parametrize("name", ["ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError"])
async def test_troubles_before_anything_was_sent(name: str) -> None:
    def fail(request: httpx2.Request) -> httpx2.Response:
        raise getattr(httpx2, name)("sk-secret")

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(fail)) as client:
        with pytest.raises(NotConnected) as caught:
            await HttpxClient(client).send(REQUEST)
    assert "secret" not in str(caught.value)


def test_other_clients_are_refused_in_a_sentence() -> None:
    with pytest.raises(WrongClient, match="AsyncClient"):
        HttpxClient(object())
    with httpx2.Client() as blocking, pytest.raises(WrongClient, match="AsyncClient"):
        HttpxClient(blocking)


def test_neither_httpx_is_imported() -> None:
    code = "import sys, carpool.http; print([name for name in ('httpx', 'httpx2') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


async def test_an_answer_that_a_hook_has_read_is_given_as_it_was_read() -> None:
    async def read(response: httpx2.Response) -> None:
        await response.aread()

    def handle(request: httpx2.Request) -> httpx2.Response:
        packed = gzip.compress(b"plain")
        headers = {"content-encoding": "gzip", "content-length": str(len(packed)), "x-a": "b"}
        return httpx2.Response(200, headers=headers, content=packed)

    transport = httpx2.MockTransport(handle)
    async with httpx2.AsyncClient(transport=transport, event_hooks={"response": [read]}) as client:
        response = await HttpxClient(client).send(REQUEST)
        assert (await response.read(), response.headers) == (b"plain", (("x-a", "b"),))
