"""Under which names carpool may be asked, and who may say for whom a request was passed on.

A web page can make its own name point at this machine (DNS rebinding) and then talk to carpool as if it were its own
server; what gives it away is the name in `Host`. A server in front of carpool that ends TLS says with `X-Forwarded-*`
who asked and under which name; anybody else could say the same, so only those are believed who are trusted by address.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from carpool.doors.asgi import Scope
from carpool.errors import BadCall, Misdirected
from carpool.model import Headers

_AUTHORITY = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%]+\]|[^\[\]:@/\\\s]+)(:[0-9]{0,5})?")
_OF_THE_WAY = frozenset({"forwarded", "x-real-ip"})
_FORWARDED = "x-forwarded-"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Hosts:
    """`local`: carpool listens on loopback, so its local names and `allowed` are all there is. Elsewhere any name will
    do, unless some are allowed. `trusted` are the networks of the servers in front."""

    def __init__(self, *, local: bool = True, allowed: Iterable[str] = (), trusted: Iterable[str] = ()) -> None:
        self._local = local
        self._allowed = frozenset(allowed)
        self._trusted = tuple(ipaddress.ip_network(one) for one in trusted)
        self._open = not local and not self._allowed
        self._trusts = lru_cache(1024)(self._trusted_address)
        self._welcomes = lru_cache(256)(self._welcome)

    def trusts(self, scope: Scope) -> bool:
        """Whether who speaks here may speak for others."""
        if not self._trusted:
            return False
        peer = scope.get("client")
        return peer is not None and self._trusts(peer[0])

    def check(self, headers: Headers, *, trusted: bool) -> None:
        names = [value for name, value in headers if name == "host"]
        if len(names) > 1:
            raise BadCall("This request names several hosts. Send one host header.")
        if trusted and (said := _last(headers, "x-forwarded-host")) is not None:
            names = [said]
        if self._open:
            return
        if not names:
            raise BadCall("This request names no host. Send a host header, such as 127.0.0.1.")
        if not self._welcomes(names[0]):
            raise Misdirected(
                f"carpool does not answer to the name {names[0][:100]!r}. Use {self._ours()}, or add the name to "
                "server.allowed_hosts."
            )

    def client(self, scope: Scope) -> str:
        """The address that a request came from: the nearest one that is not a server in front. Empty where it is this
        machine."""
        peer = scope.get("client")
        address: str = peer[0] if peer else ""
        if self.trusts(scope):
            for hop in reversed(_hops(scope)):
                if _parsed(hop) is None:
                    break
                address = hop
                if not self._trusts(hop):
                    break
        return "" if _is_here(address) else address

    def _ours(self) -> str:
        names = [*(["127.0.0.1 or localhost"] if self._local else []), *sorted(self._allowed)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names[:5])}"

    def _trusted_address(self, text: str) -> bool:
        address = _parsed(text)
        return address is not None and any(address in network for network in self._trusted)

    def _welcome(self, authority: str) -> bool:
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            return False
        name = found["name"].lower()
        address = _parsed(name)
        if address is not None:
            return (self._local and address.is_loopback) or str(address) in self._allowed
        name = name.removesuffix(".")
        if self._local and name == "localhost":
            return True
        return name in self._allowed or any(
            one.startswith("*.") and name.endswith(one[1:]) and name != one[1:] for one in self._allowed
        )


def of_the_way(name: str) -> bool:
    """Whether a header tells of the way to us: a trusted server in front wrote it for carpool, not for the provider."""
    return name.startswith(_FORWARDED) or name in _OF_THE_WAY


def _last(headers: Headers, name: str) -> str | None:
    """What the nearest server said: it adds at the end."""
    values = [value for key, value in headers if key == name]
    return values[-1].rpartition(",")[2].strip() if values else None


def _hops(scope: Scope) -> list[str]:
    said = b",".join([value for name, value in scope["headers"] if name.lower() == b"x-forwarded-for"])
    return [hop.strip() for hop in said.decode("latin-1").split(",")]


@lru_cache(1024)
def _is_here(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is None or parsed.is_loopback


def _parsed(text: str) -> Address | None:
    """Also as it stands in a URL, and an IPv4 address in the guise of an IPv6 one as what it is."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
