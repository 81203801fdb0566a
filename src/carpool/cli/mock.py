"""`carpool mock`: the stand-in provider, for trying things out without a key or a bill."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Annotated

import typer
from rich.console import Console

from carpool.cli.listening import listen
from carpool.errors import ConfigError
from carpool.mock import Faults, MockConfig, OpenAIConfig, parse_latency, run


def mock(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8788,
    batch_latency: Annotated[
        str, typer.Option(help="How long batches take: constant:2, uniform:1,5, lognormal:median=100,sigma=0.5 …")
    ] = "lognormal:median=20,sigma=0.5",
    sync_latency: Annotated[str, typer.Option(help="How long synchronous calls take.")] = "uniform:0.3,1.2",
    fault: Annotated[
        list[str] | None,
        typer.Option(help="A fault and its chance, as in create_500=0.1. Repeat for several.", metavar="NAME=CHANCE"),
    ] = None,
    batch_rpm: Annotated[float, typer.Option(help="Requests per minute on the batch endpoints.")] = 1000.0,
    sync_rpm: Annotated[
        float | None, typer.Option(help="Requests per minute on the synchronous endpoints; no limit unless given.")
    ] = None,
    enqueued_tokens: Annotated[
        int | None,
        typer.Option(help="OpenAI: prompt tokens that may wait in batches of one model; no limit unless given.", min=1),
    ] = None,
    relative: Annotated[
        str, typer.Option(help="Whose habits OpenAI's part has: openai, azure, groq, together, mistral or xai.")
    ] = "openai",
    webhook_url: Annotated[
        str | None, typer.Option(help="OpenAI: where to post signed events about ended batches.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Serve a stand-in for the APIs of Anthropic and OpenAI: limits, timing, faults, and a bill of its own.

    It takes any key. Point an SDK, or carpool serve --upstream, at http://127.0.0.1:8788. At
    http://127.0.0.1:8788/v1 it stands in for OpenAI, with files, batches, the flex tier and webhooks; with --relative
    for one of its relatives.
    """
    try:
        config = MockConfig(
            seed=seed,
            batch_latency=parse_latency(batch_latency),
            sync_latency=parse_latency(sync_latency),
            batch_rpm=batch_rpm,
            sync_rpm=sync_rpm,
            faults=_faults(fault or []),
            openai=_openai(relative, enqueued_tokens, webhook_url),
        )
    except ValueError as error:
        raise ConfigError(f"The stand-in can't be set up so: {error}.") from error
    _serve(config, host, port)


def _serve(config: MockConfig, host: str, port: int) -> None:
    listen(host, port).close()  # says in a sentence when that can't be
    console, own = Console(), config.openai
    console.print(f"A stand-in for the Anthropic API listens on http://{host}:{port}. Stop it with Ctrl-C.")
    if own.webhook_url is not None:
        console.print(f"It posts events to {own.webhook_url}, signed with {own.webhook_secret}.", soft_wrap=True)
    with suppress(KeyboardInterrupt):
        run(config, host, port)


def _openai(relative: str, enqueued_tokens: int | None, webhook_url: str | None) -> OpenAIConfig:
    limits = {} if enqueued_tokens is None else {"*": enqueued_tokens}
    return OpenAIConfig(relative=relative, enqueued_tokens=limits, webhook_url=webhook_url)


def _faults(pairs: list[str]) -> Faults:
    faults = Faults()
    known = [field.name for field in fields(Faults)]
    for pair in pairs:
        name, _, chance = pair.partition("=")
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.3)
            raise ValueError(f"there is no fault {name!r}" + (f", but there is {near[0]}" if near else ""))
        faults = replace(faults, **{name: type(getattr(faults, name))(chance or 1)})
    return faults
