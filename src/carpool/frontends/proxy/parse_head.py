"""Parses the head of a request, once for each kind of head: a client sends the same headers with every call.

A few headers differ per request, such as the content length or a trace id. They do not identify the client, and the
handling of a request does not depend on them: requests that differ in nothing else share one `HeadFacts`.

`HeadFacts` hold secrets, like the keyring: in memory only, and never printed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from carpool.core.bounded import BoundedMap
from carpool.core.errors import BadCall
from carpool.core.keys import KeyHolder
from carpool.core.model import Headers
from carpool.dialects import below, key_headers
from carpool.dialects.headers import ONE_REQUEST
from carpool.dialects.keep_alive import Client, client_label, recognise
from carpool.engine import Upstream
from carpool.engine.now.decompress import encodings
from carpool.frontends.intake import Caller, end_to_end
from carpool.planners.access.options import PREFIX as OPTION_PREFIX
from carpool.planners.access.options import Options, from_headers, split_path
from carpool.planners.access.providers import ConfiguredKeys, Hosts, choose, completed, is_forwarding_header
from carpool.planners.access.rules import CallKind
from carpool.planners.access.virtual_keys import NOBODY, GrantedKey, VirtualKeyAccess, check_query, within_profile

PREFIX = "/carpool/"  # of carpool's own pages
CALLS = "/carpool/calls/"
LONGEST_HOLD_S = 600.0  # that a client may ask for with `Prefer: wait`
MOST = 1024  # cached heads; the oldest is dropped first
MAX_BYTES = 8192  # of path and headers of a cached head
LOCAL_ONLY = Hosts()
_PER_REQUEST = ONE_REQUEST | {"content-length"}
_PER_REQUEST_BYTES = frozenset(name.encode() for name in _PER_REQUEST)

Scope = MutableMapping[str, Any]  # of ASGI
Place = tuple[int, int]  # index in the headers of `HeadFacts`, and in those of the request


class HeadCache(Struct):
    """Facts about the calls with one head that are the same for all of them."""

    caller: Caller
    options: dict[CallKind, Options] = {}


class HeadFacts(Struct, frozen=True):
    """What the head tells about a request."""

    path: str  # without the leading options
    options: Options
    client: Client
    upstream: Upstream | None  # None: for carpool itself
    understood: bool  # a call to parse; otherwise it passes through
    compressed: bool  # its body is compressed
    hold: float | None  # `respond-async`: seconds before the `202`; None: the client waits
    headers: Headers  # the client's without carpool's; values that differ per request are blank
    varying: tuple[Place, ...]  # where those values are
    stable_headers: Headers  # the others, as for an uncompressed body
    key_holder: KeyHolder | None  # the holder of the virtual key, if there is one
    cache: HeadCache
    forwarded: Headers | None  # headers for the provider on `now`; None if some differ per request
    epoch: int = 0  # of the virtual keys: stale when a key is added or revoked

    def headers_of(self, scope: Scope) -> Headers:
        """All headers of one request, with its own values filled in."""
        if not self.varying:
            return self.headers
        filled, raw = list(self.headers), scope["headers"]
        for place, number in self.varying:
            filled[place] = (filled[place][0], raw[number][1].decode("latin-1"))
        return tuple(filled)

    def __repr__(self) -> str:  # never the secrets
        return f"<HeadFacts for {self.path}>"


class HeadParser:
    """Parses heads and caches the result by head."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        defaults: Collection[str],
        configured_keys: ConfiguredKeys,
        hosts: Hosts = LOCAL_ONLY,
        key_access: VirtualKeyAccess = NOBODY,
    ) -> None:
        self._hosts = hosts
        self._key_access = key_access
        self._epoch = key_access.epoch
        self._upstreams = upstreams
        self._defaults = defaults
        self._configured_keys = configured_keys
        self._known: BoundedMap[object, HeadFacts] = BoundedMap(MOST)

    def facts_of_head(self, scope: Scope) -> HeadFacts:
        if self._epoch != self._key_access.epoch:  # a key was added or revoked
            self._known.clear()
            self._epoch = self._key_access.epoch
        check_query(scope.get("query_string", b""))
        stable_headers = tuple(
            [(name, value) if name not in _PER_REQUEST_BYTES else name for name, value in scope["headers"]]
        )
        trusted = self._hosts.trusts(scope.get("client"))
        cache_key = (scope["method"], scope["raw_path"], stable_headers, trusted)
        head = self._known.get(cache_key)
        if head is None:
            head = replace(self._parse(scope, trusted), epoch=self._epoch)
            if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in head.headers) <= MAX_BYTES:
                self._known[cache_key] = head
        if head.key_holder is not None:
            head.key_holder.used = True
        return head

    def _parse(self, scope: Scope, trusted: bool) -> HeadFacts:
        headers = request_headers(scope["headers"])
        self._hosts.check(headers, trusted=trusted)
        options, path = split_path(scope["raw_path"].decode("latin-1").partition("?")[0])
        path = below(path)
        if not path.startswith("/"):  # `OPTIONS *`: joined to a base URL it would change the host
            raise BadCall("This request has no path. Send one that begins with a slash, such as /v1/messages.")
        numbered = list(enumerate(headers))  # with the index of each header in the request
        if trusted:
            numbered = [(number, pair) for number, pair in numbered if not is_forwarding_header(pair[0])]
        headers = tuple([pair for _, pair in numbered])
        if path.startswith(PREFIX):
            return _head_facts(None, scope["method"], path, options, numbered)
        asked = tuple([pair for pair in headers if pair[0].startswith(OPTION_PREFIX)])
        if asked:
            options = from_headers(asked).over(options)
            numbered = [(number, pair) for number, pair in numbered if not pair[0].startswith(OPTION_PREFIX)]
            headers = tuple([pair for _, pair in numbered])
        holder = self._key_access.holder(path, headers)
        if holder is not None:
            options = within_profile(holder.key, options)
            granted = self._key_access.grant(holder, scope["method"], path, headers)
            keys = key_headers()
            numbered = [(number, pair) for number, pair in numbered if pair[0] not in keys]
            path = completed(path, granted.upstream)
            return _head_facts(granted.upstream, scope["method"], path, options, numbered, granted.secret, granted)
        upstream = choose(options.provider, path, headers, self._upstreams, self._defaults)
        carries_key = bool(upstream.dialect.secret(headers))
        added = self._configured_keys.add_configured_key(upstream.provider, headers, carries_key)[len(headers) :]
        return _head_facts(upstream, scope["method"], completed(path, upstream), options, numbered, added)


def _head_facts(
    upstream: Upstream | None,
    method: str,
    path: str,
    options: Options,
    numbered: Iterable[tuple[int, tuple[str, str]]],
    added: Headers = (),
    granted: GrantedKey | None = None,
) -> HeadFacts:
    """`numbered`: the client's headers, each with its index in the request. `added`: the key that carpool adds."""
    numbers, headers = [number for number, _ in numbered], (*(pair for _, pair in numbered), *added)
    client, forwarded = recognise(headers), tuple(end_to_end(headers))
    label = "" if upstream is None else client_label(headers, upstream.dialect.subagent_headers)
    # A call without a key fails on every lane, and the provider reports that best: it passes through.
    understood = (
        upstream is not None and upstream.dialect.handles(method, path) and bool(upstream.dialect.secret(headers))
    )
    return HeadFacts(
        path=path,
        options=options,
        client=client,
        upstream=upstream,
        understood=understood,
        compressed=bool(encodings(headers)),
        hold=later(client.prefer),
        headers=tuple([(name, "" if name in _PER_REQUEST else value) for name, value in headers]),
        varying=tuple([(place, number) for place, number in enumerate(numbers) if headers[place][0] in _PER_REQUEST]),
        stable_headers=tuple(
            [pair for pair in headers if pair[0] not in _PER_REQUEST and pair[0] != "content-encoding"]
        ),
        key_holder=None if granted is None else granted.holder,
        cache=HeadCache(Caller(label, None if granted is None else granted.payer)),
        forwarded=forwarded if _PER_REQUEST.isdisjoint([name for name, _ in forwarded]) else None,
    )


def request_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return tuple([(_lower(name), value.decode("latin-1")) for name, value in headers])


@lru_cache(4096)
def _lower(name: bytes) -> str:
    return name.decode("latin-1").lower()


def later(prefer: str) -> float | None:
    """`Prefer: respond-async, wait=10`: how many seconds to wait before the `202`; None without `respond-async`."""
    preferences = [part.partition(";")[0].partition("=") for part in prefer.lower().split(",")] if prefer else []
    by_name = {name.strip(): value.strip(' "') for name, _, value in preferences}
    if "respond-async" not in by_name:
        return None
    wait = by_name.get("wait", "0")
    return min(float(wait), LONGEST_HOLD_S) if wait.isascii() and wait.isdigit() else 0.0
