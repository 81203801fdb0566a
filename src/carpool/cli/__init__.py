"""The command line: `carpool serve`, `keys`, `mock`, `stats`, `tasks`, `report`, `simulate`, `demo`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from carpool._version import __version__
from carpool.cli import flags
from carpool.cli.console import print_errors
from carpool.cli.demo import demo
from carpool.cli.keys import keys
from carpool.cli.mock import mock
from carpool.cli.report import report
from carpool.cli.serve import serve
from carpool.cli.simulate import simulate
from carpool.cli.stats import stats
from carpool.cli.tasks import tasks
from carpool.core.errors import CarpoolError, safe_traceback

app = typer.Typer(
    name="carpool",
    help="Buys every model call of your agents at the lowest price that its deadline allows.\n\n"
    "Try it without an API key and without cost: carpool demo",
    no_args_is_help=True,
    add_completion=False,  # typer's own would guess the shell
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Run the proxy that your agents use as their base URL.")(serve)
app.add_typer(keys, name="keys", short_help="Create, list, rotate and revoke virtual keys.")
app.command(short_help="Run a mock provider, to try things without cost.")(mock)
app.add_typer(
    stats, name="stats", short_help="Show what was paid, what it would have cost without carpool, and what was learned."
)
app.command(short_help="Answer from recorded traffic what other budgets or caches would have saved.")(report)
app.command(short_help="Show tasks: turns, slack, costs, and when each may be done.")(tasks)
app.command(short_help="Replay traffic under virtual time, and compare what policies would have cost.")(simulate)
app.command(short_help="Watch 60 calls of a small fleet, in 20 seconds.")(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carpool {__version__}")
        raise typer.Exit


_SHOW = "Print a completion script for bash, zsh or fish, and exit."
_INSTALL = "Install that script for the shell, and exit."


@app.callback()
def root(
    version: Annotated[
        bool, flags.option(None, "Print the version and exit.", "--version", is_eager=True, callback=_print_version)
    ] = False,
    show_completion: Annotated[
        flags.Shell | None, flags.option("SHELL", _SHOW, is_eager=True, callback=flags.show_completion)
    ] = None,
    install_completion: Annotated[
        flags.Shell | None, flags.option("SHELL", _INSTALL, is_eager=True, callback=flags.install_completion)
    ] = None,
) -> None:
    """Options of carpool itself."""


def main() -> None:
    """Run the command line. Errors are printed as a sentence, not as a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't show a character shows another
    completion_init()
    try:
        app()
    except CarpoolError as error:
        print_errors([error])
        sys.exit(2)
    except Exception as error:  # noqa: BLE001  printed here, because the interpreter would also show its message
        sys.stderr.write(f"This is a bug in carpool:\n{safe_traceback(error)}\n")
        sys.exit(1)
