"""The driver's exceptions in carpool's words. Never what was written: a server's details may quote it."""

from __future__ import annotations

import psycopg

from carpool.errors import StoreAway, StoreError, StoreUnwritable
from carpool.stores.postgres._session import Raced

# A row that two transactions made at the same time: begun again, the second finds it.
_TWINS = {"calls_key", "entries_pkey"}
_AGAIN = {"40001", "40P01", "55P03"}  # serialization, deadlock, a lock that was not to be had
_LATER = {"53300", "57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"}  # no room, or going up or down
_NO_ROOM = ("File too large", "Disk quota exceeded")  # the server has no code of its own for these
_REFUSED = ("28", "3D", "3F", "42")  # who asks, or what for, is wrong: asking again changes nothing


def lost(error: BaseException, connection: psycopg.Connection[object]) -> bool:
    """Whether the connection is gone, or as good as that."""
    return connection.closed or connection.broken or state_of(error) in _LATER


def again(error: BaseException) -> bool:
    """Whether the same transaction, begun again, may succeed at once."""
    if isinstance(error, Raced) or state_of(error) in _AGAIN:
        return True
    return isinstance(error, psycopg.errors.UniqueViolation) and error.diag.constraint_name in _TWINS


def hopeless(error: BaseException) -> bool:
    """Of a connection that could not be made: whether it never will."""
    if state_of(error).startswith(_REFUSED):
        return True
    return any(word in str(error) for word in ("authentication failed", "no pg_hba.conf", "does not exist"))


def state_of(error: BaseException) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def translate(error: BaseException, name: str) -> StoreError:
    state, said = state_of(error), _said(error)
    if state == "53100" or any(words in said for words in _NO_ROOM):
        return StoreUnwritable(f"The store {name} can't grow: the disk is full. Free some space; nothing was lost.")
    if state in ("25006", "42501"):
        return StoreUnwritable(f"The store {name} can't be written ({said}). Check the server and the user's rights.")
    if state == "53300" or "too many clients" in said or "connection slots" in said:
        return StoreAway(
            f"The store {name} has no connection left. Raise the server's max_connections, or run fewer processes."
        )
    if state.startswith("22") or (not state and isinstance(error, psycopg.DataError)):
        return StoreError(f"The store {name} can't hold such a value: {said}.")
    if state == "57014":
        return StoreAway(f"The store {name} took too long to answer. Look at the server's load and locks.")
    if isinstance(error, psycopg.OperationalError):
        return StoreAway(f"The store {name} can't be reached ({said}). Check its address and that the server runs.")
    return StoreError(f"The store {name} failed: {said}.")


def _said(error: BaseException) -> str:
    """The first line only: what follows may quote rows."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = (primary or str(error)).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
