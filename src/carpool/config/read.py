"""Read a config: the sections of `carpool.yaml` and what overrides them, into a `Config`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final
from urllib.parse import urlsplit

from carpool.config.layers import ConfigDocument, Flag, layered
from carpool.config.sections import BUILT_IN, PROVIDER_KEYS, Config, ConnectionLimits, Provider, ServerSettings, Tls
from carpool.config.values import DIRECT, is_loopback, is_metadata_service, secret_in
from carpool.core.errors import ConfigError
from carpool.core.settings import SWITCH, Shape, check, known, mapping
from carpool.dialects import (
    COMPATIBLE_PROVIDERS,
    DIALECTS,
    VENDOR_DIALECT,
    CompatibleProvider,
    compatible_provider,
    configured_dialect,
)
from carpool.planners.access.read_rules import read_budget, read_rules
from carpool.planners.access.rules import RuleBook
from carpool.planners.policy import RoutingPolicy, read_settings
from carpool.planners.routing import read_models

HOUR: Final = 3600.0
_OTHERS: Final = {name: row for name, row in COMPATIBLE_PROVIDERS.items() if name != VENDOR_DIALECT.name}
_NAME: Final = Shape(re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,59}"), "a name of letters, digits, '_', '.' and '-'")
_WINDOW: Final = re.compile(r"(\d{1,4})(h|d)")


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
        config = _config(document)
        return replace(config, notes=tuple(_notes(config, environ)))
    except ConfigError as error:
        message = str(error)
        elsewhere = message.startswith(("CARPOOL_", "The value of CARPOOL_", *document.names.values()))
        if path is None or elsewhere:
            raise
        raise ConfigError(f"{os.fspath(path)}: {message}") from error


def _config(document: ConfigDocument) -> Config:
    if document.sections.get("budgets"):  # to ignore them would spend money that the user wants to keep
        raise ConfigError(
            f"{document.shown('budgets')} sets spending limits, and carpool does not enforce them yet: it would spend "
            "past them. Take the section out, and set limits at the provider."
        )
    policy = RoutingPolicy(**read_settings(document.sections, document.names))  # type: ignore[arg-type]
    settings = document.read(Config)
    routing, budget = document.section("routing"), document.section("routing").get("default_budget")
    serving = ServerSettings(tls=_tls(document), **document.read(ServerSettings, "server"))
    return Config(
        providers=tuple(_with_outgoing_proxy(provider, serving) for provider in _providers(document)),
        policy=policy,
        book=RuleBook(
            read_rules(routing.get("rules"), document.shown("routing.rules"), settings.get("timezone", "UTC")),
            None if budget is None else read_budget(budget, document.shown("routing.default_budget")),
        ),
        serving=serving,
        limits=ConnectionLimits(**document.read(ConnectionLimits, "limits")),
        origins=document.origins,
        **settings,
    )


def _tls(document: ConfigDocument) -> Tls | None:
    path = document.shown("server.tls")
    content = mapping(document.section("server").get("tls"), path)
    keys = [key.name for key in fields(Tls)]
    for key in content:
        known(key, keys, f"{path}.")
    given = document.read(Tls, "server.tls", content)
    if given and (missing := [key for key in keys if key not in given]):
        raise ConfigError(
            f"server.tls.{missing[0]} is missing: TLS needs the paths of both, server.tls.cert and server.tls.key."
        )
    return Tls(**given) if given else None


def _with_outgoing_proxy(provider: Provider, serving: ServerSettings) -> Provider:
    """Apply the server's outgoing proxy to a remote provider without its own."""
    proxy, url = provider.proxy, provider.base_url
    if proxy is None and url.startswith("https:") and not is_loopback(urlsplit(url).hostname or ""):
        proxy = serving.outgoing_proxy
    return replace(provider, proxy=None if proxy == DIRECT else proxy, ca_file=provider.ca_file or serving.ca_file)


def _notes(config: Config, environ: Mapping[str, str]) -> Iterable[str]:
    if config.otlp_endpoint:
        yield "observability.otlp_endpoint is set, but traces are not sent yet."
    for provider in config.providers:
        parts = urlsplit(provider.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            yield f"Keys travel to the provider {provider.name} unencrypted: its base URL begins with http://."
        secret_in(provider.webhook_secret_env, environ)
        if provider.api_key_env and not secret_in(provider.api_key_env, environ):
            yield (
                f"providers.{provider.name}.api_key_env names {provider.api_key_env}, which is not set: "
                "clients must bring a key."
            )


# ---------------------------------------------------------------- section providers


def _providers(document: ConfigDocument) -> list[Provider]:
    """Also picks the default of each dialect: the marked provider, the only one, or the one named like the dialect."""
    listed = document.section("providers")
    names = [str(name) for name in listed]
    if not document.lists_providers:  # flags and variables change or add providers; a list in a file is complete
        names = [*BUILT_IN, *(name for name in names if name not in BUILT_IN)]
    providers, resolved = [_provider(name, listed.get(name), document) for name in names], []
    for provider in providers:
        same = [other for other in providers if other.dialect == provider.dialect]
        marked = [other.name for other in same if other.default]
        if len(marked) > 1:
            raise ConfigError(
                f"providers.{marked[0]} and providers.{marked[1]} are both the default of the dialect "
                f"{provider.dialect}: mark one."
            )
        by_name = len(same) == 1 or provider.name == provider.dialect
        resolved.append(replace(provider, default=provider.default if marked else by_name))
    return resolved


def _provider(name: str, value: object, document: ConfigDocument) -> Provider:
    path = f"providers.{name}"
    check(_NAME, name, f"The name of {path[:80]}")
    content = mapping(value, path)
    if "api_key" in content:
        raise ConfigError(
            f"{path}.api_key would put a key into a file. Put it into an environment variable, and write the "
            f"variable's name as {path}.api_key_env."
        )
    for key in content:
        known(key, PROVIDER_KEYS, f"{path}.")
    keys = {key: item for key, item in content.items() if item is not None}
    given = document.read(Provider, path, keys)
    _default_addresses(name, path, given)
    _compatibility(name, path, keys, given, document)
    given["models"] = _models(keys, path, document)
    provider = Provider(name, **given)
    dialect = configured_dialect(provider.dialect, provider.base_url, provider.vendor or None)
    if provider.webhook_secret_env is not None and dialect.webhooks is None:
        raise ConfigError(
            f"{document.shown(f'{path}.webhook_secret_env')} is for providers with webhooks, and this one has none: "
            "take it out."
        )
    _check_address(provider, path, document)
    return provider


def _default_addresses(name: str, path: str, given: dict[str, Any]) -> None:
    """Fill in the dialect and the base URL of a provider that carpool knows by its name or vendor."""
    vendor = given.get("vendor", name if name in _OTHERS else None)
    given.setdefault("dialect", name if name in DIALECTS else VENDOR_DIALECT.name if vendor else None)
    if given["dialect"] is None:
        raise ConfigError(f"{path}.dialect is missing: say which API it has, {' or '.join(sorted(DIALECTS))}.")
    if name in BUILT_IN and given["dialect"] == BUILT_IN[name].dialect:
        given.setdefault("base_url", BUILT_IN[name].base_url)
    elif vendor in _OTHERS:
        given.setdefault("base_url", _OTHERS[vendor].home)
    if not given.get("base_url"):
        raise ConfigError(f"{path}.base_url is missing: say where the provider is, as in https://api.openai.com/v1.")


def _compatibility(
    name: str, path: str, keys: Mapping[object, object], given: dict[str, Any], document: ConfigDocument
) -> None:
    """Find out which OpenAI-compatible provider it is; read what only those have."""
    if given["dialect"] != VENDOR_DIALECT.name:
        for key in ("vendor", "window", "api_version"):
            if key in keys:
                shown = document.shown(f"{path}.{key}")
                raise ConfigError(
                    f"{shown} is for OpenAI-compatible providers, not for {given['dialect']}: take it out."
                )
        return
    vendor = given.get("vendor", name if name in _OTHERS else None)
    row = compatible_provider(given["base_url"], vendor)
    if vendor is not None or row.name != VENDOR_DIALECT.name:
        given["vendor"] = row.name
        if not urlsplit(given["base_url"]).path.strip("/"):  # the provider's usual path
            given["base_url"] = given["base_url"].rstrip("/") + row.path
    if "window" in keys:
        given["window"] = _window(keys["window"], document.shown(f"{path}.window"), row)


def _window(value: object, shown: str, row: CompatibleProvider) -> float:
    """The completion window in seconds."""
    match = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = 0.0 if match is None else int(match[1]) * {"h": HOUR, "d": 24 * HOUR}[match[2]]
    if not row.limits.window <= seconds <= row.longest_window:
        has_choice = row.longest_window > row.limits.window
        allowed = f"from 24h to {row.longest_window / HOUR:.0f}h" if has_choice else "24h, its only one"
        raise ConfigError(f"{shown} is no window of {row.display_name}: it must be {allowed}.")
    return seconds


def _models(keys: Mapping[object, object], path: str, document: ConfigDocument) -> dict[str, dict[str, Any]]:
    """The overrides of the capability table; `batch: false` holds for every model."""
    models = read_models(keys.get("models"), document.shown(f"{path}.models"))
    batch = keys.get("batch", True)
    check(SWITCH, batch, document.shown(f"{path}.batch"))
    return models if batch else {name: {**models.get(name, {}), "batch": False} for name in {**models, "*": {}}}


def _check_address(provider: Provider, path: str, document: ConfigDocument) -> None:
    """Refuse to send keys unencrypted, or to the address of a cloud metadata service."""
    parts, shown = urlsplit(provider.base_url), document.shown(f"{path}.base_url")
    host = parts.hostname or ""
    if parts.scheme == "http" and not is_loopback(host) and not provider.allow_http:
        raise ConfigError(
            f"{shown} begins with http://, so keys would travel to {host} unencrypted: write https://, or "
            f"{path}.allow_http: true where the way is safe."
        )
    if is_metadata_service(host) and not provider.allow_link_local:
        raise ConfigError(
            f"{shown} leads to {host}, an address of the machine's own network where cloud metadata is served: write "
            f"the provider's address, or {path}.allow_link_local: true if it really is there."
        )
    if provider.proxy not in (None, DIRECT) and parts.scheme != "https":
        raise ConfigError(
            f"{document.shown(f'{path}.proxy')} is for a provider that is reached by https://, and {path}.base_url is "
            "not: take one of them out."
        )
