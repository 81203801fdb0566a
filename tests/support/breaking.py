"""`carpool serve`, broken on purpose: python breaking.py PLACE [arguments of carpool]. What breaks quotes the secret
and the body that it was about, as careless code would."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

from carpool import cli
from carpool.engine.batch.collect import Collector
from carpool.engine.engine import Engine
from carpool.frontends.proxy import calls
from carpool.frontends.proxy.app import Proxy
from carpool.frontends.proxy.calls import Relay
from carpool.http import Http1Client

SECRET, BODY = "sk-ant-marked-secret-7f3a", "the marked prompt of a customer"


class Held:
    """Something that is let go, and breaks."""

    def __del__(self) -> None:
        raise RuntimeError(f"{SECRET} {BODY}")


def broken(*_: Any, **__: Any) -> Any:
    secret, body = SECRET, BODY  # locals, which a report must not show either
    try:
        raise KeyError(secret)  # noqa: TRY301
    except KeyError as error:
        raise RuntimeError(f"{secret} {body} {error!r}") from error


async def abroken(*_: Any, **__: Any) -> Any:
    broken()


def before(method: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    async def acting(self: Any, *arguments: Any, **more: Any) -> Any:
        act()
        return await method(self, *arguments, **more)

    return acting


def in_callback() -> None:
    asyncio.get_running_loop().call_soon(broken)


def in_task() -> None:
    asyncio.get_running_loop().create_task(abroken(), name=f"{SECRET}")  # nobody awaits it


def in_thread() -> None:
    threading.Thread(target=broken, name=SECRET).start()


def let_go() -> None:
    Held()


def spread(place: str) -> None:
    """Puts a mistake into one place."""
    if place == "start":
        Engine.start = abroken  # type: ignore[method-assign]
    elif place == "call":
        calls.CallHandler.call = abroken  # type: ignore[method-assign]
    elif place == "answer":
        calls.send_streamed = abroken
        Relay.answered = broken  # type: ignore[method-assign]
    elif place == "passing":
        calls._send_response = abroken
    elif place == "wire":
        Http1Client.send = abroken  # type: ignore[method-assign]
    elif place == "results":
        Collector._stream = abroken  # type: ignore[method-assign]
    else:
        act = {"callback": in_callback, "task": in_task, "thread": in_thread, "letting go": let_go}[place]
        Proxy._begin = before(Proxy._begin, act)  # type: ignore[method-assign]


if __name__ == "__main__":
    place = sys.argv.pop(1)
    spread(place)
    cli.main()
