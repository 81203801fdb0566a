"""Attempts on `now`, written down before their bytes go out: two small files beside the store, used in turn.

A line in a file costs a system call, a transaction of its own a change of threads and back, which is most of what a
quick call takes. The line outlives the process. The transaction follows within a moment and takes it over; what a crash
left here is taken into the ledger when the store is opened again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from carpool.errors import StoreUnwritable
from carpool.model import Entry

TURN = 256_000  # bytes after which the other file is taken, once everything in it stands in the ledger

_DECODER = msgspec.json.Decoder(Entry)


def _paths(store: str) -> list[Path]:
    return [Path(f"{store}.attempts-{number}") for number in (1, 2)]


class Attempts:
    def __init__(self, store: str) -> None:
        self._lock = threading.Lock()
        self._files = [_File(path) for path in _paths(store)]

    def note(self, entry: Entry) -> _File:
        """Writes a line, or raises. The file wants to hear when the ledger has it."""
        line = b"\n" + msgspec.json.encode(entry)  # the line break first: half a line, on a full disk, spoils no other
        with self._lock:
            current, other = self._files
            if current.size >= TURN and not other.waiting:
                other.clear()
                self._files.reverse()
                current = other
            current.write(line)
            return current

    def close(self) -> None:
        """After the last transaction. What did not reach the ledger stays for the next opening."""
        for file in self._files:
            file.close()


class _File:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self.size = 0
        self.waiting = 0  # lines that are not in the ledger yet

    def write(self, line: bytes) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if os.write(self._descriptor, line) < len(line):
                raise StoreUnwritable(f"{self._path} can't be written: the disk is full.")
        except OSError as error:
            raise StoreUnwritable(f"{self._path} can't be written ({error.strerror}).") from error
        self.size += len(line)
        self.waiting += 1

    def written(self, writing: asyncio.Future[Any]) -> None:
        """A transaction that failed has not taken its line over."""
        if not writing.cancelled() and writing.exception() is None:
            self.waiting -= 1

    def clear(self) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
        self.size = 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if not self.waiting:
                self._path.unlink(missing_ok=True)


def left_behind(store: str) -> list[Entry]:
    """The attempts that a crash kept from the ledger, as far as their lines are whole."""
    entries = []
    for path in _paths(store):
        if path.exists():
            for line in path.read_bytes().split(b"\n"):
                with suppress(msgspec.DecodeError):
                    entries.append(_DECODER.decode(line))
    return entries


def forget(store: str) -> None:
    for path in _paths(store):
        path.unlink(missing_ok=True)
