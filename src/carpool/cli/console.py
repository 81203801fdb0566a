"""Console output: tables and errors, and the messages of `carpool serve` at its start and its end."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from carpool.config import Config
from carpool.core.clock import SystemClock
from carpool.core.lifecycle import UNFINISHED
from carpool.core.upstream import versioned
from carpool.dialects import DIALECTS
from carpool.engine.engine import OPEN_CALLS
from carpool.frontends.proxy.log import moment
from carpool.stores import shown, sqlite_path
from carpool.stores.remote import hosted

UNBOUNDED = 100_000  # columns


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal. In a pipe or a file nothing is cut or wrapped, whatever COLUMNS says."""
    made = Console(stderr=stderr, highlight=False)
    if not (sys.stderr if stderr else sys.stdout).isatty():
        made.width = UNBOUNDED
    return made


def titled(title: str, *columns: Column | str) -> Table:
    style: dict[str, Any] = {"title_style": "bold", "title_justify": "left", "caption_justify": "left"}
    return Table(*columns, title=title, box=SIMPLE_HEAD, **style)


def figures(*headings: str) -> list[Column]:
    """Columns of numbers, which are aligned on the right and never wrapped."""
    return [Column(heading, justify="right", no_wrap=True) for heading in headings]


def print_json(document: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def print_errors(errors: Iterable[Exception]) -> None:
    """Print one line per error to stderr."""
    for error in errors:
        console(stderr=True).print(Text.assemble(("carpool: ", "bold red"), str(error)), soft_wrap=True)


ANY_ADDRESS = ("0.0.0.0", "[::]")  # noqa: S104  as it is shown
BUDGET = "/@budget=30m"


class StoreContents(NamedTuple):
    """The unfinished contents of a store."""

    calls: int = 0
    batches: int = 0
    answers: int = 0  # responses that were not delivered yet
    keyless: int = 0  # calls whose provider key only their client has

    @classmethod
    def of(cls, counts: Mapping[str, int], keyless: int = 0) -> StoreContents:
        calls = sum(counts.get(f"tickets.{state}", 0) for state in OPEN_CALLS)
        batches = sum(counts.get(f"batches.{state}", 0) for state in UNFINISHED)
        return cls(calls, batches, counts.get("answers.undelivered", 0), keyless)

    def __str__(self) -> str:
        parts = [
            (self.calls, "open call", "open calls"),
            (self.batches, "unfinished batch", "unfinished batches"),
            (self.answers, "answer not fetched yet", "answers not fetched yet"),
        ]
        return ", ".join(_many(*part) for part in parts if part[0]) or "nothing to be done"


def started(address: str, config: Config, holding: StoreContents) -> list[str]:
    """The lines of the start message; the first has the address."""
    reached = address
    for anywhere in ANY_ADDRESS:
        reached = reached.replace(anywhere, socket.gethostname())
    lines = [f"carpool listens on {address} (Ctrl-C stops it)"]
    lines += _block("buys from", [", ".join(provider.base_url for provider in config.providers)])
    lines += _block("store", [store_location(config.store), f"found: {holding}"])
    if holding.keyless:
        waits = "call has no key here: it waits until its client calls again"
        wait = "calls have no key here: they wait until their clients call again"
        lines += _block("", [_many(holding.keyless, waits, wait)])
    lines += _block("clients", _variables(reached, config))
    lines += _block("", [f"with {BUDGET}, independent calls may wait and cost less"])
    return lines + _block("look at", [f"{reached}/carpool/stats"])


def stopped(config: Config, holding: StoreContents | None) -> list[str]:
    """What remains in the store, and how to get it back. `holding` None: unknown."""
    if in_memory(config.store):
        return ["carpool has stopped. Its store was in memory, so nothing is kept."]
    where = store_location(config.store)
    if holding is None:
        return [f"carpool has stopped. What is left in {where} could not be read."]
    if not holding.calls and not holding.batches and not holding.answers:
        return [f"carpool has stopped. Nothing is left to be done in {where}."]
    lines = [f"carpool has stopped, and keeps {holding}"]
    lines += _block("store", [where])
    lines += _block("to go on", [shlex.join(["carpool", *sys.argv[1:]])])
    return lines + _block("", ["clients that send their call again get its answer, bought once"])


def say(lines: Sequence[str], event: str, facts: Mapping[str, object], *, as_json: bool) -> None:
    """Print to standard output: lines of text, or one line of JSON."""
    console = Console(highlight=False)
    if as_json:
        at = moment(SystemClock().now())
        lines = [json.dumps({"event": event, "at": at, "message": lines[0], **facts})]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def in_memory(store: str) -> bool:
    return hosted(store) and sqlite_path(store) is None


def store_location(store: str) -> str:
    """The location of a store, without a password."""
    if not hosted(store):
        return shown(store)
    path = sqlite_path(store)
    return "in memory, until carpool stops" if path is None else str(Path(path).absolute())


def _variables(address: str, config: Config) -> list[str]:
    configured = {provider.dialect for provider in config.providers}
    return [
        f"{dialect.url_variable}={address}{'/v1' if versioned(dialect.home) else ''}"
        for dialect in DIALECTS.values()
        if dialect.name in configured and dialect.url_variable
    ] or [address]


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title if number == 0 else '':<10} {line}" for number, line in enumerate(lines)]


def _many(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"
