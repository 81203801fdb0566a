"""`carpool mock`: a mock provider, to try things out without a key or a bill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from carpool.cli import flags
from carpool.cli.console import console, figures, titled
from carpool.cli.flags import option
from carpool.cli.listen import listen
from carpool.core.errors import ConfigError
from carpool.mock import FAULTS, LENGTHS, VENDORS, Faults, MockConfig, MockServer, OpenAIConfig, parse_latency, run
from carpool.planners.ledger import dollars

SIGNED = frozenset({"clock_offset_s"})


def _list_faults(wanted: bool) -> None:
    if not wanted:
        return
    width = max(map(len, (*FAULTS, *LENGTHS)))
    typer.echo("Faults, each with its chance from 0 to 1, as in --fault create_500=0.1:\n")
    for name, description in FAULTS.items():
        typer.echo(f"  {name:{width}}  {description}")
    typer.echo("\nDurations in seconds, as in --fault hang_s=10:\n")
    for name, description in LENGTHS.items():
        typer.echo(f"  {name:{width}}  {description}; {getattr(Faults(), name):g} unless given")
    raise typer.Exit


def _complete_fault(incomplete: str) -> list[tuple[str, str]]:
    return [(f"{name}=", description) for name, description in FAULTS.items() if name.startswith(incomplete)]


Host = Annotated[str, option("ADDRESS", "Address to listen on.")]
Port = Annotated[int, option("PORT", "Port to listen on.", min=1, max=65535)]
BatchLatency = Annotated[
    str, option("SECONDS", "How long a batch takes: constant:2, uniform:1,5, lognormal:median=100,sigma=0.5 …")
]
SyncLatency = Annotated[str, option("SECONDS", "How long a synchronous call takes, in the same form.")]
FAULT = "Fault to inject and its probability, such as create_500=0.1. Repeatable."
Fault = Annotated[list[str] | None, option("NAME=CHANCE", FAULT, autocompletion=_complete_fault)]
ListFaults = Annotated[
    bool, option(None, "List the faults and exit.", "--faults", is_eager=True, callback=_list_faults)
]
BatchRpm = Annotated[float, option("COUNT", "Rate limit of the batch endpoints, in requests per minute.", min=0.001)]
SyncRpm = Annotated[
    float | None, option("COUNT", "The same for the synchronous endpoints; no limit unless set.", min=0.001)
]
EnqueuedTokens = Annotated[
    int | None, option("COUNT", "OpenAI: prompt tokens that batches of a model may queue; no limit unless set.", min=1)
]
VENDOR = "OpenAI-compatible provider to imitate: openai, azure, groq, together, mistral or xai."
Vendor = Annotated[str, option("NAME", VENDOR, autocompletion=flags.complete_from(*VENDORS))]
WebhookUrl = Annotated[str | None, option("URL", "OpenAI: where to post signed events about ended batches.")]
Seed = Annotated[int, option("NUMBER", "Seed of the random numbers.")]


def mock(
    host: Host = "127.0.0.1",
    port: Port = 8788,
    batch_latency: BatchLatency = "lognormal:median=20,sigma=0.5",
    sync_latency: SyncLatency = "uniform:0.3,1.2",
    fault: Fault = None,
    faults: ListFaults = False,
    batch_rpm: BatchRpm = 1000.0,
    sync_rpm: SyncRpm = None,
    enqueued_tokens: EnqueuedTokens = None,
    vendor: Vendor = "openai",
    webhook_url: WebhookUrl = None,
    seed: Seed = 0,
) -> None:
    """Run a mock of the APIs of Anthropic and OpenAI, with limits, latencies, faults and a bill.

    It accepts any key. Point an SDK, or carpool serve --upstream, at http://127.0.0.1:8788. The API of OpenAI is at
    http://127.0.0.1:8788/v1, with files, batches, the flex tier and webhooks; --vendor imitates another
    OpenAI-compatible provider. GET /mock/bill shows the bill, which is also printed at the end.
    """
    if webhook_url is not None and not webhook_url.startswith(("http://", "https://")):
        raise ConfigError(f"--webhook-url is {webhook_url[:60]!r}: write a URL, such as http://127.0.0.1:9000/hooks.")
    chosen = Faults()
    for pair in fault or ():
        name, _, value = pair.partition("=")
        chosen = replace(chosen, **{name: _fault(name, value)})
    try:
        config = MockConfig(
            seed=seed,
            batch_latency=parse_latency(batch_latency),
            sync_latency=parse_latency(sync_latency),
            batch_rpm=batch_rpm,
            sync_rpm=sync_rpm,
            faults=chosen,
            openai=OpenAIConfig(
                vendor=vendor,
                enqueued_tokens={} if enqueued_tokens is None else {"*": enqueued_tokens},
                webhook_url=webhook_url,
            ),
        )
    except ValueError as error:
        raise ConfigError(f"The mock provider can't be set up like this: {error}.") from error
    _serve(config, host, port)


def _fault(name: str, value: str) -> Any:
    """The value of a fault. A fault without a probability always occurs."""
    if name not in FAULTS and name not in LENGTHS:
        near = get_close_matches(name, (*FAULTS, *LENGTHS), n=1, cutoff=0.75)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(f"There is no fault {name[:60]!r}. {hint}carpool mock --faults lists them.")
    kind = type(getattr(Faults(), name))
    try:
        number = kind(value or "1") if name in FAULTS else kind(value)
    except ValueError:
        number = math.nan
    if name in FAULTS and not 0 <= number <= 1:
        raise ConfigError(f"--fault {name} can't be {value[:40]!r}: write its chance, from 0 to 1, such as 0.1.")
    if name in LENGTHS and not (number >= 0 or (name in SIGNED and number < 0)):
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--fault {name} can't be {value[:40]!r}: write {what} of seconds, as in {name}=10.")
    return number


def _serve(config: MockConfig, host: str, port: int) -> None:
    listen(host, port).close()  # fails with a clear error if the port is in use
    own = config.openai
    served: list[MockServer] = []

    def ready(server: MockServer) -> None:
        served.append(server)
        typer.echo(f"A mock of the APIs of Anthropic and OpenAI listens on {server.url}. Stop it with Ctrl-C.")
        if own.webhook_url is not None:
            typer.echo(f"It posts events to {own.webhook_url}, signed with {own.webhook_secret}.")

    run(config, host, port, ready)
    for server in served:
        console().print(bill_table(server.provider.bill_summary))


def bill_table(summary: Mapping[str, Any]) -> Table | str:
    """The bill by model and lane, with the total; `summary` is the response of `GET /mock/bill`."""
    if not summary["purchases"]:
        return "Nothing was bought."
    columns = [Column("model", overflow="fold"), Column("lane", no_wrap=True)]
    table = titled("Bill", *columns, *figures("purchases", "input\ntokens", "output\ntokens", "price"))
    for line in summary["lines"]:
        table.add_row(line["model"], line["lane"], *_figures(line))
    table.add_section()
    table.add_row("sum", "", *_figures(summary), style="bold")
    return table


def _figures(sums: Mapping[str, Any]) -> list[str]:
    counts = (sums["purchases"], sums["input_tokens"], sums["output_tokens"])
    return [*(f"{count:,}" for count in counts), dollars(sums["nano_usd"])]
