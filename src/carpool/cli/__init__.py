"""The command line: `carpool serve`, `mock`, `stats`, `demo`."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from carpool._version import __version__
from carpool.cli.demo import demo
from carpool.cli.mock import mock
from carpool.cli.serve import serve
from carpool.cli.stats import stats
from carpool.errors import CarpoolError

app = typer.Typer(
    name="carpool",
    help="Buys every model call of your agents at the lowest price that its deadline allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(mock)
app.command()(stats)
app.command()(demo)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit.", is_eager=True),
) -> None:
    if version:
        typer.echo(f"carpool {__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command line. What went wrong is said in a sentence, not in a traceback."""
    try:
        app()
    except CarpoolError as error:
        Console(stderr=True).print(f"[bold red]carpool:[/] {error}", highlight=False)
        sys.exit(2)
