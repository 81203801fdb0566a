"""The command line: `carpool serve`, `keys`, `mock`, `stats`, `demo`."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from carpool._version import __version__
from carpool.cli import flags
from carpool.cli.console import complain
from carpool.cli.demo import demo
from carpool.cli.keys import keys
from carpool.cli.mock import mock
from carpool.cli.serve import serve
from carpool.cli.stats import stats
from carpool.core.errors import CarpoolError, safe_traceback

app = typer.Typer(
    name="carpool",
    help="Buys every model call of your agents at the lowest price that its deadline allows.\n\n"
    "See it work, without a key or a bill: carpool demo",
    no_args_is_help=True,
    add_completion=False,  # typer's own would guess the shell
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(short_help="Serve the proxy that your agents' base URL points at.")(serve)
app.add_typer(keys, name="keys", short_help="Give out virtual keys with bounds, list and end them.")
app.command(short_help="Serve a stand-in provider, to try things without a bill.")(mock)
app.command(short_help="Show what was paid, and what would have been.")(stats)
app.command(short_help="Watch a small fleet at work, in 20 seconds.")(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"carpool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
    show_completion: Annotated[
        flags.Shell | None,
        typer.Option(
            metavar="SHELL",
            help="Print what makes bash, zsh or fish complete carpool's commands, and exit.",
            is_eager=True,
            callback=flags.show_completion,
        ),
    ] = None,
    install_completion: Annotated[
        flags.Shell | None,
        typer.Option(
            metavar="SHELL",
            help="Put that where the shell reads it when it starts, and exit.",
            is_eager=True,
            callback=flags.install_completion,
        ),
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
        complain([error])
        sys.exit(2)
    except Exception as error:  # noqa: BLE001  told here, because the interpreter would show the words of it too
        sys.stderr.write(f"carpool broke here, which is a mistake of its own:\n{safe_traceback(error)}\n")
        sys.exit(1)
