"""`carpool serve`: the proxy on a port."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import uvicorn
from rich.console import Console

from carpool.cli.listening import Server, address, check_local, listen
from carpool.clock import SystemClock
from carpool.dialects import get as get_dialect
from carpool.doors.library import build_engine
from carpool.doors.proxy import Proxy
from carpool.engine import Engine, Upstream
from carpool.errors import CarpoolError, ConfigError
from carpool.policy import RoutingPolicy
from carpool.stores import open_store
from carpool.wires import ReqwestWire

LAST_WORDS_S = 2  # for answers that are being written when everything else has ended


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine's own for now.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8787,
    upstream: Annotated[
        str, typer.Option(help="The provider's base URL.", envvar="CARPOOL_UPSTREAM")
    ] = "https://api.anthropic.com",
    store: Annotated[str, typer.Option(help="Where calls are kept: a path or sqlite:///path.")] = "carpool.db",
    config: Annotated[Path | None, typer.Option(help="A YAML file with routing and batching settings.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds given to open calls when stopping.", min=0)] = 5.0,
) -> None:
    """Serve the proxy: point ANTHROPIC_BASE_URL here, and nothing else changes.

    A call without a budget goes straight through. Give one with the header x-carpool-budget: 10m, or in the base URL:
    http://127.0.0.1:8787/@budget=10m

    Calls that wait for a batch survive a stop or a crash: sent again after the restart, they get their own answer.
    """
    check_local(host)
    _check_url(upstream)
    policy = RoutingPolicy() if config is None else RoutingPolicy.from_yaml(config)
    with listen(host, port) as listener:
        asyncio.run(_serve(listener, upstream, store, policy, drain))


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise ConfigError(f"{url!r} is not a provider's base URL. Write one such as https://api.anthropic.com.")


async def _serve(listener: socket.socket, base_url: str, store: str, policy: RoutingPolicy, drain: float) -> None:
    clock, wire = SystemClock(), ReqwestWire()
    upstream = Upstream("anthropic", base_url, get_dialect("anthropic"), wire)
    engine = build_engine(await open_store(store), clock, upstream, policy, None, ())
    await engine.start()
    proxy = Proxy(engine, upstream, clock, on_disconnect=policy.on_disconnect)

    async def end() -> None:
        await _end(proxy, engine, drain)

    try:
        said = f"carpool listens on {address(listener)} and buys from {base_url}. Stop it with Ctrl-C."
        Console().print(said, markup=False, soft_wrap=True)
        await Server(_config(proxy), end).serve([listener])
    finally:
        await engine.close(0.0)
        await wire.aclose()


async def _end(proxy: Proxy, engine: Engine, drain: float) -> None:
    """Open calls get their time; then what waits for a batch is told to come back, and the rest is cut."""
    await proxy.drain(drain)
    await engine.close(0.0)
    await proxy.aclose()


def _config(proxy: Proxy) -> uvicorn.Config:
    logging.basicConfig(level=logging.WARNING, format="carpool: %(message)s")
    logging.getLogger("uvicorn.error").addFilter(_unsaid)
    return uvicorn.Config(
        proxy,
        log_config=None,
        log_level="warning",
        lifespan="off",
        ws="none",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def _unsaid(record: logging.LogRecord) -> bool:
    """Answers that break off are told by the proxy in a sentence; their traceback tells nothing more."""
    return not (record.exc_info and isinstance(record.exc_info[1], CarpoolError))
