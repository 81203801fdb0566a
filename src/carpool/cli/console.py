"""Console output: tables fit the terminal, and are not cut in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

UNBOUNDED = 100_000  # columns


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal. In a pipe or a file nothing is cut or wrapped, whatever COLUMNS says."""
    made = Console(stderr=stderr, highlight=False)
    if not (sys.stderr if stderr else sys.stdout).isatty():
        made.width = UNBOUNDED
    return made


def complain(errors: Iterable[Exception]) -> None:
    """Print one line per error to stderr."""
    for error in errors:
        console(stderr=True).print(Text.assemble(("carpool: ", "bold red"), str(error)), soft_wrap=True)
