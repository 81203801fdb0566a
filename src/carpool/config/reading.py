"""Every section of a config, checked and made into values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from carpool.config.layering import CACHING_KEYS, PROVIDER_KEYS, Document, Flag, layered
from carpool.config.values import BUILT_IN, DEFAULT_BODY_MB, DEFAULT_STORE, Config, Provider
from carpool.dialects import DIALECTS
from carpool.errors import ConfigError
from carpool.policy import RoutingPolicy, read_settings, sections
from carpool.rules import RuleBook, read_rules
from carpool.rules.reading import read_budget, read_zone
from carpool.settings import SWITCH, Choice, Range, Shape, check, known, mapping, named

SECTIONS: Final = sections()
_NAME: Final = Shape(re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}"), "a name of letters, digits, '_', '.' and '-'")
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_STORE: Final = Shape(re.compile(r"\S.{0,4000}"), "a path, or a URL such as sqlite:///carpool.db")
_BODY: Final = Range(0.001, 1000, whole=False)
_LOCAL: Final = ("127.0.0.1", "localhost", "::1")


def read_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[Flag] = (),
) -> Config:
    """Without a file and without anything set, the defaults. Raises `ConfigError` with a sentence for what is wrong."""
    environ = os.environ if environ is None else environ
    document = Document()
    try:
        document = layered(path, environ, flags)
        return _config(document, environ)
    except ConfigError as error:
        said = str(error)
        elsewhere = said.startswith(("CARPOOL_", "The value of CARPOOL_", *document.names.values()))
        if path is None or elsewhere:
            raise
        raise ConfigError(f"{os.fspath(path)}: {said}") from error


def _config(document: Document, environ: Mapping[str, str]) -> Config:
    content = document.sections
    if "budgets" in content:
        _check_budgets(content["budgets"], document.shown("budgets"))
    policy = RoutingPolicy(**read_settings(content, document.names))  # type: ignore[arg-type]
    routing = mapping(content.get("routing"), "The section routing")
    config = Config(
        providers=_providers(document),
        policy=policy,
        book=_book(document, routing),
        timezone=str(routing.get("timezone") or "UTC"),
        max_body_mb=_max_body(document),
        store=_store(document),
        caching=_caching(document),
        otlp_endpoint=_otlp(document),
        origins=document.origins,
    )
    return replace(config, notes=tuple(_notes(config, environ)))


# ---------------------------------------------------------------- providers


def _providers(document: Document) -> tuple[Provider, ...]:
    listed = mapping(document.sections.get("providers"), "The section providers")
    names = [str(name) for name in listed]
    if not document.lists_providers:  # flags and variables change and add; a list in a file is the whole list
        names = [*BUILT_IN, *(name for name in names if name not in BUILT_IN)]
    return tuple(_with_defaults([_provider(name, listed.get(name), document) for name in names]))


def _provider(name: str, value: object, document: Document) -> Provider:
    path = f"providers.{name}"
    check(_NAME, name, f"The name of {path[:80]}")
    content = mapping(value, path)
    if "api_key" in content:
        raise ConfigError(
            f"{path}.api_key would put a key into a file. Put it into an environment variable, and write the "
            f"variable's name as {path}.api_key_env."
        )
    given = {known(key, PROVIDER_KEYS, f"{path}."): one for key, one in content.items() if one is not None}
    built_in = BUILT_IN.get(name)
    dialect = given.get("dialect", built_in.dialect if built_in else name if name in DIALECTS else None)
    shown = document.shown
    if dialect is None:
        raise ConfigError(f"{path}.dialect is missing: say which wire it speaks, {' or '.join(sorted(DIALECTS))}.")
    check(Choice(tuple(DIALECTS), f"one of {', '.join(sorted(DIALECTS))}"), dialect, shown(f"{path}.dialect"))
    base_url = given.get("base_url", built_in.base_url if built_in and dialect == built_in.dialect else None)
    if base_url is None:
        raise ConfigError(f"{path}.base_url is missing: say where the provider is, as in https://api.openai.com/v1.")
    check(SWITCH, given.get("default", False), shown(f"{path}.default"))
    return Provider(
        name,
        str(dialect),
        _base_url(base_url, shown(f"{path}.base_url")),
        _variable(given.get("api_key_env"), shown(f"{path}.api_key_env")),
        bool(given.get("default", False)),
    )


def _base_url(
    value: object, path: str, what: str = "a provider's base URL", example: str = "https://api.anthropic.com"
) -> str:
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        fits = parts is not None and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        fits, parts = False, None
    if parts is not None and "@" in parts.netloc:
        raise ConfigError(
            f"{path} carries a user name or a password: clients bring their key, or api_key_env names it."
        )
    if not fits or parts is None or parts.query or parts.fragment:
        raise ConfigError(f"{path} is {named(value)}, which is not {what}: write one such as {example}.")
    return str(value)


def _variable(value: object, path: str) -> str | None:
    """Never repeated when wrong: it is most likely a key."""
    if value is None:
        return None
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ConfigError(
            f"{path} is not the name of an environment variable: write a name such as ANTHROPIC_API_KEY, "
            "not the key itself."
        )
    return value


def _with_defaults(providers: list[Provider]) -> list[Provider]:
    """One of each dialect is its default: the marked one, or the only one, or the one named like its dialect."""
    found = []
    for one in providers:
        same = [other for other in providers if other.dialect == one.dialect]
        marked = [other.name for other in same if other.default]
        if len(marked) > 1:
            raise ConfigError(
                f"providers.{marked[0]} and providers.{marked[1]} are both the default of the dialect {one.dialect}: "
                "mark one."
            )
        by_name = len(same) == 1 or one.name == one.dialect
        found.append(replace(one, default=one.default if marked else by_name))
    return found


# ---------------------------------------------------------------- the other sections


def _book(document: Document, routing: Mapping[object, object]) -> RuleBook:
    timezone = routing.get("timezone", "UTC") or "UTC"
    read_zone(timezone, document.shown("routing.timezone"))  # checked even where no rule asks for the time
    rules = read_rules(routing.get("rules"), document.shown("routing.rules"), str(timezone))
    budget = routing.get("default_budget")
    shown = document.shown("routing.default_budget")
    return RuleBook(rules, None if budget is None else read_budget(budget, shown))


def _max_body(document: Document) -> float:
    value = mapping(document.sections.get("limits"), "The section limits").get("max_body_mb")
    if value is None:
        return DEFAULT_BODY_MB
    check(_BODY, value, document.shown("limits.max_body_mb"))
    return float(value)  # type: ignore[arg-type]


def _store(document: Document) -> str:
    value = mapping(document.sections.get("store"), "The section store").get("url")
    if value is None:
        return DEFAULT_STORE
    check(_STORE, value, document.shown("store.url"))
    return str(value)


def _caching(document: Document) -> str:
    section = mapping(document.sections.get("caching"), "The section caching")
    for key in section:
        known(key, CACHING_KEYS, "caching.")
    mode = section.get("mode")
    if mode is None:
        return "observe"
    mode = "off" if mode is False else mode  # what YAML makes of a bare off
    shown = document.shown("caching.mode")
    check(Choice(("off", "observe", "plan"), "off, observe or plan"), mode, shown)
    if mode == "plan":
        raise ConfigError(f"{shown} is plan, and carpool does not plan caches yet: write observe or off.")
    return str(mode)


def _check_budgets(value: object, shown: str) -> None:
    """To take these and not keep them would spend money that the user meant to keep."""
    if value:
        raise ConfigError(
            f"{shown} sets spending limits, and carpool does not enforce them yet: it would spend past them. Take the "
            "section out, and set limits at the provider."
        )


def _otlp(document: Document) -> str | None:
    value = mapping(document.sections.get("observability"), "The section observability").get("otlp_endpoint")
    return None if value is None else _otlp_url(value, document.shown("observability.otlp_endpoint"))


def _otlp_url(value: object, path: str) -> str:
    return _base_url(value, path, "the URL of a collector", "http://127.0.0.1:4318")


def _notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if config.otlp_endpoint:
        notes.append("observability.otlp_endpoint is set, but traces are not sent yet.")
    for one in config.providers:
        parts = urlsplit(one.base_url)
        if parts.scheme == "http" and parts.hostname not in _LOCAL:
            notes.append(f"Keys travel to the provider {one.name} unencrypted: its base URL begins with http://.")
        if one.api_key_env and not environ.get(one.api_key_env):
            notes.append(
                f"providers.{one.name}.api_key_env names {one.api_key_env}, which is not set: clients must bring a key."
            )
    return notes
