"""`carpool mock`: the stand-in provider, for trying things out without a key or a bill."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from carpool.errors import ConfigError
from carpool.mock import Faults, MockConfig, parse_latency, run


def mock(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8788,
    batch_latency: Annotated[
        str, typer.Option(help="How long batches take: constant:2, uniform:1,5, lognormal:median=100,sigma=0.5 …")
    ] = "lognormal:median=20,sigma=0.5",
    sync_latency: Annotated[str, typer.Option(help="How long synchronous calls take.")] = "uniform:0.3,1.2",
    fault: Annotated[
        list[str] | None, typer.Option(help="A fault and its chance, as in create_500=0.1. Repeat for several.")
    ] = None,
    batch_rpm: Annotated[float, typer.Option(help="Requests per minute on the batch endpoints.")] = 1000.0,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Serve a stand-in for the Anthropic API: its limits, its timing, its faults, and a bill of its own."""
    try:
        config = MockConfig(
            seed=seed,
            batch_latency=parse_latency(batch_latency),
            sync_latency=parse_latency(sync_latency),
            batch_rpm=batch_rpm,
            faults=_faults(fault or []),
        )
    except ValueError as error:
        raise ConfigError(f"The stand-in can't be set up so: {error}.") from error
    Console().print(f"A stand-in for the Anthropic API listens on [bold]http://{host}:{port}[/]. Stop it with Ctrl-C.")
    run(config, host, port)


def _faults(pairs: list[str]) -> Faults:
    faults = Faults()
    for pair in pairs:
        name, _, chance = pair.partition("=")
        if not hasattr(faults, name):
            raise ValueError(f"there is no fault {name!r}")
        faults = replace(faults, **{name: type(getattr(faults, name))(chance or 1)})
    return faults
