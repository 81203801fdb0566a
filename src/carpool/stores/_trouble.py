"""The driver's exceptions in carpool's words."""

from __future__ import annotations

import sqlite3

from carpool.errors import StoreCorrupt, StoreError, StoreLocked, StoreUnwritable

_UNWRITABLE = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM}
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def translate(error: sqlite3.Error, name: str) -> StoreError:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF  # the upper bits tell details that we don't need
    if primary == sqlite3.SQLITE_FULL:
        return StoreUnwritable(f"The store {name} can't grow: the disk is full. Free some space; nothing was lost.")
    if primary in _UNWRITABLE:
        return StoreUnwritable(f"The store {name} can't be written ({error}). Check its permissions and its disk.")
    if primary in _LOCKED:
        return StoreLocked(f"Another program holds {name} locked. End it, or wait until it is done.")
    if primary in _CORRUPT:
        return StoreCorrupt(f"The store {name} is damaged ({error}). Restore a copy, or move it away to start anew.")
    return StoreError(f"The store {name} failed: {error}.")
