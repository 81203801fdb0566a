"""API keys: the headers that carry them, and virtual keys.

The same key in a different header is the same credential. A virtual key is an API key that carpool issues in place of
the provider's key; a store holds only its keyed hash. Rotating one adds a row with a new digest and the same `uid`, so
calls and usage stay attributed to the same key.
"""

from __future__ import annotations

import dataclasses
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from carpool.core.errors import ConfigError
from carpool.core.model import CachingMode, Headers, Lane

BEARER: Final = "authorization"
PREFIX: Final = "cpk-"
SHAPE: Final = re.compile(r"cpk-[A-Za-z0-9_-]{43}")
HINT: Final = 4  # how many characters of a key may be shown
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,59}")


class KeyState(StrEnum):
    ACTIVE = "active"
    ENDING = "ending"  # rotated, and still accepted during the grace period
    EXPIRED = "expired"
    ROTATED = "rotated"
    REVOKED = "revoked"


LIVE: Final = frozenset({KeyState.ACTIVE, KeyState.ENDING})


class Profile(Struct, frozen=True):
    """Limits and defaults for the calls of a key. Its client can't change them."""

    budget: float | None = None  # default time budget in seconds
    lane: Lane | None = None  # default lane
    max_budget: float | None = None
    refuse_over: bool = False  # a larger budget is refused instead of capped
    lanes: tuple[Lane, ...] = ()  # allowed lanes; empty allows all
    tags: Mapping[str, str] = field(default_factory=dict)
    whole_account: bool = False  # may use endpoints that show or change the whole account at the provider
    task_budget: float | None = None  # default time budget of a task, in seconds
    caching: CachingMode | None = None  # default of what may be done for prompt caches

    def allows(self, lane: Lane) -> bool:
        return not self.lanes or lane in self.lanes


class VirtualKey(Struct, frozen=True):
    digest: str
    uid: str  # stays the same across rotations
    name: str
    hint: str
    provider: str
    env: str  # the environment variable that holds the provider's key
    owner: str
    profile: Profile
    created_at: float
    expires_at: float | None = None
    ends_at: float | None = None  # when it was revoked, or when its grace period after a rotation ends
    ended: str = ""  # the reason: `revoked` or `rotated`
    last_used: float | None = None

    def state(self, now: float) -> KeyState:
        if self.ended == KeyState.REVOKED:
            return KeyState.REVOKED
        if self.ends_at is not None and self.ends_at <= now:
            return KeyState.ROTATED
        if self.expires_at is not None and self.expires_at <= now:
            return KeyState.EXPIRED
        return KeyState.ACTIVE if self.ends_at is None else KeyState.ENDING

    def live(self, now: float) -> bool:
        return self.state(now) in LIVE


@dataclasses.dataclass(slots=True, eq=False)
class KeyHolder:
    """The current state of one key. `names` has one name for each form in which its secret may be sent."""

    key: VirtualKey
    secrets: Sequence[Headers] = dataclasses.field(default=(), repr=False)
    names: Sequence[str] = ()
    used: bool = False  # since the last write

    def provider_key(self, form: str) -> tuple[Headers, str]:
        """The provider's secret and its name, in the header `form` if possible."""
        for secret, name in zip(self.secrets, self.names, strict=True):
            if secret[0][0] == form:
                return secret, name
        return self.secrets[0], self.names[0]


def looks_virtual(secret: str) -> bool:
    return secret.startswith(PREFIX)


def digest_of(pepper: bytes, secret: str) -> str:
    """Returns the keyed hash under which a store looks up a virtual key."""
    return hmac.digest(pepper, b"virtual key\n" + secret.encode("utf-8", "replace"), "sha256").hex()


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:60]!r} can't be the name of a key: use up to 60 letters, digits, '_', '.', '@' and '-', and begin "
            "with a letter or a digit."
        )


def new_key(
    pepper: bytes,
    name: str,
    provider: str,
    env: str,
    now: float,
    *,
    owner: str = "",
    profile: Profile | None = None,
    expires_at: float | None = None,
) -> tuple[VirtualKey, str]:
    """Returns a new key and its secret. The secret is not stored and can't be recovered."""
    check_name(name)
    digest, hint, secret = _new_secret(pepper)
    return VirtualKey(
        digest=digest,
        uid=secrets.token_hex(16),
        name=name,
        hint=hint,
        provider=provider,
        env=env,
        owner=owner,
        profile=profile or Profile(),
        created_at=now,
        expires_at=expires_at,
    ), secret


def _new_secret(pepper: bytes) -> tuple[str, str, str]:
    """Returns the digest and the hint of a new secret, and the secret."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return digest_of(pepper, secret), secret[len(PREFIX) :][:HINT], secret


# ---------------------------------------------------------------- changes: current keys and time in, changed rows out


def check_free(keys: Iterable[VirtualKey], name: str, now: float) -> None:
    if any(key.name == name and key.live(now) for key in keys):
        raise ConfigError(
            f"There is a key {name} already. Choose another name, or give it a new secret: carpool keys rotate {name}."
        )


def revoked(keys: Iterable[VirtualKey], name: str, now: float) -> list[VirtualKey]:
    return [replace(key, ends_at=now, ended=str(KeyState.REVOKED)) for key in _live_keys_named(keys, name, now)]


def rotated(
    keys: Iterable[VirtualKey], name: str, now: float, grace: float, pepper: bytes
) -> tuple[list[VirtualKey], str]:
    """Returns the changed rows and the new secret. The previous secret stays valid for `grace` seconds."""
    live_keys = _live_keys_named(keys, name, now)
    latest = max(live_keys, key=lambda key: key.created_at)
    digest, hint, secret = _new_secret(pepper)
    fresh = replace(latest, digest=digest, hint=hint, created_at=now, ends_at=None, ended="", last_used=None)
    until = now + grace
    ending = [
        replace(key, ends_at=until if key.ends_at is None else min(key.ends_at, until), ended=str(KeyState.ROTATED))
        for key in live_keys
    ]
    return [*ending, fresh], secret


def _live_keys_named(keys: Iterable[VirtualKey], name: str, now: float) -> list[VirtualKey]:
    keys = list(keys)
    named = [key for key in keys if key.name == name]
    matching = [key for key in named if key.live(now)]
    if matching:
        return matching
    if named:
        state = max(named, key=lambda key: key.created_at).state(now)
        raise ConfigError(f"The key {name} is {state} already. carpool keys add {name} makes a new one of that name.")
    live = sorted({key.name for key in keys if key.live(now)})
    hint = f"The keys are {', '.join(live[:20])}." if live else "No key is valid: carpool keys add NAME makes one."
    raise ConfigError(f"There is no key {name[:60]!r}. {hint}")


# ---------------------------------------------------------------- headers that carry a key


def strip_bearer(name: str, value: str) -> str | None:
    """Returns the key in a key header; None for an authorization scheme other than Bearer."""
    if name != BEARER:
        return value.strip()
    return value[7:].strip() if value[:7].lower() == "bearer " else None


def single_key(headers: Headers) -> str | None:
    """Returns the key in these key headers if there is exactly one, possibly in several of them; None if there is none,
    or if they carry different keys."""
    keys = {strip_bearer(name, value) for name, value in headers} - {""}
    return keys.pop() if len(keys) == 1 else None


def header_forms(names: Sequence[str], key: str) -> list[Headers]:
    """Returns one set of headers per name, each carrying the key."""
    return [((name, f"Bearer {key}" if name == BEARER else key),) for name in names]


def plain(secret: Headers, payer_headers: Set[str]) -> Headers:
    """Returns the secret in normal form: the same headers, the key written the same way, empty key headers removed."""
    keys, payers = _split(secret, payer_headers)
    key = single_key(keys)
    return secret if key is None else _in_all({name for name, value in keys if strip_bearer(name, value)}, key) + payers


def forms(secret: Headers, names: Sequence[str], payer_headers: Set[str]) -> list[Headers]:
    """Returns every form of a secret: its key in each of the named headers, in all of them at once, and as it was sent.

    Headers that select who pays are kept in each form. A secret with several different keys has only its own form."""
    keys, payers = _split(secret, payer_headers)
    key = single_key(keys)
    if key is None:
        return [secret]
    in_each = [headers + payers for headers in (*header_forms(names, key), _in_all(names, key))]
    return list(dict.fromkeys((*in_each, plain(secret, payer_headers))))


def _in_all(names: Iterable[str], key: str) -> Headers:
    return tuple([header for headers in header_forms(sorted(names), key) for header in headers])


def _split(secret: Headers, payer_headers: Set[str]) -> tuple[Headers, Headers]:
    """The headers with the key, and those that select who pays."""
    keys = tuple([pair for pair in secret if pair[0] not in payer_headers])
    return keys, tuple([pair for pair in secret if pair[0] in payer_headers])
