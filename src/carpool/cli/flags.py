"""The options of the commands, and shell completion of their values."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
        typer.echo(f"Completion for {shell} is in {path}. It works in shells that are started from now on.")
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


# ---------------------------------------------------------------- options of `carpool serve`, and shared ones


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"
    OFF = "off"


Host = Annotated[
    str,
    typer.Option(metavar="ADDRESS", help="Address to listen on. Others than this machine's need keys and a token."),
]
Port = Annotated[int, typer.Option(metavar="PORT", help="Port to listen on; 0 takes a free one.", min=0, max=65535)]
Upstream = Annotated[
    str | None, typer.Option(metavar="URL", help="Anthropic's base URL; CARPOOL_UPSTREAM says the same.")
]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="NAME=URL",
        help="Base URL of a provider, as in openai=https://api.openai.com/v1; NAME=DIALECT:URL for a new one. "
        "May be repeated.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Where calls are kept: a path, sqlite:///path or postgresql://user@host/database; carpool.db otherwise.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="A YAML file with providers, rules and other settings."),
]
TlsCert = Annotated[str | None, typer.Option(metavar="FILE", help="A certificate in PEM form, to serve HTTPS.")]
TlsKey = Annotated[str | None, typer.Option(metavar="FILE", help="The key of that certificate.")]
Check = Annotated[
    bool, typer.Option("--check", help="Say whether carpool can start and what was set, and end without starting.")
]
All = Annotated[bool, typer.Option("--all", help="With --check: also show the settings that have their defaults.")]
CheckJson = Annotated[bool, typer.Option("--json", help="With --check: write JSON, for programs.")]
Json = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]
Request = Annotated[
    Path | None,
    typer.Argument(metavar="REQUEST", help="With --check: a JSON file with a request, to see what would become of it."),
]
Drain = Annotated[float, typer.Option(metavar="SECONDS", help="Time given to open calls when stopping.", min=0)]
Log = Annotated[
    LogFormat, typer.Option("--log-format", metavar="FORMAT", help="What is written for every call: text, json or off.")
]
WorkerCount = Annotated[
    int, typer.Option("--workers", metavar="COUNT", help="Processes that share the port and the work.", min=1, max=64)
]
PatienceScale = Annotated[
    float, typer.Option("--patience", help="Scales how long clients wait in silence.", min=0, hidden=True)
]
HubPath = Annotated[str | None, typer.Option("--hub", help="Where a worker finds the others.", hidden=True)]


# ---------------------------------------------------------------- options of `carpool keys add`

Provider = Annotated[
    str | None, typer.Option(metavar="NAME", help="The provider it buys from; the config's first one otherwise.")
]
Env = Annotated[
    str | None,
    typer.Option(metavar="VARIABLE", help="The variable that holds the provider's key; api_key_env otherwise."),
]
Owner = Annotated[str, typer.Option(metavar="WHO", help="Whom to ask about it.")]
Budget = Annotated[
    str | None, typer.Option(metavar="DURATION", help="The budget of calls that ask for nothing, such as 10m.")
]
Lane = Annotated[
    str | None,
    typer.Option(
        metavar="LANE",
        help="The lane of calls that ask for nothing: now or batch.",
        autocompletion=complete_from("now", "batch"),
    ),
]
MaxBudget = Annotated[
    str | None, typer.Option(metavar="DURATION", help="The largest budget; larger ones are cut to it.")
]
RefuseOver = Annotated[bool, typer.Option("--refuse-over", help="Refuse larger budgets, do not cut them.")]
Lanes = Annotated[
    str | None,
    typer.Option(
        metavar="LANES",
        help="The lanes it may take, such as now or now,batch.",
        autocompletion=complete_from("now", "batch"),
    ),
]
Tag = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A tag that all its calls bear: team=ci. May be repeated."),
]
Expires = Annotated[
    str | None, typer.Option(metavar="WHEN", help="How long it is good: 12h, 30d, or until a date: 2027-01-31.")
]
WholeAccount = Annotated[
    bool, typer.Option("--whole-account", help="Let it also reach batches, files and all else of the account.")
]
Create = Annotated[bool, typer.Option("--create", help="Make the store that --store names, if missing.")]
