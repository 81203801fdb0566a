"""Check every section of a config and build its values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from carpool.config.layers import CACHING_KEYS, PROVIDER_KEYS, ConfigDocument, Flag, layered
from carpool.config.network import DIRECT, check_reach, is_loopback, pem, proxy, read_serving, variable
from carpool.config.network import base_url as read_url
from carpool.config.values import BUILT_IN, DEFAULT_BODY_MB, DEFAULT_STORE, Config, Provider, Serving, read_limits
from carpool.core.errors import ConfigError
from carpool.core.settings import SWITCH, Choice, Range, Shape, check, known, mapping
from carpool.dialects import COMPATIBLE_PROVIDERS, DIALECTS, OPENAI, CompatibleProvider, compatible_provider
from carpool.planners.access.read_rules import read_budget, read_rules, read_zone
from carpool.planners.access.rules import RuleBook
from carpool.planners.capabilities import read_models
from carpool.planners.policy import RoutingPolicy, read_settings, sections

# ------------------------------------------------------------ OpenAI-compatible providers
# Which one a provider is, and the settings that only some of them have.

HOUR: Final = 3600.0
OTHERS: Final = {name: row for name, row in COMPATIBLE_PROVIDERS.items() if name != OPENAI.name}
_NAMES: Final = Choice(tuple(COMPATIBLE_PROVIDERS), f"one of {', '.join(sorted(COMPATIBLE_PROVIDERS))}")
_WINDOW: Final = re.compile(r"(\d{1,4})(h|d)")
_HOURS: Final = {"h": 1, "d": 24}
_VERSION: Final = Shape(re.compile(r"[A-Za-z0-9.-]{1,40}"), "a version such as preview or 2025-04-01-preview")

Shown = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Habits:
    """The settings in a provider's section beyond its address."""

    vendor: str = ""  # empty for the dialect's own
    window: float | None = None
    api_version: str = ""


def home_of(name: str, given: Mapping[str, object]) -> str | None:
    """The usual base URL of an OpenAI-compatible provider, by the provider's name or by its `vendor` setting."""
    named = given.get("vendor", name)
    return (OTHERS[named].home or None) if isinstance(named, str) and named in OTHERS else None


def read_habits(given: Mapping[str, object], path: str, dialect: str, base_url: str, shown: Shown) -> Habits:
    if dialect != OPENAI.name:
        _refuse(given, path, dialect, shown)
        return Habits()
    named = given.get("vendor")
    if named is None and path.removeprefix("providers.") in OTHERS:
        named = path.removeprefix("providers.")
    if named is not None:
        check(_NAMES, named, shown(f"{path}.vendor"))
    row = compatible_provider(base_url, None if named is None else str(named))
    name = row.name if named is not None or row.name != OPENAI.name else ""
    return Habits(name, _window(given, path, row, shown), _version(given, path, shown))


def based(habits: Habits, base_url: str) -> str:
    """Add the provider's usual path to a base URL that has none."""
    if not habits.vendor or urlsplit(base_url).path.strip("/"):
        return base_url
    return base_url.rstrip("/") + COMPATIBLE_PROVIDERS[habits.vendor].path


def batchable(given: Mapping[str, object], path: str, models: dict[str, dict[str, Any]], shown: Shown) -> Any:
    """The capabilities of models. If the config says that the provider has no batches, no model has."""
    value = given.get("batch", True)
    check(SWITCH, value, shown(f"{path}.batch"))
    if value:
        return models
    return {pattern: {**row, "batch": False} for pattern, row in (models | {"*": models.get("*", {})}).items()}


def _refuse(given: Mapping[str, object], path: str, dialect: str, shown: Shown) -> None:
    for key in ("vendor", "window", "api_version"):
        if key in given:
            raise ConfigError(
                f"{shown(f'{path}.{key}')} is for OpenAI-compatible providers, not for {dialect}: take it out."
            )


def _window(given: Mapping[str, object], path: str, vendor: CompatibleProvider, shown: Shown) -> float | None:
    value = given.get("window")
    if value is None:
        return None
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    longest = vendor.longest_window
    seconds = 0.0 if match is None else int(match[1]) * _HOURS[match[2]] * HOUR
    if not vendor.limits.window <= seconds <= longest:
        allowed = f"from 24h to {longest / HOUR:.0f}h" if longest > vendor.limits.window else "24h, its only one"
        raise ConfigError(f"{shown(f'{path}.window')} is no window of {vendor.said}: it must be {allowed}.")
    return seconds


def _version(given: Mapping[str, object], path: str, shown: Shown) -> str:
    value = given.get("api_version")
    if value is None:
        return ""
    check(_VERSION, value, shown(f"{path}.api_version"))
    return str(value)


SECTIONS: Final = sections()
_NAME: Final = Shape(re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}"), "a name of letters, digits, '_', '.' and '-'")
_STORE: Final = Shape(re.compile(r"\S.{0,4000}"), "a path, or a URL such as sqlite:///carpool.db")
_BODY: Final = Range(0.001, 1000, whole=False)


def read_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Iterable[Flag] = (),
) -> Config:
    """Load a config; the defaults without a file or any setting. Raises `ConfigError` for what is wrong."""
    environ = os.environ if environ is None else environ
    document = ConfigDocument()
    try:
        document = layered(path, environ, flags)
        return _config(document, environ)
    except ConfigError as error:
        message = str(error)
        elsewhere = message.startswith(("CARPOOL_", "The value of CARPOOL_", *document.names.values()))
        if path is None or elsewhere:
            raise
        raise ConfigError(f"{os.fspath(path)}: {message}") from error


def _config(document: ConfigDocument, environ: Mapping[str, str]) -> Config:
    content = document.sections
    if "budgets" in content:
        _check_budgets(content["budgets"], document.shown("budgets"))
    policy = RoutingPolicy(**read_settings(content, document.names))  # type: ignore[arg-type]
    routing = mapping(content.get("routing"), "The section routing")
    serving = read_serving(document)
    config = Config(
        providers=tuple(_with_outgoing_proxy(provider, serving) for provider in _providers(document)),
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


def _providers(document: ConfigDocument) -> tuple[Provider, ...]:
    listed = mapping(document.sections.get("providers"), "The section providers")
    names = [str(name) for name in listed]
    if not document.lists_providers:  # flags and variables change or add providers; a list in a file is complete
        names = [*BUILT_IN, *(name for name in names if name not in BUILT_IN)]
    return tuple(_with_defaults([_provider(name, listed.get(name), document) for name in names]))


def _provider(name: str, value: object, document: ConfigDocument) -> Provider:
    path = f"providers.{name}"
    check(_NAME, name, f"The name of {path[:80]}")
    content = mapping(value, path)
    if "api_key" in content:
        raise ConfigError(
            f"{path}.api_key would put a key into a file. Put it into an environment variable, and write the "
            f"variable's name as {path}.api_key_env."
        )
    given = {known(key, PROVIDER_KEYS, f"{path}."): item for key, item in content.items() if item is not None}
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
            vendor=habits.vendor,
            window=habits.window,
            api_version=habits.api_version,
        ),
        shown,
    )


def _usual_dialect(name: str, given: Mapping[str, object]) -> str | None:
    if name in DIALECTS:
        return name
    return OPENAI.name if "vendor" in given or name in OTHERS else None


def _hook_variable(given: Mapping[str, object], dialect: str, habits: Habits, shown: str) -> str | None:
    name = variable(given.get("webhook_secret_env"), shown, "OPENAI_WEBHOOK_SECRET")
    family = COMPATIBLE_PROVIDERS.get(habits.vendor or dialect)
    if name is not None and (family is None or not family.hooks):
        raise ConfigError(f"{shown} is for providers with webhooks, and this one has none: take it out.")
    return name


def _allowed(given: Mapping[str, object], key: str, path: str, document: ConfigDocument) -> bool:
    value = given.get(key, False)
    check(SWITCH, value, document.shown(f"{path}.{key}"))
    return bool(value)


def _reached(provider: Provider, shown: Callable[[str], str]) -> Provider:
    path = f"providers.{provider.name}"
    check_reach(provider, shown(f"{path}.base_url"))
    if provider.proxy not in (None, DIRECT) and not provider.base_url.startswith("https:"):
        raise ConfigError(
            f"{shown(f'{path}.proxy')} is for a provider that is reached by https://, and {path}.base_url is not: "
            "take one of them out."
        )
    return provider


def _with_outgoing_proxy(provider: Provider, serving: Serving) -> Provider:
    """Apply the server's outgoing proxy to a remote provider without its own."""
    proxy, url = provider.proxy, provider.base_url
    if proxy is None and url.startswith("https:") and not is_loopback(urlsplit(url).hostname or ""):
        proxy = serving.outgoing_proxy
    return replace(provider, proxy=None if proxy == DIRECT else proxy, ca_file=provider.ca_file or serving.ca_file)


def _with_defaults(providers: list[Provider]) -> list[Provider]:
    """Pick the default provider of each dialect: the marked one, the only one, or the one named like the dialect."""
    resolved = []
    for item in providers:
        same = [other for other in providers if other.dialect == item.dialect]
        marked = [other.name for other in same if other.default]
        if len(marked) > 1:
            raise ConfigError(
                f"providers.{marked[0]} and providers.{marked[1]} are both the default of the dialect {item.dialect}: "
                "mark one."
            )
        by_name = len(same) == 1 or item.name == item.dialect
        resolved.append(replace(item, default=item.default if marked else by_name))
    return resolved


# ---------------------------------------------------------------- other sections


def _book(document: ConfigDocument, routing: Mapping[object, object]) -> RuleBook:
    timezone = routing.get("timezone", "UTC") or "UTC"
    read_zone(timezone, document.shown("routing.timezone"))  # checked even if no rule uses the time
    rules = read_rules(routing.get("rules"), document.shown("routing.rules"), str(timezone))
    budget = routing.get("default_budget")
    shown = document.shown("routing.default_budget")
    return RuleBook(rules, None if budget is None else read_budget(budget, shown))


def _max_body(document: ConfigDocument) -> float:
    value = mapping(document.sections.get("limits"), "The section limits").get("max_body_mb")
    if value is None:
        return DEFAULT_BODY_MB
    check(_BODY, value, document.shown("limits.max_body_mb"))
    return float(value)  # type: ignore[arg-type]


def _store(document: ConfigDocument) -> str:
    value = mapping(document.sections.get("store"), "The section store").get("url")
    if value is None:
        return DEFAULT_STORE
    check(_STORE, value, document.shown("store.url"))
    return str(value)


def _switch(document: ConfigDocument, section: str, key: str) -> bool | None:
    value = mapping(document.sections.get(section), f"The section {section}").get(key)
    if value is not None:
        check(SWITCH, value, document.shown(f"{section}.{key}"))
    return None if value is None else bool(value)


def _caching(document: ConfigDocument) -> str:
    section = mapping(document.sections.get("caching"), "The section caching")
    for key in section:
        known(key, CACHING_KEYS, "caching.")
    mode = section.get("mode")
    if mode is None:
        return "observe"
    mode = "off" if mode is False else mode  # YAML parses a bare off as false
    shown = document.shown("caching.mode")
    check(Choice(("off", "observe", "plan"), "off, observe or plan"), mode, shown)
    if mode == "plan":
        raise ConfigError(f"{shown} is plan, and carpool does not plan caches yet: write observe or off.")
    return str(mode)


def _check_budgets(value: object, shown: str) -> None:
    """Refuse budgets, which are not enforced yet: to ignore them would spend money that the user wants to keep."""
    if value:
        raise ConfigError(
            f"{shown} sets spending limits, and carpool does not enforce them yet: it would spend past them. Take the "
            "section out, and set limits at the provider."
        )


def _otlp(document: ConfigDocument) -> str | None:
    value = mapping(document.sections.get("observability"), "The section observability").get("otlp_endpoint")
    return None if value is None else _otlp_url(value, document.shown("observability.otlp_endpoint"))


def _otlp_url(value: object, path: str) -> str:
    return read_url(value, path, "the URL of a collector", "http://127.0.0.1:4318")


def secret_in(variable: str | None, environ: Mapping[str, str]) -> str:
    """The value of an environment variable; empty if it is not set. Raises unless it is a valid header value."""
    secret = environ.get(variable, "").strip() if variable else ""
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{variable} holds a character that no key has. Set it to the key itself.")
    return secret


def _notes(config: Config, environ: Mapping[str, str]) -> list[str]:
    notes = []
    if config.otlp_endpoint:
        notes.append("observability.otlp_endpoint is set, but traces are not sent yet.")
    for provider in config.providers:
        parts = urlsplit(provider.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            notes.append(f"Keys travel to the provider {provider.name} unencrypted: its base URL begins with http://.")
        secret_in(provider.webhook_secret_env, environ)
        if provider.api_key_env and not secret_in(provider.api_key_env, environ):
            notes.append(
                f"providers.{provider.name}.api_key_env names {provider.api_key_env}, which is not set: "
                "clients must bring a key."
            )
    return notes
