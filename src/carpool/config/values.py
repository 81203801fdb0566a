"""Readers of single values: each takes a value and its path as the user wrote it, and returns what to use.

They raise `ConfigError` with the path and what is allowed. A text that may be a secret is not repeated.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from carpool.core.errors import ConfigError
from carpool.core.settings import Check, Shape, check, named
from carpool.core.upstream import ip_address, is_link_local
from carpool.dialects import DEFAULT_DIALECT
from carpool.planners.access.read_rules import read_zone

Reader = Callable[[object, str], Any]

DIRECT: Final = "direct"  # as a provider's proxy: none, even if the section server sets one
_VARIABLE: Final = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
_LABEL: Final = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST: Final = re.compile(rf"(\*\.)?{_LABEL}(\.{_LABEL})*")
_METADATA: Final = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data"})


def allowed(rule: Check) -> Reader:
    def read(value: object, path: str) -> Any:
        check(rule, value, path)
        return value

    return read


pem_path: Final = allowed(
    Shape(re.compile(r"\S.{0,4000}"), "the path of a file in PEM form, such as /etc/carpool/cert.pem")
)


def variable(example: str) -> Reader:
    """The name of an environment variable. A wrong one is not shown: it is most likely a secret."""

    def read(value: object, path: str) -> str:
        if isinstance(value, str) and _VARIABLE.fullmatch(value):
            return value
        raise ConfigError(
            f"{path} is not the name of an environment variable: write a name such as {example}, not the secret itself."
        )

    return read


def secret_in(variable: str | None, environ: Mapping[str, str]) -> str:
    """The value of an environment variable; empty if it is not set. Raises unless it is a valid header value."""
    secret = environ.get(variable, "").strip() if variable else ""
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{variable} holds a character that no key has. Set it to the key itself.")
    return secret


def list_of(read: Reader, example: str) -> Reader:
    def read_all(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise ConfigError(f"{path} is {named(value)}; it must be a list, such as {example}.")
        return tuple(read(item, f"{path}[{number}]") for number, item in enumerate(value))

    return read_all


def host(value: object, path: str) -> str:
    name = value.lower().rstrip(".") if isinstance(value, str) else ""
    with suppress(ValueError):  # then it must be a name
        return str(ipaddress.ip_address(name.strip("[]")))
    if not _HOST.fullmatch(name):
        raise ConfigError(
            f"{path} is {named(value)}; it must be a host without scheme or port, such as carpool.example.com, "
            "*.example.com or 10.1.2.3."
        )
    return name


def network(value: object, path: str) -> str:
    try:
        return str(ipaddress.ip_network(value if isinstance(value, str) else ""))
    except ValueError:
        raise ConfigError(
            f"{path} is {named(value)}; it must be an address or a network, such as 10.0.0.7 or 10.0.0.0/8."
        ) from None


def timezone(value: object, path: str) -> str:
    read_zone(value or "UTC", path)  # checked even if no rule uses the time
    return str(value or "UTC")


# ---------------------------------------------------------------- URLs and addresses


def url(what: str, example: str) -> Reader:
    def read(value: object, path: str) -> str:
        parts = _split_url(value)
        if parts is not None and "@" in parts.netloc:
            raise ConfigError(
                f"{path} carries a user name or a password. Take it out: clients bring their own key, or the "
                "provider's api_key_env names the variable that holds one."
            )
        if parts is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise ConfigError(f"{path} is {named(value)}, which is not {what}: write one such as {example}.")
        return str(value)

    return read


base_url: Final = url("a provider's base URL", DEFAULT_DIALECT.home)


def proxy_url(value: object, path: str) -> str:
    if value == DIRECT:
        return DIRECT
    parts = _split_url(value)
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


def _split_url(value: object) -> SplitResult | None:
    """None unless it is a URL with a host. With a user name the host is not checked: the caller reports the user
    name."""
    with suppress(ValueError):
        parts = urlsplit(value) if isinstance(value, str) else None
        if parts is not None and ("@" in parts.netloc or (parts.hostname and parts.port != 0)):
            return parts
    return None


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_metadata_service(host: str) -> bool:
    """Whether it is the address of a cloud metadata service, or another one of the machine's own network."""
    try:
        return is_link_local(host)
    except ValueError:
        return host.rstrip(".") in _METADATA
