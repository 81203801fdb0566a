"""Every section of a config, checked and made into values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

from carpool.capabilities import read_models
from carpool.config.layering import CACHING_KEYS, PROVIDER_KEYS, Document, Flag, layered
from carpool.config.limits import read_limits
from carpool.config.networking import DIRECT, check_reach, is_loopback, pem, proxy, read_serving, variable
from carpool.config.networking import base_url as read_url
from carpool.config.relatives import OTHERS, Habits, based, batchable, home_of, read_habits
from carpool.config.values import BUILT_IN, DEFAULT_BODY_MB, DEFAULT_STORE, Config, Provider, Serving
from carpool.dialects import DIALECTS, OPENAI, RELATIVES
from carpool.errors import ConfigError
from carpool.policy import RoutingPolicy, read_settings, sections
from carpool.rules import RuleBook, read_rules
from carpool.rules.reading import read_budget, read_zone
from carpool.settings import SWITCH, Choice, Range, Shape, check, known, mapping

SECTIONS: Final = sections()
_NAME: Final = Shape(re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}"), "a name of letters, digits, '_', '.' and '-'")
_STORE: Final = Shape(re.compile(r"\S.{0,4000}"), "a path, or a URL such as sqlite:///carpool.db")
_BODY: Final = Range(0.001, 1000, whole=False)


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
    serving = read_serving(document)
    config = Config(
        providers=tuple(_on_the_way(one, serving) for one in _providers(document)),
        policy=policy,
        book=_book(document, routing),
        timezone=str(routing.get("timezone") or "UTC"),
        max_body_mb=_max_body(document),
        store=_store(document),
        encrypt=bool(_switch(document, "store", "encrypt")),
        keys_required=_switch(document, "keys", "required"),
        caching=_caching(document),
        otlp_endpoint=_otlp(document),
        serving=serving,
        limits=read_limits(document),
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
    dialect = given.get("dialect", built_in.dialect if built_in else _usual_dialect(name, given))
    shown = document.shown
    if dialect is None:
        raise ConfigError(f"{path}.dialect is missing: say which wire it speaks, {' or '.join(sorted(DIALECTS))}.")
    check(Choice(tuple(DIALECTS), f"one of {', '.join(sorted(DIALECTS))}"), dialect, shown(f"{path}.dialect"))
    home = built_in.base_url if built_in and dialect == built_in.dialect else home_of(name, given)
    base_url = given.get("base_url", home)
    if base_url is None:
        raise ConfigError(f"{path}.base_url is missing: say where the provider is, as in https://api.openai.com/v1.")
    base_url = read_url(base_url, shown(f"{path}.base_url"))
    habits = read_habits(given, path, str(dialect), base_url, shown)
    return _reached(
        Provider(
            name,
            str(dialect),
            based(habits, base_url),
            variable(given.get("api_key_env"), shown(f"{path}.api_key_env"), "ANTHROPIC_API_KEY"),
            _allowed(given, "default", path, document),
            allow_http=_allowed(given, "allow_http", path, document),
            allow_link_local=_allowed(given, "allow_link_local", path, document),
            proxy=proxy(given.get("proxy"), shown(f"{path}.proxy")),
            ca_file=pem(given.get("ca_file"), shown(f"{path}.ca_file")),
            webhook_secret_env=_hook_variable(given, str(dialect), habits, shown(f"{path}.webhook_secret_env")),
            models=batchable(given, path, read_models(given.get("models"), shown(f"{path}.models")), shown),
            relative=habits.relative,
            window=habits.window,
            api_version=habits.api_version,
        ),
        shown,
    )


def _usual_dialect(name: str, given: Mapping[str, object]) -> str | None:
    if name in DIALECTS:
        return name
    return OPENAI.name if "relative" in given or name in OTHERS else None


def _hook_variable(given: Mapping[str, object], dialect: str, habits: Habits, shown: str) -> str | None:
    found = variable(given.get("webhook_secret_env"), shown, "OPENAI_WEBHOOK_SECRET")
    family = RELATIVES.get(habits.relative or dialect)
    if found is not None and (family is None or not family.hooks):
        raise ConfigError(f"{shown} is for providers with webhooks, and this one has none: take it out.")
    return found


def _allowed(given: Mapping[str, object], key: str, path: str, document: Document) -> bool:
    value = given.get(key, False)
    check(SWITCH, value, document.shown(f"{path}.{key}"))
    return bool(value)


def _reached(one: Provider, shown: Callable[[str], str]) -> Provider:
    path = f"providers.{one.name}"
    check_reach(one, shown(f"{path}.base_url"))
    if one.proxy not in (None, DIRECT) and not one.base_url.startswith("https:"):
        raise ConfigError(
            f"{shown(f'{path}.proxy')} is for a provider that is reached by https://, and {path}.base_url is not: "
            "take one of them out."
        )
    return one


def _on_the_way(one: Provider, serving: Serving) -> Provider:
    """The way out of the house, for those who go out and have none of their own."""
    way = one.proxy
    if way is None and one.base_url.startswith("https:") and not is_loopback(urlsplit(one.base_url).hostname or ""):
        way = serving.outgoing_proxy
    return replace(one, proxy=None if way == DIRECT else way, ca_file=one.ca_file or serving.ca_file)


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


def _switch(document: Document, section: str, key: str) -> bool | None:
    value = mapping(document.sections.get(section), f"The section {section}").get(key)
    if value is not None:
        check(SWITCH, value, document.shown(f"{section}.{key}"))
    return None if value is None else bool(value)


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
    return read_url(value, path, "the URL of a collector", "http://127.0.0.1:4318")


def _notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if config.otlp_endpoint:
        notes.append("observability.otlp_endpoint is set, but traces are not sent yet.")
    for one in config.providers:
        parts = urlsplit(one.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            notes.append(f"Keys travel to the provider {one.name} unencrypted: its base URL begins with http://.")
        if one.api_key_env and not environ.get(one.api_key_env):
            notes.append(
                f"providers.{one.name}.api_key_env names {one.api_key_env}, which is not set: clients must bring a key."
            )
    return notes
