"""The secret that keys the hashes of credentials: from the environment, from a file beside the store, or random."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from carpool.errors import ConfigError, StoreUnwritable, WrongSecret

VARIABLE = "CARPOOL_SECRET"
SHORTEST = 16


def load_secret(path: str | None, env: Mapping[str, str]) -> bytes:
    """`CARPOOL_SECRET`, else the 0600 file `<path>.secret` (made when missing), else, in memory, a random one."""
    if path is None:
        return _said(env) or secrets.token_bytes(32)
    return load_secret_at(Path(f"{os.path.realpath(path)}.secret"), env)


def load_secret_at(file: Path, env: Mapping[str, str]) -> bytes:
    """`CARPOOL_SECRET`, else what the 0600 file keeps, which is made when missing."""
    return _said(env) or _kept(file)


def _said(env: Mapping[str, str]) -> bytes | None:
    given = env.get(VARIABLE)
    if given is not None and len(given) < SHORTEST:
        raise ConfigError(f"{VARIABLE} is too short: it must have at least {SHORTEST} characters.")
    return None if given is None else given.encode()


def check_value(secret: bytes) -> str:
    """What a store keeps to recognise its secret, without knowing it."""
    return hmac.new(secret, b"carpool store check", hashlib.sha256).hexdigest()


def verify(secret: bytes, kept: str, name: str) -> None:
    if not hmac.compare_digest(check_value(secret), kept):
        raise WrongSecret(
            f"The store {name} was made with another secret, so its credentials can't be recognised. "
            f"Set {VARIABLE} to the earlier secret or put {name}.secret back; or start with a new store."
        )


def _kept(path: Path) -> bytes:
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(path)
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnwritable(f"The secret {path} can't be used ({error}). Check its permissions.") from error
    if len(text) < SHORTEST:
        raise WrongSecret(f"The secret {path} is damaged: put the earlier file back, or set {VARIABLE}.")
    return text.encode()


def _create(path: Path) -> None:
    """Writes aside and links into place: nobody ever reads half a secret, and of two creators one wins."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()
