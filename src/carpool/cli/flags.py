"""The options of the commands, and shell completion of their values."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import get_completion_script, install  # type: ignore[attr-defined]

from carpool.cli.setup import gather
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError
from carpool.stores import inspect_store

PROGRAM, VARIABLE = "carpool", "_CARPOOL_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def show_completion(shell: Shell | None) -> None:
    if shell is not None:
        typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value))
        raise typer.Exit


def install_completion(shell: Shell | None) -> None:
    if shell is not None:
        _, path = install(shell=shell.value, prog_name=PROGRAM, complete_var=VARIABLE)
        typer.echo(f"Completion for {shell} is in {path}. It works in new shells.")
        raise typer.Exit


def complete_from(*names: str) -> Callable[[str], list[str]]:
    """A completion with the names that begin like the incomplete one."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def key_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of valid keys; none if the store can't be read."""
    file = ctx.params.get("config")
    try:
        config = gather(None if file is None else Path(file), None, (), ctx.params.get("store"))
        keys, now = inspect_store(config.store), SystemClock().now()
    except CarpoolError:
        return []
    return complete_from(*sorted({key.name for key in keys if key.live(now)}))(incomplete)


def option(metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, **settings)


# ---------------------------------------------------------------- options of `carpool serve`, and shared ones


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


Host = Annotated[
    str, option("ADDRESS", "Address to listen on. One that other machines can reach needs keys and a token.")
]
Port = Annotated[int, option("PORT", "Port to listen on; 0 takes a free one.", min=0, max=65535)]
Upstream = Annotated[str | None, option("URL", "Base URL of Anthropic's API; CARPOOL_UPSTREAM sets it, too.")]
PROVIDERS = "Base URL of a provider, such as openai=https://api.openai.com/v1. NAME=DIALECT:URL adds one. Repeatable."
Providers = Annotated[list[str] | None, option("NAME=URL", PROVIDERS, "--provider")]
STORE = "Where calls are kept: a path, sqlite:///path or postgresql://user@host/database; carpool.db unless set."
Store = Annotated[str | None, option("URL", STORE, "--store")]
ConfigFile = Annotated[Path | None, option("FILE", "YAML file with providers, rules and other settings.", "--config")]
TlsCert = Annotated[str | None, option("FILE", "Certificate in PEM form, to serve HTTPS.")]
TlsKey = Annotated[str | None, option("FILE", "Private key of that certificate.")]
Check = Annotated[
    bool, option(None, "Check whether carpool can start, show the settings that are set, and exit.", "--check")
]
All = Annotated[bool, option(None, "With --check: also show settings that have their defaults.", "--all")]
CheckJson = Annotated[bool, option(None, "With --check: print JSON, for scripts.", "--json")]
Json = Annotated[bool, option(None, "Print JSON, for scripts.", "--json")]
Request = Annotated[
    Path | None,
    typer.Argument(metavar="REQUEST", help="With --check: JSON file with a request, to see how it would be routed."),
]
Drain = Annotated[float, option("SECONDS", "How long open calls may continue when carpool stops.", min=0)]
Log = Annotated[LogFormat, option("FORMAT", "Format of the log line of every call: text, json or off.", "--log-format")]
WorkerCount = Annotated[
    int, option("COUNT", "Number of processes that share the port and the work.", "--workers", min=1, max=64)
]
PatienceScale = Annotated[
    float, option(None, "Scales how long clients wait in silence.", "--patience", min=0, hidden=True)
]
HubPath = Annotated[str | None, option(None, "Socket of the supervising process.", "--hub", hidden=True)]


# ---------------------------------------------------------------- options of `carpool keys add`

_LANES = complete_from("now", "batch")

Provider = Annotated[str | None, option("NAME", "Provider to buy from; the first one of the config unless set.")]
Env = Annotated[
    str | None, option("VARIABLE", "Environment variable that holds the provider's key; its api_key_env unless set.")
]
Owner = Annotated[str, option("WHO", "Person or team responsible for the key.")]
Budget = Annotated[str | None, option("DURATION", "Budget of calls that set none, such as 10m.")]
TaskBudget = Annotated[str | None, option("DURATION", "Time budget of tasks that set none, such as 3h.")]
Lane = Annotated[str | None, option("LANE", "Lane of calls that set none: now or batch.", autocompletion=_LANES)]
MaxBudget = Annotated[str | None, option("DURATION", "Largest budget; larger ones are reduced to it.")]
RefuseOver = Annotated[bool, option(None, "Refuse larger budgets instead of reducing them.", "--refuse-over")]
Lanes = Annotated[
    str | None, option("LANES", "Lanes that its calls may take, such as now or now,batch.", autocompletion=_LANES)
]
Caching = Annotated[str | None, option("MODE", "What may be done for prompt caches: off, observe or plan.")]
Tag = Annotated[list[str] | None, option("NAME=VALUE", "Tag of all its calls, such as team=ci. Repeatable.")]
Expires = Annotated[str | None, option("WHEN", "When it expires: after 12h or 30d, or on a date such as 2027-01-31.")]
WholeAccount = Annotated[
    bool, option(None, "Also allow batches, files and everything else of the account.", "--whole-account")
]
Create = Annotated[bool, option(None, "Create the store that --store names, if it is missing.", "--create")]
