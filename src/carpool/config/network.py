"""Network settings: the section `server`, and checks of addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import SplitResult, urlsplit

from carpool.config.layers import TLS_KEYS, ConfigDocument
from carpool.config.values import Provider, Serving, Tls
from carpool.core.errors import ConfigError
from carpool.core.settings import Shape, check, known, mapping, named
from carpool.planners.policy import section_keys

DIRECT: Final = "direct"  # as a provider's proxy: none, even if the section server sets one
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_PATH: Final = Shape(re.compile(r"\S.{0,4000}"), "the path of a file in PEM form, such as /etc/carpool/cert.pem")
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_METADATA: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})
_AWS_V6: Final = ipaddress.ip_address("fd00:ec2::254")


# ---------------------------------------------------------------- section server


def read_serving(document: ConfigDocument) -> Serving:
    section = mapping(document.sections.get("server"), "The section server")
    given = {known(key, section_keys("server"), "server."): value for key, value in section.items()}
    shown = document.shown
    defaults = Serving()
    return Serving(
        tls=_tls(given.get("tls"), document),
        allowed_hosts=tuple(_host(host, shown(path)) for host, path in _listed(given, "allowed_hosts", document)),
        admin_token_env=variable(given.get("admin_token_env"), shown("server.admin_token_env"), "CARPOOL_ADMIN_TOKEN")
        or defaults.admin_token_env,
        trusted_proxies=tuple(_network(one, shown(path)) for one, path in _listed(given, "trusted_proxies", document)),
        outgoing_proxy=proxy(given.get("outgoing_proxy"), shown("server.outgoing_proxy")),
        outgoing_proxy_auth_env=variable(
            given.get("outgoing_proxy_auth_env"), shown("server.outgoing_proxy_auth_env"), "PROXY_LOGIN"
        ),
        ca_file=pem(given.get("ca_file"), shown("server.ca_file")),
    )


def _tls(value: object, document: ConfigDocument) -> Tls | None:
    if value is None:
        return None
    shown = document.shown
    content = mapping(value, shown("server.tls"))
    given = {known(key, TLS_KEYS, f"{shown('server.tls')}."): one for key, one in content.items() if one is not None}
    if not given:
        return None
    for key in TLS_KEYS:
        if key not in given:
            raise ConfigError(
                f"server.tls.{key} is missing: TLS needs the paths of both, server.tls.cert and server.tls.key."
            )
    return Tls(*(str(pem(given[name], shown(f"server.tls.{name}"))) for name in TLS_KEYS))


def _listed(given: Mapping[str, object], key: str, document: ConfigDocument) -> list[tuple[object, str]]:
    value, path = given.get(key), document.shown(f"server.{key}")
    if value is None:
        return []
    if not isinstance(value, list):
        example = "[carpool.example.com]" if key == "allowed_hosts" else "[10.0.0.0/8]"
        raise ConfigError(f"{path} is {named(value)}; it must be a list, such as {example}.")
    return [(item, f"{path}[{number}]") for number, item in enumerate(value)]


def _host(value: object, path: str) -> str:
    name = value.lower().rstrip(".") if isinstance(value, str) else ""
    with suppress(ValueError):  # then it must be a name
        return str(ipaddress.ip_address(name.strip("[]")))
    if not _HOST.fullmatch(name):
        raise ConfigError(
            f"{path} is {named(value)}; it must be a host without scheme or port, such as carpool.example.com, "
            "*.example.com or 10.1.2.3."
        )
    return name


def _network(value: object, path: str) -> str:
    try:
        return str(ipaddress.ip_network(value if isinstance(value, str) else ""))
    except ValueError:
        raise ConfigError(
            f"{path} is {named(value)}; it must be an address or a network, such as 10.0.0.7 or 10.0.0.0/8."
        ) from None


# ---------------------------------------------------------------- values shared with providers


def variable(value: object, path: str, example: str) -> str | None:
    """Check the name of an environment variable. A wrong one is not shown: it is most likely a secret."""
    if value is None:
        return None
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        raise ConfigError(
            f"{path} is not the name of an environment variable: write a name such as {example}, not the secret itself."
        )
    return value


def pem(value: object, path: str) -> str | None:
    if value is None:
        return None
    check(_PATH, value, path)
    return str(value)


def proxy(value: object, path: str) -> str | None:
    if value is None:
        return None
    if value == DIRECT:
        return DIRECT
    parts = split_url(value)
    if parts is not None and "@" in parts.netloc:
        raise ConfigError(
            f"{path} carries a user name or a password: put user:password into an environment variable, and write the "
            "variable's name as server.outgoing_proxy_auth_env."
        )
    if parts is None or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(
            f"{path} is {named(value)}; it must be the URL of an HTTP proxy, such as http://proxy.example.com:3128, "
            f"or {DIRECT}."
        )
    return f"http://{parts.netloc}"


# ---------------------------------------------------------------- addresses


def base_url(
    value: object, path: str, what: str = "a provider's base URL", example: str = "https://api.anthropic.com"
) -> str:
    parts = split_url(value)
    if parts is not None and "@" in parts.netloc:
        raise ConfigError(
            f"{path} carries a user name or a password. Take it out: clients bring their own key, or the provider's "
            "api_key_env names the variable that holds one."
        )
    if parts is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise ConfigError(f"{path} is {named(value)}, which is not {what}: write one such as {example}.")
    return str(value)


def split_url(value: object) -> SplitResult | None:
    """None unless it is a URL with a host. With a user name the host is not checked: the caller reports the user
    name."""
    try:
        parts = urlsplit(value) if isinstance(value, str) else None
        if parts is None or not ("@" in parts.netloc or (parts.hostname and parts.port != 0)):
            return None
    except ValueError:
        return None
    return parts


def check_reach(one: Provider, path: str) -> None:
    """Refuse to send keys unencrypted, or to the address of a cloud metadata service."""
    parts, provider = urlsplit(one.base_url), f"providers.{one.name}"
    host = parts.hostname or ""
    if parts.scheme == "http" and not is_loopback(host) and not one.allow_http:
        raise ConfigError(
            f"{path} begins with http://, so keys would travel to {host} unencrypted: write https://, or "
            f"{provider}.allow_http: true where the way is safe."
        )
    if _is_metadata(host) and not one.allow_link_local:
        raise ConfigError(
            f"{path} leads to {host}, an address of the machine's own network where cloud metadata is served: write "
            f"the provider's address, or {provider}.allow_link_local: true if it really is there."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return _address(host).is_loopback
    except ValueError:
        return False


def _is_metadata(host: str) -> bool:
    try:
        address = _address(host)
    except ValueError:
        return host.rstrip(".") in _METADATA
    return address.is_link_local or address == _AWS_V6


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
