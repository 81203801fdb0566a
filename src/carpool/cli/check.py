"""`carpool serve --check`: what holds, and what would become of a request."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.checking import Case, Explained, explain, read_case
from carpool.cli.listening import admin_token
from carpool.cli.setting_up import gather
from carpool.clock import SystemClock
from carpool.config import Config, Serving
from carpool.errors import ConfigError
from carpool.policy import places
from carpool.rules.deciding import Rule, span
from carpool.stores import shown


def check_config(
    file: Path | None,
    upstream: str | None,
    providers: Iterable[str],
    store: str | None,
    request: Path | None,
    *,
    as_json: bool,
    host: str = "127.0.0.1",
    tls: tuple[str | None, str | None] = (None, None),
) -> None:
    """Ends with 0 where all is well. What is wrong is one sentence, and 2; for machines as well."""
    try:
        config = gather(file, upstream, providers, store, tls)
        admin_token(host, config.serving, os.environ)
        config = replace(config, notes=(*config.notes, *_absent(config)))
        run_check(config, request, as_json=as_json, now=SystemClock().now())
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(msgspec.json.encode({"ok": False, "error": str(error)}).decode())
        raise typer.Exit(2) from error


def _absent(config: Config) -> list[str]:
    """Files that are named and not here. A config may be checked on another machine than it will hold on."""
    tls = config.serving.tls
    named = {"server.tls.cert": tls.cert, "server.tls.key": tls.key} if tls else {}
    named |= {f"providers.{one.name}.ca_file": one.ca_file for one in config.providers if one.ca_file}
    absent = [(key, path) for key, path in named.items() if not Path(path).is_file()]
    return [f"{key} names {path}, which is not on this machine." for key, path in absent]


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
            ("allow_http", _said(one.allow_http)), ("allow_link_local", _said(one.allow_link_local)),
            ("proxy", _said(one.proxy)), ("ca_file", _said(one.ca_file)),
        )]  # fmt: skip
    rows += _serving_rows(config.serving, environ)
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
        *((f"limits.{one.name}", _said(getattr(config.limits, one.name))) for one in fields(config.limits)),
        ("observability.otlp_endpoint", _said(config.otlp_endpoint)),
        ("store.url", shown(config.store)),
        ("store.encrypt", _said(config.encrypt)),
        ("keys.required", "off this machine" if config.keys_required is None else _said(config.keys_required)),
    ]
    return [(path, value, _origin(config, path)) for path, value in sorted(rows, key=lambda row: _order(row[0]))]


def _serving_rows(serving: Serving, environ: Mapping[str, str]) -> list[tuple[str, str]]:
    token, tls = serving.admin_token_env, serving.tls
    return [
        ("server.tls.cert", _said(tls and tls.cert)),
        ("server.tls.key", _said(tls and tls.key)),
        ("server.allowed_hosts", ", ".join(serving.allowed_hosts) or "none"),
        ("server.admin_token_env", f"{token}, which is {'set' if environ.get(token) else 'not set'}"),
        ("server.trusted_proxies", ", ".join(serving.trusted_proxies) or "none"),
        ("server.outgoing_proxy", _said(serving.outgoing_proxy)),
        ("server.outgoing_proxy_auth_env", _said(serving.outgoing_proxy_auth_env)),
        ("server.ca_file", _said(serving.ca_file)),
    ]


_SECTIONS = ("providers", "server", "keys", "routing", "batching", "caching", "limits", "observability", "store")


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
