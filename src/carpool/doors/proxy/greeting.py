"""What the head of a request says, worked out once: a client sends the same headers with every call.

Only a few headers are each request's own, such as its length or the id of its trace. They say nothing of who asks, and
which way a request takes does not depend on them: requests that differ in nothing else share one Greeting.

Greetings hold secrets, as the keyring does: in memory, and never shown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from carpool.dialects.headers import ONE_REQUEST
from carpool.doors.asgi import Scope, end_to_end, request_headers
from carpool.doors.options import PREFIX, Options, from_headers, split_path
from carpool.doors.proxy import admin
from carpool.doors.proxy.choosing import below, choose
from carpool.doors.proxy.hosts import Hosts, of_the_way
from carpool.doors.proxy.kinds import Client, recognise
from carpool.doors.proxy.lending import Purse
from carpool.doors.proxy.profiles import asked as within
from carpool.doors.proxy.returning import later
from carpool.doors.proxy.welcome import KEY_HEADERS, NOBODY, Lent, Welcome, check_query
from carpool.engine import Upstream
from carpool.engine.guests import Guest
from carpool.engine.unpacking import encodings
from carpool.errors import BadCall
from carpool.model import Headers
from carpool.ports import RawRequest

MOST = 1024  # greetings remembered; the oldest is forgotten first
MOST_BYTES = 8192  # of the path and the headers of one that is remembered
KEYS = frozenset({"authorization", "x-api-key"})
LOCAL_ONLY = Hosts()
_OWN = ONE_REQUEST | {"content-length"}
_OWN_BYTES = frozenset(name.encode() for name in _OWN)

Place = tuple[int, int]  # in a greeting's headers, and in those of the request


class Memory(Struct):
    """What was found out about the calls under one head, because it is the same for all of them."""

    credential: str | None = None
    ruled: dict[tuple[str, str, bool, bool], Options] = {}  # by endpoint, model, streaming, tool turn


class Greeting(Struct, frozen=True):
    """What a request asks of whom, as far as its head says it."""

    path: str  # without the options in front of it
    options: Options
    client: Client
    upstream: Upstream | None  # None: carpool itself is asked
    understood: bool  # a call that is to be read, not only passed on
    packed: bool  # its body is compressed
    hold: float | None  # how long it holds the line before it comes back for its answer; None: it waits
    headers: Headers  # those of the client, less carpool's; blank where each request has its own
    own: tuple[Place, ...]  # where that is
    standing: Headers  # the rest, as of a body that is not packed
    guest: Guest | None  # who brought a virtual key
    memory: Memory
    onward: Headers | None  # what goes to the provider on `now`; None where some of it is each request's own
    epoch: int = 0  # of the keys: it holds as long as none is added or ended

    def headers_of(self, scope: Scope) -> Headers:
        """All headers of one request."""
        if not self.own:
            return self.headers
        filled, raw = list(self.headers), scope["headers"]
        for place, number in self.own:
            filled[place] = (filled[place][0], raw[number][1].decode("latin-1"))
        return tuple(filled)

    def __repr__(self) -> str:  # never the secrets
        return f"<Greeting for {self.path}>"


class Met(Struct, frozen=True):
    """One kind of call, by all that its head says; only the length of its body is each one's own."""

    greeting: Greeting
    method: str
    query: str
    headers: Headers
    place: int | None  # of its length among the headers
    address: str  # where it comes from; empty on this machine

    @classmethod
    def of(cls, greeting: Greeting, scope: Scope, address: str) -> Met:
        headers = greeting.headers_of(scope)
        places = [place for place, (name, _) in enumerate(headers) if name == "content-length"]
        query = scope["query_string"].decode("latin-1")
        return cls(greeting, scope["method"], query, headers, places[0] if places else None, address)

    def request(self, body: bytes) -> RawRequest:
        headers, place = self.headers, self.place
        if place is not None:
            headers = (*headers[:place], ("content-length", str(len(body))), *headers[place + 1 :])
        return RawRequest(self.method, self.greeting.path, self.query, headers, body)

    def __repr__(self) -> str:  # never the secrets
        return f"<{type(self).__name__}>"


class Greeter:
    """Reads the heads of requests, each kind once."""

    def __init__(
        self,
        upstreams: Mapping[str, Upstream],
        defaults: Collection[str],
        purse: Purse,
        hosts: Hosts = LOCAL_ONLY,
        welcome: Welcome = NOBODY,
    ) -> None:
        self._hosts = hosts
        self._welcome = welcome
        self._epoch = welcome.epoch
        self._upstreams = upstreams
        self._defaults = defaults
        self._purse = purse
        self._known: dict[object, Greeting] = {}

    def greet(self, scope: Scope) -> Greeting:
        if self._epoch != self._welcome.epoch:  # a key was added, or ended
            self._known.clear()
            self._epoch = self._welcome.epoch
        check_query(scope.get("query_string", b""))
        said = tuple([(name, value) if name not in _OWN_BYTES else name for name, value in scope["headers"]])
        trusted = self._hosts.trusts(scope)
        kind = (scope["method"], scope["raw_path"], said, trusted)
        greeting = self._known.get(kind)
        if greeting is None:
            greeting = replace(self._read(scope, trusted), epoch=self._epoch)
            if len(scope["raw_path"]) + sum(len(name) + len(value) for name, value in greeting.headers) <= MOST_BYTES:
                self._remember(kind, greeting)
        if greeting.guest is not None:
            greeting.guest.used = True
        return greeting

    def holds(self, greeting: Greeting) -> bool:
        """Whether a greeting of before is still what would be found. Whoever asks makes use of it."""
        if greeting.epoch != self._welcome.epoch:
            return False
        if greeting.guest is not None:
            greeting.guest.used = True
        return True

    def _remember(self, kind: object, greeting: Greeting) -> None:
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[kind] = greeting

    def _read(self, scope: Scope, trusted: bool) -> Greeting:
        headers = request_headers(scope)
        self._hosts.check(headers, trusted=trusted)
        options, path = split_path(scope["raw_path"].decode("latin-1").partition("?")[0])
        path = below(path)
        if not path.startswith("/"):  # `OPTIONS *`: joined to a base URL it would change the host's name
            raise BadCall("This request asks for no path. Send one that begins with a slash, such as /v1/messages.")
        numbers: Iterable[int] = range(len(headers))
        if trusted:
            numbers = [number for number in numbers if not of_the_way(headers[number][0])]
            headers = tuple([headers[number] for number in numbers])
        if path.startswith(admin.PREFIX):
            return _greeting(None, scope["method"], path, options, headers, numbers)
        asked = tuple([pair for pair in headers if pair[0].startswith(PREFIX)])
        if asked:
            options = from_headers(asked).over(options)
            kept = [place for place, pair in enumerate(headers) if not pair[0].startswith(PREFIX)]
            places = list(numbers)
            headers, numbers = tuple([headers[place] for place in kept]), [places[place] for place in kept]
        guest = self._welcome.guest(path, headers)
        if guest is not None:
            options = within(guest.key, options)
            lent = self._welcome.lent(guest, scope["method"], path, headers)
            kept = [place for place, pair in enumerate(headers) if pair[0] not in KEY_HEADERS]
            places = list(numbers)
            headers, numbers = tuple([headers[place] for place in kept]), [places[place] for place in kept]
            return _greeting(lent.upstream, scope["method"], path, options, headers + lent.secret, numbers, lent)
        upstream = choose(options.provider, path, headers, self._upstreams, self._defaults)
        headers = self._purse.lend(upstream.provider, headers, bool(upstream.dialect.secret(headers)))
        return _greeting(upstream, scope["method"], path, options, headers, numbers)


def _greeting(
    upstream: Upstream | None,
    method: str,
    path: str,
    options: Options,
    headers: Headers,
    numbers: Iterable[int],
    lent: Lent | None = None,
) -> Greeting:
    """`numbers` says where each header stands in the request; one that was lent stands behind them."""
    client, onward = recognise(headers), tuple(end_to_end(headers))
    return Greeting(
        path=path,
        options=options,
        client=client,
        upstream=upstream,
        understood=upstream is not None and _understands(upstream, method, path, headers),
        packed=bool(encodings(headers)),
        hold=later(client.prefer),
        headers=tuple([(name, "" if name in _OWN else value) for name, value in headers]),
        own=tuple([(place, number) for place, number in enumerate(numbers) if headers[place][0] in _OWN]),
        standing=tuple([pair for pair in headers if pair[0] not in _OWN and pair[0] != "content-encoding"]),
        guest=None if lent is None else lent.guest,
        memory=Memory(None if lent is None else lent.credential),
        onward=onward if _OWN.isdisjoint([name for name, _ in onward]) else None,
    )


def _understands(upstream: Upstream, method: str, path: str, headers: Headers) -> bool:
    """A call without a key buys nothing on any lane: the provider says so best."""
    if not upstream.dialect.handles(method, path):
        return False
    return any(name in KEYS for name, _ in headers) or bool(upstream.dialect.secret(headers))
