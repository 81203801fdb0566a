"""The effective settings, each with its value and its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import msgspec

from carpool.config import Config, Provider, Serving
from carpool.planners.access.options import span
from carpool.planners.access.rules import Rule
from carpool.planners.policy import places
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
