"""`carpool serve --check`: whether carpool can start, its effective settings, and how it would route a request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.cli.console import complain, console
from carpool.cli.listen import exposed
from carpool.cli.setup import Start, defaults_of, problems, upstreams_of
from carpool.config import Config, Provider, Serving
from carpool.core.clock import SystemClock
from carpool.core.errors import BadCall, CarpoolError, ConfigError
from carpool.core.model import Lane
from carpool.core.ports import HttpRequest, HttpResponse, Parsed, RawRequest
from carpool.engine import Upstream
from carpool.planners.access import call_of, understand
from carpool.planners.access.options import PREFIX, Options, from_headers, span, split_path
from carpool.planners.access.providers import choose
from carpool.planners.access.rules import Rule, Ruling, Verdict, rule_for
from carpool.planners.policy import places
from carpool.planners.routing import Capabilities, Decision, Forecast, noted, route
from carpool.stores import shown

DEFAULT = "default"
_SECTIONS = ("providers", "server", "keys", "routing", "batching", "caching", "limits", "observability", "store")
_INHERITED = {"proxy": "server.outgoing_proxy", "ca_file": "server.ca_file"}  # providers inherit these
_SPANS = ("default_budget", "window")  # in seconds here, with a unit in a file


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
        if self.value is None:
            return "off this machine" if self.path == "keys.required" else "not set"
        if self.is_set is not None:
            return f"{self.value}, which is {'set' if self.is_set else 'not set'}"
        if self.path.rpartition(".")[2] in _SPANS:
            return span(self.value)
        return _text(self.value)

    def document(self) -> dict[str, Any]:
        """The value as JSON: numbers, booleans, null and lists as such; durations in seconds."""
        found = {"value": self.value, "from": self.origin}
        return found if self.is_set is None else found | {"is_set": self.is_set}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, dict):
        return msgspec.json.encode(value).decode() if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_of(config: Config, environ: Mapping[str, str]) -> list[Setting]:
    found: list[tuple[str, Any]] = [row for one in config.providers for row in _provider_rows(one)]
    found += _serving_rows(config.serving)
    found += [
        ("routing.default_budget", config.book.default_budget),
        ("routing.timezone", config.timezone),
        ("routing.rules", [rule.name for rule in config.book.rules]),
        *((".".join(places(one.name)[-1]), getattr(config.policy, one.name)) for one in fields(config.policy)),
        ("caching.mode", config.caching),
        ("limits.max_body_mb", config.max_body_mb),
        *((f"limits.{one.name}", getattr(config.limits, one.name)) for one in fields(config.limits)),
        ("observability.otlp_endpoint", config.otlp_endpoint),
        ("store.url", shown(config.store)),
        ("store.encrypt", config.encrypt),
        ("keys.required", config.keys_required),
    ]
    found.sort(key=lambda row: _SECTIONS.index(row[0].partition(".")[0]))
    return [_setting(config, path, value, environ) for path, value in found]


def _provider_rows(one: Provider) -> list[tuple[str, Any]]:
    rows = (
        ("dialect", one.dialect), ("vendor", one.vendor or None), ("base_url", one.base_url),
        ("window", one.window), ("api_version", one.api_version or None), ("api_key_env", one.api_key_env),
        ("default", one.default), ("allow_http", one.allow_http), ("allow_link_local", one.allow_link_local),
        ("proxy", one.proxy), ("ca_file", one.ca_file), ("webhook_secret_env", one.webhook_secret_env),
        ("models", {name: dict(row) for name, row in one.models.items()}),
    )  # fmt: skip
    return [(f"providers.{one.name}.{name}", value) for name, value in rows]


def _serving_rows(serving: Serving) -> list[tuple[str, Any]]:
    tls = serving.tls
    return [
        ("server.tls.cert", tls and tls.cert),
        ("server.tls.key", tls and tls.key),
        ("server.allowed_hosts", list(serving.allowed_hosts)),
        ("server.admin_token_env", serving.admin_token_env),
        ("server.trusted_proxies", list(serving.trusted_proxies)),
        ("server.outgoing_proxy", serving.outgoing_proxy),
        ("server.outgoing_proxy_auth_env", serving.outgoing_proxy_auth_env),
        ("server.ca_file", serving.ca_file),
    ]


def _setting(config: Config, path: str, value: Any, environ: Mapping[str, str]) -> Setting:
    is_variable = path.endswith("_env") and value is not None
    return Setting(path, value, _origin(config, path, value), bool(environ.get(value)) if is_variable else None)


def _origin(config: Config, path: str, value: object) -> str:
    same = [path]
    for field in fields(config.policy):
        found = [".".join(place) for place in places(field.name)]
        same = found if path in found else same
    if path.startswith("providers.") and value is not None:
        same.append(_INHERITED.get(path.rpartition(".")[2], path))
    return next((config.origins[path] for path in same if path in config.origins), DEFAULT)


# ---------------------------------------------------------------- rules


def rule_document(rule: Rule) -> dict[str, Any]:
    switches = {"true": True, "false": False}
    return {
        "name": rule.name,
        "match": {one.key: switches.get(one.wanted, one.wanted) for one in rule.match},
        "budget": rule.budget,
        "lane": rule.lane,
        "tags": dict(rule.tags),
        "max_budget": rule.max_budget,
        "refuse_budget": rule.refuse_reason or rule.refuse_budget,
        "on_disconnect": rule.on_disconnect,
    }


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


# ------------------------------------------------------------ checking
# How a request would be routed: the provider, the rule and the lane. Nothing is sent.

_MAY = "It may take this lane."
_NO_FLEX = "Its endpoint, its own service tier or its key keeps it from this lane."
_WHOLE = frozenset({"method", "path", "headers", "body"})


@dataclass(frozen=True, slots=True)
class Case:
    """A request from a file, with the options in its path and headers."""

    raw: RawRequest
    options: Options


@dataclass(frozen=True, slots=True)
class Explained:
    provider: str
    base_url: str
    model: str | None
    rule: str | None
    verdicts: list[Verdict]
    options: Options
    lane: str
    reason: str
    batch: str | None = None  # why it can't go into a batch; None if it can
    flex: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        """The result as text."""
        found, options = self.document(), self.options
        found |= {"provider": f"{self.provider} at {self.base_url}", "rule": self.rule or "none"}
        found["budget"] = None if options.budget is None else span(options.budget)
        found["tags"] = ", ".join(f"{name}={value}" for name, value in options.tags.items()) or None
        del found["base_url"], found["rules"]
        return [(name, str(value)) for name, value in found.items() if value is not None]

    def document(self) -> dict[str, Any]:
        """The result as JSON: the budget in seconds, tags as an object."""
        options = self.options
        return {
            "provider": self.provider,
            "base_url": self.base_url,
            "model": self.model,
            "rule": self.rule,
            "budget": options.budget,
            "tags": dict(options.tags),
            "on_disconnect": options.on_disconnect,
            "lane": self.lane,
            "reason": self.reason,
            "batch": self.batch,
            "flex": self.flex,
            "rules": [{"name": row.rule, "matched": row.matched, "because": row.because} for row in self.verdicts],
        }


# ---------------------------------------------------------------- request


def read_case(path: Path) -> Case:
    """`{"method", "path", "headers", "body"}`, or the bare body of a call."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The request in {path} can't be read: {error}.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"The request in {path} must be a JSON object: a body, or method, path, headers and body.")
    if not document.keys() & {"path", "body"}:
        document = {"body": document}
    if unknown := sorted(document.keys() - _WHOLE):
        raise ConfigError(
            f"The request in {path} has {unknown[0][:60]!r}, which is none of {', '.join(sorted(_WHOLE))}."
        )
    try:
        return _case(document)
    except BadCall as error:
        raise ConfigError(f"The request in {path} would be refused: {error}") from error


def _case(document: dict[str, Any]) -> Case:
    body = document.get("body")
    given = document.get("headers") or {}
    if not isinstance(given, dict):
        raise BadCall("Its headers must be names with values.")
    headers = tuple((str(name).lower(), str(value)) for name, value in given.items())
    where = document.get("path") or _guessed_path(body)
    options, path = split_path(str(where).partition("?")[0])
    asked = tuple(pair for pair in headers if pair[0].startswith(PREFIX))
    kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
    if path == "/v1/messages" and not any(name == "anthropic-version" for name, _ in kept):
        kept = (*kept, ("anthropic-version", "2023-06-01"))
    content = body.encode() if isinstance(body, str) else b"" if body is None else msgspec.json.encode(body)
    method = str(document.get("method") or "POST").upper()
    raw = RawRequest(method, path, str(where).partition("?")[2], kept, content)
    return Case(raw, from_headers(asked).over(options))


def _guessed_path(body: Any) -> str:
    body = body if isinstance(body, dict) else {}
    if "input" in body:
        return "/v1/embeddings" if "embed" in str(body.get("model")) else "/v1/responses"
    is_claude = str(body.get("model")).startswith("claude") or "max_tokens" in body
    return "/v1/messages" if is_claude else "/v1/chat/completions"


# ---------------------------------------------------------------- routing


def explain(config: Config, case: Case, now: float) -> Explained:
    try:
        return _explain(config, case, now)
    except ConfigError:
        raise
    except CarpoolError as error:
        raise ConfigError(f"This request would be refused with status {error.status}: {error}") from error


def _explain(config: Config, case: Case, now: float) -> Explained:
    raw, options = case.raw, case.options
    upstreams = upstreams_of(config, lambda one: _NoHttpClient())
    upstream = choose(options.provider, raw.path, raw.headers, upstreams, defaults_of(config))
    if not upstream.dialect.handles(raw.method, raw.path):
        reason = "carpool does not batch this endpoint: it passes through untouched, and no rule is asked."
        return Explained(upstream.provider, upstream.base_url, None, None, [], options, "now", reason)
    parsed = understand(upstream, raw)
    ruling = rule_for(config.book, upstream, raw, parsed, options, now)
    abilities = Capabilities({one.name: one.models for one in config.providers})
    asked = (upstream.provider, upstream.dialect.seller, parsed.model)
    no_batch = parsed.unbatchable or abilities.against(Lane.BATCH, *asked)
    no_flex = abilities.against(Lane.FLEX, *asked) if parsed.flexible and options.key is None else _NO_FLEX
    decision = _decision(config, upstream, parsed, ruling, now, no_batch, no_flex)
    return Explained(
        upstream.provider,
        upstream.base_url,
        parsed.model,
        ruling.rule,
        ruling.explanation(),
        ruling.options,
        str(decision.lane),
        decision.reason,
        no_batch or _MAY,
        no_flex or _MAY,
    )


def _decision(
    config: Config,
    upstream: Upstream,
    parsed: Parsed,
    ruling: Ruling,
    now: float,
    no_batch: str | None,
    no_flex: str | None,
) -> Decision:
    """The engine's decision for a conversation that is not warm, without anything learned from refusals."""
    call = call_of(upstream, parsed, ruling.options, now)
    found = route(call, config.policy, Forecast(), now, can_batch=no_batch, can_flex=no_flex, default=Lane.NOW)
    return noted(call, found)


class _NoHttpClient:
    """An HTTP client that sends nothing, for upstreams that are only inspected."""

    async def send(self, request: HttpRequest) -> HttpResponse:
        raise ConfigError("Nothing is sent while the config is checked.")

    async def aclose(self) -> None:
        return None


class Asked(NamedTuple):
    request: Path | None = None
    everything: bool = False
    as_json: bool = False


class Checked(NamedTuple):
    """The result of checking a config that could be parsed."""

    config: Config
    notes: Sequence[str]
    errors: Sequence[CarpoolError]
    case: Case | None = None
    explained: Explained | None = None


def run_check(config: Config, start: Start, asked: Asked) -> None:
    """Print the effective settings, then the problems; exit with 2 if there are any."""
    checked = _checked(config, start, asked.request)
    if asked.as_json:
        _print_json(_document(checked))
    else:
        _print(checked, everything=asked.everything)
    if checked.errors:
        raise typer.Exit(2)


def refuse_json(error: CarpoolError) -> None:
    """Report a config that could not be parsed, as JSON."""
    _print_json({"ok": False, "error": str(error), "errors": [str(error)]})


def _checked(config: Config, start: Start, request: Path | None) -> Checked:
    errors, case, explained = problems(config, start), None, None
    notes = config.notes if errors else (*config.notes, *exposed(start.host, config.serving))
    if request is not None:
        try:
            case = read_case(request)
            explained = explain(config, case, SystemClock().now())
        except ConfigError as error:
            errors.append(error)
    return Checked(config, notes, errors, case, explained)


# ---------------------------------------------------------------- text output


def _print(checked: Checked, *, everything: bool) -> None:
    out = console()
    _print_settings(out, checked.config, everything)
    if checked.config.book.rules:
        rules = _table("rule", "matches", "does")
        for rule in checked.config.book.rules:
            rules.add_row(Text(rule.name), Text(wants_of(rule)), Text(effects_of(rule)))
        out.print(rules)
    if checked.case is not None and checked.explained is not None:
        _print_explained(out, checked.case, checked.explained)
    for note in checked.notes:
        out.print(Text.assemble(("note: ", "yellow"), note), soft_wrap=True)
    if checked.errors:
        complain(checked.errors)
    else:
        out.print(Text("The config is sound, and carpool can start with it here.", style="bold green"), soft_wrap=True)


def _print_settings(out: Console, config: Config, everything: bool) -> None:
    """Print the settings that were set, and the number of defaults."""
    found = settings_of(config, os.environ)
    chosen = [one for one in found if everything or one.origin != DEFAULT]
    if chosen:
        table = _table("setting", "value", "from")
        for one in sorted(chosen, key=lambda one: one.origin == DEFAULT):
            style = "" if one.origin != DEFAULT else "dim"
            table.add_row(*(Text(text, style=style) for text in (one.path, one.text, one.origin)))
        out.print(table)
    if rest := len(found) - len(chosen):
        which = f"{rest} other settings have their defaults" if chosen else "All settings have their defaults"
        out.print(Text(f"{which}: --all shows them.", style="dim"), soft_wrap=True)


def _print_explained(out: Console, case: Case, told: Explained) -> None:
    out.print(Text(f"\n{case.raw.method} {case.raw.path}", style="bold"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in told.rows():
        table.add_row(Text(name, style="dim"), Text(value))
    out.print(table)
    for place, verdict in enumerate(told.verdicts, 1):
        sign, style = {True: ("matches", "green"), False: ("no", "red"), None: ("not asked", "dim")}[verdict.matched]
        out.print(
            Text.assemble(f"{place:>3}. {verdict.rule}: ", (sign, style), f", since {verdict.because}."), soft_wrap=True
        )


def _table(*heads: str) -> Table:
    """A table whose first column is never cut, so that names can be searched for."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, head in enumerate(heads):
        table.add_column(head, overflow="fold", no_wrap=place == 0)
    return table


# ---------------------------------------------------------------- JSON output


def _document(checked: Checked) -> dict[str, Any]:
    config, errors = checked.config, [str(error) for error in checked.errors]
    found: dict[str, Any] = {"ok": not errors}
    if errors:
        found |= {"error": errors[0], "errors": errors}
    found |= {
        "settings": {one.path: one.document() for one in settings_of(config, os.environ)},
        "rules": [rule_document(rule) for rule in config.book.rules],
        "notes": list(checked.notes),
    }
    if checked.explained is not None:
        found["request"] = checked.explained.document()
    return found


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
