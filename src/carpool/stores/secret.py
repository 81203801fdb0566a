"""The secret for hashing credentials: from the environment, from a file beside the store, or random."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from carpool.core.errors import ConfigError, StoreUnwritable, WrongSecret

VARIABLE = "CARPOOL_SECRET"
SHORTEST = 16


def load_secret(path: str | None, env: Mapping[str, str]) -> bytes:
    """Returns `CARPOOL_SECRET`, else the contents of `<path>.secret` (mode 0600, created if missing); for a store in
    memory, a random secret."""
    if path is None:
        return secret_in(env) or secrets.token_bytes(32)
    return load_secret_at(Path(f"{os.path.realpath(path)}.secret"), env)


def load_secret_at(file: Path, env: Mapping[str, str]) -> bytes:
    """Returns `CARPOOL_SECRET`, else the contents of the file (mode 0600, created if missing)."""
    secret = find_secret_at(file, env)
    if secret is None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(file)
        except OSError as error:
            raise _unusable(file, error) from error
        secret = find_secret_at(file, env)
    assert secret is not None
    return secret


def find_secret(path: str, env: Mapping[str, str]) -> bytes | None:
    """As `load_secret`, but creates nothing: None if opening the store would create a secret."""
    return find_secret_at(Path(f"{os.path.realpath(path)}.secret"), env)


def find_secret_at(file: Path, env: Mapping[str, str]) -> bytes | None:
    return secret_in(env) or _read(file)


def secret_in(env: Mapping[str, str]) -> bytes | None:
    given = env.get(VARIABLE)
    if given is not None and len(given) < SHORTEST:
        raise ConfigError(f"{VARIABLE} is too short: it must have at least {SHORTEST} characters.")
    return None if given is None else given.encode()


def check_value(secret: bytes) -> str:
    """Returns the value that a store keeps to recognise its secret without storing it."""
    return hmac.new(secret, b"carpool store check", hashlib.sha256).hexdigest()


def verify(secret: bytes, kept: str, name: str) -> None:
    if not hmac.compare_digest(check_value(secret), kept):
        raise WrongSecret(
            f"The store {name} was made with another secret, so its credentials can't be recognised. "
            f"Set {VARIABLE} to the earlier secret or put {name}.secret back; or start with a new store."
        )


def verify_found(secret: bytes | None, kept: str | None, name: str) -> None:
    """As `verify`, for a store that is only inspected: a missing secret is an error unless the store is new."""
    if kept is None:
        return
    if secret is None:
        raise WrongSecret(
            f"The secret of the store {name} is missing. Set {VARIABLE} to it or put {name}.secret back; or start with "
            "a new store."
        )
    verify(secret, kept, name)


def _read(path: Path) -> bytes | None:
    try:
        text = path.read_text("ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, error) from error
    if len(text) < SHORTEST:
        raise WrongSecret(f"The secret {path} is damaged: put the earlier file back, or set {VARIABLE}.")
    return text.encode()


def _unusable(path: Path, error: Exception) -> StoreUnwritable:
    return StoreUnwritable(f"The secret {path} can't be used ({error}). Check its permissions.")


def _create(path: Path) -> None:
    """Writes a temporary file and links it into place: no process reads half a secret, and of two creators one wins."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
