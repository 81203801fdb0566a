"""The secret for hashing credentials: from the environment, from a file, or random. A store keeps a value by which it
recognises its secret."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from carpool.core.errors import ConfigError, StoreUnwritable, WrongSecret
from carpool.stores.operations.session import Session

VARIABLE = "CARPOOL_SECRET"
SHORTEST = 16


def secret_file(path: str) -> Path:
    return Path(f"{os.path.realpath(path)}.secret")


def find_secret(file: Path | None, env: Mapping[str, str] = os.environ) -> bytes | None:
    """Returns `CARPOOL_SECRET`, else the contents of the file; None if neither exists. Creates nothing."""
    given = env.get(VARIABLE)
    if given is not None and len(given) < SHORTEST:
        raise ConfigError(f"{VARIABLE} is too short: it must have at least {SHORTEST} characters.")
    if given is not None or file is None:
        return None if given is None else given.encode()
    try:
        text = file.read_text("ascii").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(file, error) from error
    if len(text) < SHORTEST:
        raise WrongSecret(f"The secret {file} is damaged: put the earlier file back, or set {VARIABLE}.")
    return text.encode()


def load_secret(file: Path | None, env: Mapping[str, str] = os.environ) -> bytes:
    """As `find_secret`, and creates the file (mode 0600) if it is missing; without a file, returns a random secret."""
    if file is None:
        return find_secret(None, env) or secrets.token_bytes(32)
    secret = find_secret(file, env)
    if secret is None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _create(file)
        except OSError as error:
            raise _unusable(file, error) from error
        secret = find_secret(file, env)
    assert secret is not None
    return secret


def find_store_secret(session: Session, given: bytes | None, file: Path) -> bytes | None:
    """Returns the store's secret, None if it has none yet. Raises if the secret is missing, or is another one."""
    check = session.meta("secret_check")  # before the secret, which a new store writes first
    secret = given or find_secret(file)
    if check is None:
        return secret
    if secret is None:
        raise WrongSecret(
            f"The store {session.name} was made with a secret that is not known here. Set {VARIABLE} to the same value "
            f"for every process that uses it, or put back {file} from the machine that made it; or start with a new "
            "store."
        )
    if not hmac.compare_digest(_check_value(secret), check):
        raise WrongSecret(
            f"The store {session.name} was made with another secret, so its credentials can't be recognised. "
            f"Set {VARIABLE} to the earlier secret or put {file} back; or start with a new store."
        )
    return secret


def settle_secret(session: Session, given: bytes | None, file: Path) -> None:
    """Sets the session's secret. A store without one gets one, which is kept in the file unless it is configured."""
    session.pepper = find_store_secret(session, given, file) or load_secret(file)
    session.make_meta("secret_check", _check_value(session.pepper))
    find_store_secret(session, session.pepper, file)  # another process may have been faster


def _check_value(secret: bytes) -> str:
    return hmac.new(secret, b"carpool store check", hashlib.sha256).hexdigest()


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
