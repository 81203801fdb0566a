"""Which host names carpool accepts, and whose forwarding headers it trusts.

A web page can make its own name point at this machine (DNS rebinding) and then talk to carpool as if it were its own
server; the name in `Host` reveals that. A reverse proxy that terminates TLS sends the client's address and host name in
`X-Forwarded-*`. Any client could send the same headers, so only those of trusted addresses are used.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

from carpool.core.errors import BadCall, Misdirected
from carpool.core.model import Headers

_AUTHORITY = re.compile(r"(?P<name>\[[0-9A-Fa-f:.%]+\]|[^\[\]:@/\\\s]+)(:[0-9]{0,5})?")
_FORWARDING = frozenset({"forwarded", "x-real-ip"})
_FORWARDED_PREFIX = "x-forwarded-"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Peer = tuple[str, int] | None  # of a connection; None if unknown


class Hosts:
    """`local`: carpool listens on loopback, and accepts only local names and `allowed`. Otherwise it accepts any
    name if `allowed` is empty. `trusted`: the networks of reverse proxies."""

    def __init__(self, *, local: bool = True, allowed: Iterable[str] = (), trusted: Iterable[str] = ()) -> None:
        self._local = local
        self._allowed = frozenset(allowed)
        self._trusted = tuple(ipaddress.ip_network(network) for network in trusted)
        self._open = not local and not self._allowed
        self._trusts = lru_cache(1024)(self._trusted_address)
        self._welcomes = lru_cache(256)(self._accepts_name)

    def trusts(self, peer: Peer) -> bool:
        """Whether the peer is a trusted reverse proxy."""
        return bool(self._trusted) and peer is not None and self._trusts(peer[0])

    def check(self, headers: Headers, *, trusted: bool) -> None:
        names = [value for name, value in headers if name == "host"]
        if len(names) > 1:
            raise BadCall("This request names several hosts. Send one host header.")
        if trusted and (forwarded := _last(headers, "x-forwarded-host")) is not None:
            names = [forwarded]
        if self._open:
            return
        if not names:
            raise BadCall("This request names no host. Send a host header, such as 127.0.0.1.")
        if not self._welcomes(names[0]):
            raise Misdirected(
                f"carpool does not answer to the name {names[0][:100]!r}. Use {self._own_names()}, or add the name to "
                "server.allowed_hosts."
            )

    def client(self, peer: Peer, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The address of the client: the nearest one that is not a trusted proxy. Empty if local."""
        address = peer[0] if peer else ""
        if self.trusts(peer):
            forwarded = b",".join([value for name, value in headers if name.lower() == b"x-forwarded-for"])
            for hop in reversed([hop.strip() for hop in forwarded.decode("latin-1").split(",")]):
                if _parsed(hop) is None:
                    break
                address = hop
                if not self._trusts(hop):
                    break
        return "" if _is_local(address) else address

    def _own_names(self) -> str:
        names = [*(["127.0.0.1 or localhost"] if self._local else []), *sorted(self._allowed)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names[:5])}"

    def _trusted_address(self, text: str) -> bool:
        address = _parsed(text)
        return address is not None and any(address in network for network in self._trusted)

    def _accepts_name(self, authority: str) -> bool:
        match = _AUTHORITY.fullmatch(authority)
        if match is None:
            return False
        name = match["name"].lower()
        address = _parsed(name)
        if address is not None:
            return (self._local and address.is_loopback) or str(address) in self._allowed
        name = name.removesuffix(".")
        if self._local and name == "localhost":
            return True
        return name in self._allowed or any(
            host.startswith("*.") and name.endswith(host[1:]) and name != host[1:] for host in self._allowed
        )


def of_the_way(name: str) -> bool:
    """Whether it is a forwarding header, which a reverse proxy wrote for carpool and not for the provider."""
    return name.startswith(_FORWARDED_PREFIX) or name in _FORWARDING


def _last(headers: Headers, name: str) -> str | None:
    """The value from the nearest proxy, which appends its own at the end."""
    values = [value for key, value in headers if key == name]
    return values[-1].rpartition(",")[2].strip() if values else None


@lru_cache(1024)
def _is_local(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is None or parsed.is_loopback


def _parsed(text: str) -> Address | None:
    """The IP address, also in brackets as in a URL; an IPv4-mapped IPv6 address as IPv4. None if it is a name."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
