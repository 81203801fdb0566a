"""`carpool serve`: the proxy on a port."""

from __future__ import annotations

import asyncio
import ipaddress
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.console import Console

from carpool.clock import SystemClock
from carpool.dialects import get as get_dialect
from carpool.doors.library import build_engine
from carpool.doors.proxy import Proxy
from carpool.engine import Upstream
from carpool.errors import ConfigError
from carpool.policy import RoutingPolicy
from carpool.stores import open_store
from carpool.wires import ReqwestWire


def serve(
    host: Annotated[str, typer.Option(help="Address to listen on; only this machine's own for now.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8787,
    upstream: Annotated[
        str, typer.Option(help="The provider's base URL.", envvar="CARPOOL_UPSTREAM")
    ] = "https://api.anthropic.com",
    store: Annotated[str, typer.Option(help="Where calls are kept: a path or sqlite:///path.")] = "carpool.db",
    config: Annotated[Path | None, typer.Option(help="A YAML file with routing and batching settings.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds given to open calls when stopping.")] = 5.0,
) -> None:
    """Serve the proxy: point ANTHROPIC_BASE_URL here, and nothing else changes.

    A call without a budget goes straight through. Give one with the header x-carpool-budget: 10m, or in the base URL:
    http://127.0.0.1:8787/@budget=10m
    """
    _check_local(host)
    policy = RoutingPolicy() if config is None else RoutingPolicy.from_yaml(config)
    asyncio.run(_serve(host, port, upstream, store, policy, drain))


def _check_local(host: str) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigError(
            f"carpool listens on this machine only, and {host} can be reached from outside. Use --host 127.0.0.1."
        )


async def _serve(host: str, port: int, base_url: str, store_url: str, policy: RoutingPolicy, drain: float) -> None:
    clock = SystemClock()
    wire = ReqwestWire()
    upstream = Upstream("anthropic", base_url, get_dialect("anthropic"), wire)
    engine = build_engine(await open_store(store_url), clock, upstream, policy, None, ())
    await engine.start()
    server = uvicorn.Server(
        uvicorn.Config(
            Proxy(engine, upstream, clock),
            host=host,
            port=port,
            log_level="warning",
            lifespan="off",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=max(1, int(drain)),
        )
    )
    Console().print(f"carpool listens on [bold]http://{host}:{port}[/] and buys from {base_url}. Stop it with Ctrl-C.")
    try:
        await server.serve()
    finally:
        await engine.close(0.0)
        await wire.aclose()
