"""`carpool serve --check`: what holds, and what would become of a request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.checking import Case, Explained, explain, read_case
from carpool.cli.setting_up import gather
from carpool.clock import SystemClock
from carpool.config import Config
from carpool.errors import ConfigError
from carpool.policy import places
from carpool.rules.deciding import Rule, span


def check_config(
    file: Path | None,
    upstream: str | None,
    providers: Iterable[str],
    store: str | None,
    request: Path | None,
    *,
    as_json: bool,
) -> None:
    """Ends with 0 where all is well. What is wrong is one sentence, and 2; for machines as well."""
    try:
        run_check(gather(file, upstream, providers, store), request, as_json=as_json, now=SystemClock().now())
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(msgspec.json.encode({"ok": False, "error": str(error)}).decode())
        raise typer.Exit(2) from error


def run_check(config: Config, request: Path | None, *, as_json: bool, now: float) -> None:
    """Prints what is in force and, with a request, which way it would go. What is wrong was raised before."""
    case = None if request is None else read_case(request)
    explained = None if case is None else explain(config, case, now)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_document(config, explained)), indent=2).decode())
        return
    console = Console(highlight=False)
    _print_settings(console, config)
    if case is not None and explained is not None:
        _print_explained(console, case, explained)
    for note in config.notes:
        console.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
    console.print(Text("The config is sound.", style="bold green"))


# ---------------------------------------------------------------- settings


def settings_of(config: Config, environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Every setting: its key in the file, its value, and where that came from. Of keys only the variable's name."""
    rows = []
    for one in config.providers:
        path = f"providers.{one.name}"
        key = "not set"
        if one.api_key_env:
            key = f"{one.api_key_env}, which is {'set' if environ.get(one.api_key_env) else 'not set'}"
        rows += [(f"{path}.{name}", value) for name, value in (
            ("dialect", one.dialect), ("base_url", one.base_url), ("api_key_env", key), ("default", _said(one.default)),
        )]  # fmt: skip
    budget = config.book.default_budget
    rows += [
        ("routing.default_budget", "not set" if budget is None else span(budget)),
        ("routing.timezone", config.timezone),
        ("routing.rules", f"{len(config.book.rules)}, see below" if config.book.rules else "none"),
    ]
    for field in fields(config.policy):
        rows.append((".".join(places(field.name)[-1]), _said(getattr(config.policy, field.name))))
    rows += [
        ("caching.mode", config.caching),
        ("limits.max_body_mb", _said(config.max_body_mb)),
        ("observability.otlp_endpoint", _said(config.otlp_endpoint)),
        ("store.url", config.store),
    ]
    return [(path, value, _origin(config, path)) for path, value in sorted(rows, key=lambda row: _order(row[0]))]


_SECTIONS = ("providers", "routing", "batching", "caching", "limits", "observability", "store")


def _order(path: str) -> int:
    return _SECTIONS.index(path.partition(".")[0])


def _origin(config: Config, path: str) -> str:
    section, _, key = path.partition(".")
    same = [f"{section}.{key}"]
    for field in fields(config.policy):
        found = [".".join(place) for place in places(field.name)]
        same = found if path in found else same
    return next((config.origins[one] for one in same if one in config.origins), "default")


def _said(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def effects_of(rule: Rule) -> str:
    said = []
    if rule.budget is not None:
        said.append(f"budget {span(rule.budget)}")
    if rule.lane is not None:
        said.append(f"lane {rule.lane}")
    if rule.max_budget is not None:
        said.append(f"at most {span(rule.max_budget)}")
    if rule.refuse_budget:
        said.append("no budgets of clients" + (f" ({rule.refuse_reason})" if rule.refuse_reason else ""))
    if rule.tags:
        said.append("tags " + ", ".join(f"{name}={value}" for name, value in rule.tags.items()))
    if rule.on_disconnect:
        said.append(f"on disconnect {rule.on_disconnect}")
    return "; ".join(said)


def wants_of(rule: Rule) -> str:
    return "; ".join(f"{one.key} {one.wanted}" for one in rule.match) or "everything"


# ---------------------------------------------------------------- printing


def _print_settings(console: Console, config: Config) -> None:
    table = _table("setting", "value", "from")
    for path, value, origin in settings_of(config, os.environ):
        style = "" if origin != "default" else "dim"
        table.add_row(Text(path, style=style), Text(value, style=style), Text(origin, style=style))
    console.print(table)
    if config.book.rules:
        rules = _table("rule", "matches", "does")
        for rule in config.book.rules:
            rules.add_row(Text(rule.name), Text(wants_of(rule)), Text(effects_of(rule)))
        console.print(rules)


def _print_explained(console: Console, case: Case, told: Explained) -> None:
    console.print(Text(f"\n{case.raw.method} {case.raw.path}", style="bold"))
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in told.rows():
        table.add_row(Text(name, style="dim"), Text(value))
    console.print(table)
    for place, verdict in enumerate(told.verdicts, 1):
        sign, style = {True: ("matches", "green"), False: ("no", "red"), None: ("not asked", "dim")}[verdict.matched]
        console.print(
            Text.assemble(f"{place:>3}. {verdict.rule}: ", (sign, style), f", since {verdict.because}."), soft_wrap=True
        )


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, overflow="fold")
    return table


# ---------------------------------------------------------------- for machines


def _document(config: Config, told: Explained | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ok": True,
        "settings": {path: {"value": value, "from": origin} for path, value, origin in settings_of(config, os.environ)},
        "rules": [
            {"name": rule.name, "matches": wants_of(rule), "does": effects_of(rule)} for rule in config.book.rules
        ],
        "notes": list(config.notes),
    }
    if told is not None:
        found["request"] = told.document()
    return found
