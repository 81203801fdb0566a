"""What the head of a request decides: whether its host name is accepted, which provider it is for, and whether it gets
a configured key.

A web page can make its own name point at this machine (DNS rebinding) and then talk to carpool as if it were its own
server; the name in `Host` reveals that. A reverse proxy that terminates TLS sends the client's address and host name in
`X-Forwarded-*`. Any client could send the same headers, so only those of trusted addresses are used.

The provider is the one that the request names, else the one whose API it uses.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from urllib.parse import urlsplit

from carpool.core.errors import BadCall, Misdirected, NoProvider
from carpool.core.model import Headers
from carpool.core.ports import Dialect
from carpool.core.upstream import Upstream, versioned
from carpool.dialects import dialect_of_request

# ---------------------------------------------------------------- providers


def completed(path: str, upstream: Upstream) -> str:
    """Add the version where the client's base URL has none and the provider's has one, so that the path is recognized.
    The upstream URL stays the same."""
    return upstream.dialect.completed(path) if versioned(upstream.base_url) else path


def upgrade_refused(dialect: Dialect, path: str, headers: Headers) -> int | None:
    """The status for a WebSocket request, else None. 426 makes clients fall back to HTTP at once, if they can."""
    if not any(name == "upgrade" and value.lower() == "websocket" for name, value in headers):
        return None
    return 426 if path in dialect.upgrade_paths else 501


def choose(
    wanted: str | None, path: str, headers: Headers, upstreams: Mapping[str, Upstream], defaults: Collection[str] = ()
) -> Upstream:
    """Choose the provider. `wanted` is the name that the client asked for; `defaults` are marked so in the config."""
    if wanted is not None:
        if wanted not in upstreams:
            raise NoProvider(f"There is no provider {wanted[:60]!r} here. Ask for {_or(sorted(upstreams))}.")
        return upstreams[wanted]
    if len(upstreams) == 1:
        return next(iter(upstreams.values()))
    dialect = dialect_of_request(path, headers)
    if dialect is None:
        raise NoProvider(
            f"Nothing in this request says which provider it is for. Name one: send x-carpool-provider, or begin the "
            f"path with /@provider=NAME, where NAME is {_or(sorted(upstreams))}."
        )
    candidates = [upstream for upstream in upstreams.values() if upstream.dialect.name == dialect]
    return _pick(dialect, candidates, defaults)


def _pick(dialect: str, candidates: Sequence[Upstream], defaults: Collection[str]) -> Upstream:
    if not candidates:
        raise NoProvider(
            f"This request uses the API {dialect}, and no provider with it is configured: add one to the config."
        )
    if len(candidates) == 1:
        return candidates[0]
    preferred = [upstream for upstream in candidates if upstream.provider in defaults]
    preferred = preferred or [upstream for upstream in candidates if upstream.provider == dialect]
    if len(preferred) == 1:
        return preferred[0]
    names = sorted(upstream.provider for upstream in candidates)
    raise NoProvider(
        f"Several providers have the API {dialect}: {', '.join(names)}. Send x-carpool-provider with the name of one, "
        "or mark one of them as the default in the config."
    )


def _or(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


# ---------------------------------------------------------------- configured keys
# A configured key is a provider key that carpool adds to requests of local clients without a key. A web page can make
# a browser post to carpool, though it can't read the response. Such a request has no key, and a configured key would
# let it spend money. So requests from a page of another origin get none, and neither do forwarded requests.

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
_PASSED_ON = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


class ConfiguredKeys:
    """The configured keys by provider, each a header name and value."""

    def __init__(self, keys: Mapping[str, tuple[str, str]]) -> None:
        self._keys = keys

    def add_configured_key(self, provider: str, headers: Headers, carries_key: bool) -> Headers:
        if carries_key or provider not in self._keys or _from_foreign_page(headers) or is_forwarded(headers):
            return headers
        return (*headers, self._keys[provider])

    def __repr__(self) -> str:  # never the keys
        return f"<ConfiguredKeys of {len(self._keys)}>"


def is_forwarded(headers: Headers) -> bool:
    """Whether a reverse proxy forwarded the request: then it may come from anywhere."""
    return any(name in _PASSED_ON for name, _ in headers)


def _from_foreign_page(headers: Headers) -> bool:
    for name, value in headers:
        if name == "sec-fetch-site" and value.strip().lower() not in ("same-origin", "none"):
            return True
        if name == "origin" and not _is_local_origin(value):
            return True
    return False


def _is_local_origin(origin: str) -> bool:
    try:
        return urlsplit(origin.strip()).hostname in LOCAL
    except ValueError:
        return False


# ---------------------------------------------------------------- host names

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
        self._accepts = lru_cache(256)(self._accepts_name)

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
        if not self._accepts(names[0]):
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
        return "" if _is_local_address(address) else address

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


def is_forwarding_header(name: str) -> bool:
    """Whether it is a forwarding header, which a reverse proxy wrote for carpool and not for the provider."""
    return name.startswith(_FORWARDED_PREFIX) or name in _FORWARDING


def _last(headers: Headers, name: str) -> str | None:
    """The value from the nearest proxy, which appends its own at the end."""
    values = [value for key, value in headers if key == name]
    return values[-1].rpartition(",")[2].strip() if values else None


@lru_cache(1024)
def _is_local_address(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is None or parsed.is_loopback


def _parsed(text: str) -> Address | None:
    """The IP address, also in brackets as in a URL; an IPv4-mapped IPv6 address as IPv4. None if it is a name."""
    try:
        address = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
