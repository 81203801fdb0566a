"""Operations on virtual keys. Changes are numbered, so that a cache is reloaded only after a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from carpool.core.keys import Profile, VirtualKey
from carpool.stores.operations.codec import Row, to_json
from carpool.stores.operations.session import Session

_PROFILE = msgspec.json.Decoder(Profile)


def keys(session: Session, known: int | None) -> tuple[int, list[VirtualKey]] | None:
    row = session.row("keys_version")
    version = 0 if row is None else row[0]
    return None if version == known else (version, all_keys(session))


def all_keys(session: Session) -> list[VirtualKey]:
    return [_value(row) for row in session.rows("virtual_keys")]


def write_keys(session: Session, changed: Sequence[VirtualKey]) -> None:
    for key in changed:
        session.run("write_key", _row(key))
    session.run("next_keys_version")


def used_keys(session: Session, uses: Mapping[str, float]) -> None:
    """Records uses without a new change number: caches need not be reloaded, since access does not depend on it."""
    for digest, at in uses.items():
        session.run("used_key", {"digest": digest, "at": at})


def _row(key: VirtualKey) -> Row:
    described = (key.digest, key.uid, key.name, key.hint, key.provider, key.env, key.owner, to_json(key.profile))
    return (*described, key.created_at, key.expires_at, key.ends_at, key.ended)


def _value(row: Row) -> VirtualKey:
    digest, uid, name, hint, provider, env, owner, profile, *times = row
    return VirtualKey(digest, uid, name, hint, provider, env, owner, _PROFILE.decode(profile), *times)
