"""Shell completion: lanes, faults, names of keys."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import typer
from typer.completion import completion_init, get_completion_script, install  # type: ignore[attr-defined]

from carpool.cli.setup import gather
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError
from carpool.core.model import Lane
from carpool.mock import FAULTS, VENDORS
from carpool.stores import inspect_store

PROGRAM, VARIABLE = "carpool", "_CARPOOL_COMPLETE"


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def prepare() -> None:
    """Register shell completion."""
    completion_init()


def show(shell: Shell | None) -> None:
    if shell is not None:
        typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value))
        raise typer.Exit


def set_up(shell: Shell | None) -> None:
    if shell is not None:
        _, path = install(shell=shell.value, prog_name=PROGRAM, complete_var=VARIABLE)
        typer.echo(f"Completion for {shell} is in {path}. It works in shells that are started from now on.")
        raise typer.Exit


# ---------------------------------------------------------------- completions


def lanes(incomplete: str) -> list[str]:
    return _beginning((Lane.NOW.value, Lane.BATCH.value), incomplete)


def faults(incomplete: str) -> list[tuple[str, str]]:
    return [(f"{name}=", description) for name, description in FAULTS.items() if name.startswith(incomplete)]


def relative_names(incomplete: str) -> list[str]:
    return _beginning(VENDORS, incomplete)


def key_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """The names of valid keys; none if the store can't be read."""
    file = ctx.params.get("config")
    try:
        config = gather(None if file is None else Path(file), None, (), ctx.params.get("store"))
        found, now = inspect_store(config.store), SystemClock().now()
    except CarpoolError:
        return []
    return _beginning(sorted({key.name for key in found if key.live(now)}), incomplete)


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
