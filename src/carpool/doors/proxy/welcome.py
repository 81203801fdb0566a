"""Who comes with a virtual key, what is lent to them, and where they may go with it.

Others may buy with the same provider's key. So a guest reaches only what answers a question and keeps nothing: whatever
lists, reads or changes what the account holds would show one guest what belongs to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.doors.proxy.passing import upgrade_refused
from carpool.engine import Upstream
from carpool.engine.guests import Guest, Guests
from carpool.errors import BadCall, KeyForbidden, KeyRefused, KeyUnready
from carpool.keys import PREFIX, SHAPE, looks_virtual
from carpool.model import Headers, Lane

KEY_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
PAYERS = frozenset({"openai-organization", "openai-project"})  # who pays is not the guest's to say
REQUIRED = (
    "carpool takes virtual keys only. Send one, which begins with cpk-, where you send the provider's key; whoever "
    "runs carpool makes one with carpool keys add."
)
_QUERY = PREFIX.encode()
_FREE = "/v1/messages/count_tokens"  # buys nothing
_ASKED: Mapping[str, frozenset[str]] = {
    "anthropic": frozenset({"/v1/messages", _FREE, "/v1/complete"}),
    "openai": frozenset(
        {
            *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/moderations"),
            *("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
            *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
            *("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
        }
    ),
}
_READ = frozenset({"/", "/v1/models"})


@dataclass(frozen=True, slots=True)
class Lent:
    """What a guest's request goes on with."""

    guest: Guest
    upstream: Upstream
    secret: Headers = field(repr=False)
    credential: str

    def __repr__(self) -> str:  # never the secret
        return f"<Lent at {self.upstream.provider} for {self.credential}>"


def virtual_key(headers: Headers) -> tuple[str, str] | None:
    """The header in which a virtual key stands, and the key."""
    found = [(name, _bare(value)) for name, value in headers if name in KEY_HEADERS]
    found = [(name, key) for name, key in found if looks_virtual(key)]
    if len({key for _, key in found}) > 1:
        raise KeyRefused("This request carries several virtual keys. Send one.")
    return found[0] if found else None


def _bare(value: str) -> str:
    value = value.strip()
    return value[7:].strip() if value[:7].lower() == "bearer " else value


def check_query(query: bytes) -> None:
    if _QUERY in query and SHAPE.search(query.decode("latin-1")):
        raise BadCall(_misplaced("the query"))


def _misplaced(place: str) -> str:
    return f"A virtual key stands in {place}, from where it would travel on. Send it where the provider's key belongs."


class Welcome:
    def __init__(self, guests: Guests | None, upstreams: Mapping[str, Upstream], *, required: bool = False) -> None:
        self._guests = guests
        self._upstreams = upstreams
        self._required = required

    @property
    def epoch(self) -> int:
        return 0 if self._guests is None else self._guests.epoch

    def guest(self, path: str, headers: Headers) -> Guest | None:
        """None for whoever brings no virtual key. Raises where one is needed, or is not good."""
        _check_places(path, headers)
        found = virtual_key(headers)
        if found is None or self._guests is None:
            if self._required:
                raise KeyRefused(REQUIRED)
            return None
        return self._guests.find(found[1])

    def lent(self, guest: Guest, method: str, path: str, headers: Headers) -> Lent:
        """What a guest's request goes on with. Raises where the key does not allow it."""
        upstream = self._upstream(guest)
        _check_reach(guest, upstream, method, path, headers)
        found = virtual_key(headers)
        return Lent(guest, upstream, *guest.lent("" if found is None else found[0]))

    def _upstream(self, guest: Guest) -> Upstream:
        key = guest.key
        if key.provider not in self._upstreams:
            raise KeyUnready(f"The virtual key {key.name} is for the provider {key.provider}, which is not configured.")
        if not guest.secrets:
            raise KeyUnready(
                f"The virtual key {key.name} buys with the key in {key.env}, which is not set where carpool runs. "
                "Set it there, and start carpool again."
            )
        return self._upstreams[key.provider]


NOBODY = Welcome(None, {})


def _check_places(path: str, headers: Headers) -> None:
    """Wherever else it stands, a virtual key would leave the house."""
    for name, value in headers:
        if name not in KEY_HEADERS and PREFIX in value and SHAPE.search(value):
            raise BadCall(_misplaced(f"the header {name[:60]}"))
    if PREFIX in path and SHAPE.search(path):
        raise BadCall(_misplaced("the path"))


def _check_reach(guest: Guest, upstream: Upstream, method: str, path: str, headers: Headers) -> None:
    key, reads = guest.key, method in ("GET", "HEAD")
    for name, _ in headers:
        if name in PAYERS:
            raise KeyForbidden(f"The virtual key {key.name} decides who pays. Send no {name}.")
    if upgrade_refused(path, headers) is not None:
        return  # whoever asks for a WebSocket gets none anyway, and is told so
    if not reads and path != _FREE and not key.profile.allows(Lane.NOW) and not upstream.dialect.handles(method, path):
        raise KeyForbidden(f"The virtual key {key.name} travels by batch only, and {path[:100]} can't ride one.")
    open_to_all = (method == "POST" and path in _ASKED.get(upstream.dialect.name, ())) or (reads and _readable(path))
    if not open_to_all and not key.profile.whole_account:
        if any(path in known for known in _ASKED.values()) and path not in _ASKED.get(upstream.dialect.name, ()):
            raise KeyForbidden(f"The virtual key {key.name} buys from {key.provider} only, which has no {path[:100]}.")
        raise KeyForbidden(
            f"The virtual key {key.name} may not {method[:20]} {path[:100]}, which may show what belongs to others. "
            "Keys made with --whole-account may."
        )


def _readable(path: str) -> bool:
    model = path.removeprefix("/v1/models/")
    return path in _READ or (model != path and model.replace("-", "").replace(".", "").replace(":", "").isalnum())
