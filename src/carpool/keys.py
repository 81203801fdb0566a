"""Virtual keys: what a house hands out instead of its provider's key. A store knows them by their keyed hash only.

A rotated key has a second row with a new digest and the same `uid`: what belongs to it stays its own.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from carpool.errors import ConfigError
from carpool.model import Lane

PREFIX: Final = "cpk-"
SHAPE: Final = re.compile(r"cpk-[A-Za-z0-9_-]{43}")
HINT: Final = 4  # letters of a key that may be shown
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,59}")


class KeyState(StrEnum):
    ACTIVE = "active"
    ENDING = "ending"  # rotated, and still good for a while
    EXPIRED = "expired"
    ROTATED = "rotated"
    REVOKED = "revoked"


LIVE: Final = frozenset({KeyState.ACTIVE, KeyState.ENDING})


class Profile(Struct, frozen=True):
    """What a key's calls may ask for, and what they get unasked. Its client can't change it."""

    budget: float | None = None  # seconds, for calls that ask for nothing
    lane: Lane | None = None  # likewise
    max_budget: float | None = None
    refuse_over: bool = False  # what asks for more is refused, not capped
    lanes: tuple[Lane, ...] = ()  # none: all
    tags: Mapping[str, str] = field(default_factory=dict)
    whole_account: bool = False  # it may also use what shows or changes the whole account at the provider

    def allows(self, lane: Lane) -> bool:
        return not self.lanes or lane in self.lanes


class VirtualKey(Struct, frozen=True):
    digest: str
    uid: str  # who it is, however often it is rotated
    name: str
    hint: str
    provider: str
    env: str  # the variable that holds the provider's key
    owner: str
    profile: Profile
    created_at: float
    expires_at: float | None = None
    ends_at: float | None = None  # when it was revoked, or its time after a rotation is over
    ended: str = ""  # why: `revoked` or `rotated`
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


def looks_virtual(secret: str) -> bool:
    return secret.startswith(PREFIX)


def digest_of(pepper: bytes, secret: str) -> str:
    """Under what a store knows a key."""
    return hmac.digest(pepper, b"virtual key\n" + secret.encode("utf-8", "replace"), "sha256").hex()


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
    """A key and its secret, which nobody can tell again."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:60]!r} can't be the name of a key: use up to 60 letters, digits, '_', '.', '@' and '-'."
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    return VirtualKey(
        digest=digest_of(pepper, secret),
        uid=secrets.token_hex(16),
        name=name,
        hint=secret[len(PREFIX) :][:HINT],
        provider=provider,
        env=env,
        owner=owner,
        profile=profile or Profile(),
        created_at=now,
        expires_at=expires_at,
    ), secret


# ---------------------------------------------------------------- changes: what stands and the time in, rows out


def check_free(keys: Iterable[VirtualKey], name: str, now: float) -> None:
    if any(key.name == name and key.live(now) for key in keys):
        raise ConfigError(
            f"There is a key {name} already. Choose another name, or give it a new secret: carpool keys rotate {name}."
        )


def revoked(keys: Iterable[VirtualKey], name: str, now: float) -> list[VirtualKey]:
    return [replace(key, ends_at=now, ended=str(KeyState.REVOKED)) for key in _named(keys, name, now)]


def rotated(
    keys: Iterable[VirtualKey], name: str, now: float, grace: float, pepper: bytes
) -> tuple[list[VirtualKey], str]:
    """The rows that change, and the new secret. The earlier one is good for `grace` seconds more."""
    standing = _named(keys, name, now)
    latest = max(standing, key=lambda key: key.created_at)
    secret = PREFIX + secrets.token_urlsafe(32)
    fresh = replace(
        latest,
        digest=digest_of(pepper, secret),
        hint=secret[len(PREFIX) :][:HINT],
        created_at=now,
        ends_at=None,
        ended="",
        last_used=None,
    )
    until = now + grace
    ending = [
        replace(key, ends_at=until if key.ends_at is None else min(key.ends_at, until), ended=str(KeyState.ROTATED))
        for key in standing
    ]
    return [*ending, fresh], secret


def _named(keys: Iterable[VirtualKey], name: str, now: float) -> list[VirtualKey]:
    keys = list(keys)
    found = [key for key in keys if key.name == name and key.live(now)]
    if not found:
        known = sorted({key.name for key in keys if key.live(now)})
        hint = f"The keys are {', '.join(known[:20])}." if known else "There are no keys yet: carpool keys add NAME."
        raise ConfigError(f"There is no key {name[:60]!r} that is still good. {hint}")
    return found
