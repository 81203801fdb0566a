"""Translates the driver's exceptions to carpool's errors. Leaves out the server's details: they may quote data."""

from __future__ import annotations

import psycopg

from carpool.core.errors import StoreAway, StoreError, StoreUnwritable
from carpool.stores.postgres.session import Raced

# Unique keys that two transactions may insert at the same time: run again, the second one finds the row.
_TWINS = {"calls_key", "entries_pkey"}
_AGAIN = {"40001", "40P01", "55P03"}  # serialization failure, deadlock, lock not available
_LATER = {"53300", "57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04"}  # no slot, starting, shutting down
_NO_ROOM = ("File too large", "Disk quota exceeded")  # the server has no error codes for these
_REFUSED = ("28", "3D", "3F", "42")  # wrong user, database, schema or rights: a retry does not help


def lost(error: BaseException, connection: psycopg.Connection[object]) -> bool:
    """Whether the connection is lost, or must be replaced."""
    return connection.closed or connection.broken or state_of(error) in _LATER


def again(error: BaseException) -> bool:
    """Whether the same transaction may succeed if it is run again immediately."""
    if isinstance(error, Raced) or state_of(error) in _AGAIN:
        return True
    return isinstance(error, psycopg.errors.UniqueViolation) and error.diag.constraint_name in _TWINS


def hopeless(error: BaseException) -> bool:
    """Whether a failed attempt to connect would fail again every time."""
    if state_of(error).startswith(_REFUSED):
        return True
    return any(word in str(error) for word in ("authentication failed", "no pg_hba.conf", "does not exist"))


def state_of(error: BaseException) -> str:
    return (error.sqlstate or "") if isinstance(error, psycopg.Error) else ""


def translate(error: BaseException, name: str) -> StoreError:
    state, message = state_of(error), _first_line(error)
    if state == "53100" or any(text in message for text in _NO_ROOM):
        return StoreUnwritable(f"The store {name} can't grow: the disk is full. Free some space; nothing was lost.")
    if state in ("25006", "42501"):
        return StoreUnwritable(
            f"The store {name} can't be written ({message}). Check the server and the user's rights."
        )
    if state == "53300" or "too many clients" in message or "connection slots" in message:
        return StoreAway(
            f"The store {name} has no connection left. Raise the server's max_connections, or run fewer processes."
        )
    if state.startswith("22") or (not state and isinstance(error, psycopg.DataError)):
        return StoreError(f"The store {name} can't hold such a value: {message}.")
    if state == "57014":
        return StoreAway(f"The store {name} took too long to answer. Look at the server's load and locks.")
    if isinstance(error, psycopg.OperationalError):
        return StoreAway(f"The store {name} can't be reached ({message}). Check its address and that the server runs.")
    return StoreError(f"The store {name} failed: {message}.")


def _first_line(error: BaseException) -> str:
    """Returns the first line of the message only: further lines may quote rows."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    text = (primary or str(error)).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
