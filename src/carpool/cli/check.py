"""`carpool serve --check`: whether carpool can start, its effective settings, and how it would route a request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.console import console, print_errors, print_json
from carpool.cli.listen import exposed
from carpool.cli.setup import defaults_of, upstreams_of
from carpool.config import Config, ConnectionLimits, ServerSettings, Tls
from carpool.core.clock import SystemClock
from carpool.core.errors import CarpoolError, ConfigError
from carpool.core.model import Call, Lane
from carpool.core.ports import RawRequest
from carpool.core.prices import PriceBook
from carpool.core.upstream import Upstream
from carpool.dialects import dialect_of_endpoint, guessed_endpoint
from carpool.http import Http1Client
from carpool.planners.access.options import PREFIX, Options, from_headers, split_path
from carpool.planners.access.providers import choose
from carpool.planners.access.rules import Rule, apply_rules, call_of, understand
from carpool.planners.agents import Agents
from carpool.planners.forecast import Forecast
from carpool.planners.policy import places, span
from carpool.planners.quoter import KnownPrompt, Quoter, lane_prices
from carpool.planners.quotes import Quote
from carpool.planners.routing import BatchDeadlines, Capabilities, Quoting, noted, route
from carpool.planners.tasks import TaskBook
from carpool.stores import shown

DEFAULT = "default"
_SECTIONS = (
    "providers",
    "server",
    "keys",
    "routing",
    "batching",
    "caching",
    "limits",
    "observability",
    "store",
    "recording",
)
_INHERITED = {"proxy": "server.outgoing_proxy", "ca_file": "server.ca_file"}  # providers inherit these
_SPANS = ("default_budget", "window")  # in seconds here, with a unit in a file
_MAY = "It may take this lane."
_NO_FLEX = "Its endpoint, its own service tier or its key keeps it from this lane."


def run_check(
    config: Config, errors: list[CarpoolError], host: str, request: Path | None, *, everything: bool, as_json: bool
) -> None:
    """Print the effective settings, then the problems; exit with 2 if there are any."""
    explained = None
    notes = config.notes if errors else (*config.notes, *exposed(host, config.serving))
    if request is not None:
        try:
            raw, options = read_request(request)
            explained = explain(config, raw, options, SystemClock().now())
        except ConfigError as error:
            errors.append(error)
        except CarpoolError as error:
            errors.append(ConfigError(f"This request would be refused with status {error.status}: {error}"))
    settings = _settings(config, os.environ)
    if as_json:
        document = _verdict(errors) | {
            "settings": {setting.path: setting.document() for setting in settings},
            "rules": [_rule_document(rule) for rule in config.book.rules],
            "notes": list(notes),
        }
        if explained is not None:
            document["request"] = explained
        print_json(document)
    else:
        out = console()
        _print_settings(out, settings, everything)
        _print_rules(out, config.book.rules)
        if explained is not None:
            out.print(Text(f"\n{raw.method} {raw.path}", style="bold"), soft_wrap=True)
            _print_explained(out, explained)
        for note in notes:
            out.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
        print_errors(errors)
        if not errors:
            sound = "The config is sound, and carpool can start with it here."
            out.print(Text(sound, style="bold green"), soft_wrap=True)
    if errors:
        raise typer.Exit(2)


def refuse_json(error: CarpoolError) -> None:
    """Report a config that could not be parsed, as JSON."""
    print_json(_verdict([error]))


def _verdict(errors: Sequence[CarpoolError]) -> dict[str, Any]:
    messages = [str(error) for error in errors]
    return {"ok": False, "error": messages[0], "errors": messages} if errors else {"ok": True}


# ---------------------------------------------------------------- settings


class Setting(NamedTuple):
    """`path` is its key in the file. If the value names an environment variable, `is_set` tells whether that is set;
    its value is never shown."""

    path: str
    value: Any
    origin: str
    is_set: bool | None = None

    @property
    def text(self) -> str:
        """The value as text."""
        value = self.value
        if value is None:
            return "off this machine" if self.path == "keys.required" else "not set"
        if self.is_set is not None:
            return f"{value}, which is {'set' if self.is_set else 'not set'}"
        if self.path.rpartition(".")[2] in _SPANS:
            return span(value)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return ", ".join(map(str, value)) or "none"
        if isinstance(value, dict):
            return msgspec.json.encode(value).decode() if value else "none"
        return f"{value:g}" if isinstance(value, float) else str(value)

    def document(self) -> dict[str, Any]:
        """The value as JSON: numbers, booleans, null and lists as such; durations in seconds."""
        document = {"value": self.value, "from": self.origin}
        return document if self.is_set is None else document | {"is_set": self.is_set}


def _settings(config: Config, environ: Mapping[str, str]) -> list[Setting]:
    """The settings as the config's table has them."""
    rows = [
        *((f"providers.{row.name}", row, name) for row in config.providers for name in _names(row) if name != "name"),
        *(("server.tls", config.serving.tls, name) for name in _names(Tls)),
        *(("server", config.serving, name) for name in _names(ServerSettings) if name != "tls"),
        *(("limits", config.limits, name) for name in _names(ConnectionLimits)),
    ]
    values = {f"{section}.{name}": getattr(row, name, None) for section, row, name in rows}
    values |= {field.metadata["at"]: getattr(config, field.name) for field in fields(Config) if field.metadata}
    values |= {".".join(places(name)[-1]): getattr(config.policy, name) for name in _names(config.policy)}
    values |= {
        "routing.default_budget": config.book.default_budget,
        "routing.rules": [rule.name for rule in config.book.rules],
        "store.url": shown(config.store),
    }
    paths = sorted(values, key=lambda path: _SECTIONS.index(path.partition(".")[0]))
    return [_setting(path, values[path], config, environ) for path in paths]


def _names(table: Any) -> list[str]:
    return [field.name for field in fields(table)]


def _setting(path: str, value: Any, config: Config, environ: Mapping[str, str]) -> Setting:
    value = None if value == "" else list(value) if isinstance(value, tuple) else value
    is_set = bool(environ.get(value)) if path.endswith("_env") and value is not None else None
    return Setting(path, value, _origin(config, path, value), is_set)


def _origin(config: Config, path: str, value: object) -> str:
    same = [path]
    for field in fields(config.policy):
        aliases = [".".join(place) for place in places(field.name)]
        same = aliases if path in aliases else same
    if path.startswith("providers.") and value is not None:
        same.append(_INHERITED.get(path.rpartition(".")[2], path))
    return next((config.origins[path] for path in same if path in config.origins), DEFAULT)


def _print_settings(out: Console, settings: Sequence[Setting], everything: bool) -> None:
    """Print the settings that were set, and the number of defaults."""
    chosen = [setting for setting in settings if everything or setting.origin != DEFAULT]
    if chosen:
        table = _table("setting", "value", "from")
        for setting in sorted(chosen, key=lambda setting: setting.origin == DEFAULT):
            style = "" if setting.origin != DEFAULT else "dim"
            table.add_row(*(Text(text, style=style) for text in (setting.path, setting.text, setting.origin)))
        out.print(table)
    if rest := len(settings) - len(chosen):
        which = f"{rest} other settings have their defaults" if chosen else "All settings have their defaults"
        out.print(Text(f"{which}: --all shows them.", style="dim"), soft_wrap=True)


def _table(*heads: str) -> Table:
    """A table whose first column is never cut, so that names can be searched for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=place == 0)
    return table


# ---------------------------------------------------------------- rules


def _rule_document(rule: Rule) -> dict[str, Any]:
    switches = {"true": True, "false": False}
    return {
        "name": rule.name,
        "match": {condition.key: switches.get(condition.wanted, condition.wanted) for condition in rule.match},
        "budget": rule.budget,
        "task_budget": rule.task_budget,
        "lane": rule.lane,
        "tags": dict(rule.tags),
        "max_budget": rule.max_budget,
        "refuse_budget": rule.refuse_reason or rule.refuse_budget,
        "on_disconnect": rule.on_disconnect,
        "caching": rule.caching,
    }


def _print_rules(out: Console, rules: Sequence[Rule]) -> None:
    table = _table("rule", "matches", "does")
    for rule in rules:
        wanted = "; ".join(f"{condition.key} {condition.wanted}" for condition in rule.match) or "everything"
        table.add_row(Text(rule.name), Text(wanted), Text(_effects(rule)))
    if rules:
        out.print(table)


def _effects(rule: Rule) -> str:
    reason = f" ({rule.refuse_reason})" if rule.refuse_reason else ""
    effects = [
        rule.budget is not None and f"budget {span(rule.budget)}",
        rule.task_budget is not None and f"task budget {span(rule.task_budget)}",
        rule.lane is not None and f"lane {rule.lane}",
        rule.max_budget is not None and f"at most {span(rule.max_budget)}",
        rule.refuse_budget and f"no budgets of clients{reason}",
        rule.tags and "tags " + ", ".join(f"{name}={value}" for name, value in rule.tags.items()),
        rule.on_disconnect and f"on disconnect {rule.on_disconnect}",
        rule.caching and f"caching {rule.caching}",
    ]
    return "; ".join(effect for effect in effects if isinstance(effect, str) and effect)


# ---------------------------------------------------------------- a request
# How a request would be routed: the provider, the rule and the lane. Nothing is sent.


class RequestFile(msgspec.Struct, forbid_unknown_fields=True):
    method: str = "POST"
    path: str | None = None
    headers: dict[str, Any] | None = None
    body: Any = None

    def __repr__(self) -> str:  # never the content
        return f"RequestFile({self.method})"


def read_request(path: Path) -> tuple[RawRequest, Options]:
    """The request of a `RequestFile`, or of a file with the bare body of a call; and the options in its path and
    headers."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        asked = msgspec.convert(content if content.keys() & {"path", "body"} else {"body": content}, RequestFile)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The request in {path} can't be read: {error}. It must be a JSON object: the body of a call, or method, "
            "path, headers and body."
        ) from error
    headers = tuple((name.lower(), str(value)) for name, value in (asked.headers or {}).items())
    guessed = guessed_endpoint(asked.body if isinstance(asked.body, dict) else {})
    url, _, query = (asked.path or guessed).partition("?")
    options, url = split_path(url)
    kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
    dialect = dialect_of_endpoint(asked.method.upper(), url)
    if dialect is not None:
        kept += tuple(pair for pair in dialect.usual_headers if pair[0] not in dict(kept))
    body = asked.body.encode() if isinstance(asked.body, str) else b""
    if not isinstance(asked.body, str | None):
        body = msgspec.json.encode(asked.body)
    return RawRequest(asked.method.upper(), url, query, kept, body), from_headers(headers).over(options)


def _quoting(call: Call, upstream: Upstream, abilities: Capabilities, book: PriceBook, now: float) -> Quoting:
    """What the lanes cost for a call of which nothing is known but its size."""
    dialect, quoter = upstream.dialect, Quoter(Forecast(), Agents())
    able = abilities.of(upstream.provider, dialect, call.model)

    def quote(lanes: Sequence[Lane], times: BatchDeadlines) -> Sequence[Quote]:
        prices = {lane: lane_prices(book, able, dialect, call.model, lane, now) for lane in lanes}
        return quoter.quote(call, KnownPrompt(dialect.estimate_tokens(call.body)), prices, times, now)

    return quote


def explain(config: Config, raw: RawRequest, options: Options, now: float) -> dict[str, Any]:
    """What would become of a request: the engine's decision for a conversation that is not warm, without anything
    learned from refusals."""
    upstreams = upstreams_of(config, lambda provider: Http1Client())  # nothing is sent
    upstream = choose(options.provider, raw.path, raw.headers, upstreams, defaults_of(config))
    model = rule = task = no_batch = no_flex = None
    verdicts: list[dict[str, Any]] = []
    lane, reason = "now", "carpool does not batch this endpoint: it passes through untouched, and no rule is asked."
    if upstream.dialect.handles(raw.method, raw.path):
        parsed = understand(upstream, raw)
        ruling = apply_rules(config.book, upstream, raw, parsed, options, now)
        model, rule, options = parsed.model, ruling.rule, ruling.options
        verdicts = [{"name": row.rule, "matched": row.matched, "because": row.because} for row in ruling.explanation()]
        abilities = Capabilities({provider.name: provider.models for provider in config.providers})
        asked = (upstream.provider, upstream.dialect, parsed.model)
        no_batch = parsed.unbatchable or abilities.why_not(Lane.BATCH, *asked)
        no_flex = abilities.why_not(Lane.FLEX, *asked) if parsed.flexible and options.key is None else _NO_FLEX
        forecast = Forecast()
        called = call_of(upstream, parsed, options, now)
        task = called.task or None
        call = TaskBook().bound(called, now, forecast)
        quote = _quoting(call, upstream, abilities, PriceBook(), now)
        routed = route(
            call, config.policy, forecast, now, quote, can_batch=no_batch, can_flex=no_flex, default=Lane.NOW
        )
        lane, reason = noted(call, routed).lane, noted(call, routed).reason
        no_batch, no_flex = no_batch or _MAY, no_flex or _MAY
    return {
        "provider": upstream.provider,
        "base_url": upstream.base_url,
        "model": model,
        "rule": rule,
        "budget": options.budget,  # in seconds
        "task": task,
        "task_budget": options.task_budget,
        "tags": dict(options.tags),
        "on_disconnect": options.on_disconnect,
        "caching": str(options.caching or config.policy.caching),
        "lane": str(lane),
        "reason": reason,
        "batch": no_batch,
        "flex": no_flex,
        "rules": verdicts,
    }


def _print_explained(out: Console, explained: Mapping[str, Any]) -> None:
    budget, task_budget = explained["budget"], explained["task_budget"]
    rows = {
        **explained,
        "provider": f"{explained['provider']} at {explained['base_url']}",
        "rule": explained["rule"] or "none",
        "budget": None if budget is None else span(budget),
        "task budget": None if task_budget is None else span(task_budget),
        "tags": ", ".join(f"{name}={value}" for name, value in explained["tags"].items()) or None,
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None and name not in ("base_url", "rules", "task_budget"):
            table.add_row(Text(name, style="dim"), Text(str(value)))
    out.print(table)
    for place, verdict in enumerate(explained["rules"], 1):
        sign = {True: ("matches", "green"), False: ("no", "red"), None: ("not asked", "dim")}[verdict["matched"]]
        out.print(
            Text.assemble(f"{place:>3}. {verdict['name']}: ", sign, f", since {verdict['because']}."), soft_wrap=True
        )
