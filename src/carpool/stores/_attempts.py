"""Attempts on `now`, written down before their bytes go out: two small files beside the store, used in turn.

A line in a file costs a system call, a transaction of its own a change of threads and back, which is most of what a
quick call takes. The line outlives the process. The purchase's own entry takes it over; where none follows within a
moment, the attempt itself is written. What a crash left here is taken into the ledger when the store is opened again.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from carpool.errors import StoreUnwritable
from carpool.model import Entry
from carpool.stores._writer import Told

TURN = 256_000  # bytes after which the other file is taken, once everything in it stands in the ledger

TAKE_OVER_S = 0.5  # an attempt without an entry is written after one or two of these

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


class Pending:
    """Attempts that the ledger does not have yet. `hand_over` writes one, where no entry came to complete it."""

    def __init__(self, files: Attempts | None, hand_over: Callable[[Entry, Told], None]) -> None:
        self._files = files
        self._hand_over = hand_over
        self._young: dict[tuple[int, int], tuple[Entry, _File | None]] = {}
        self._old: dict[tuple[int, int], tuple[Entry, _File | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # the one whose alarm is set

    def add(self, entry: Entry) -> None:
        """Written down, or raises."""
        file = None if self._files is None else self._files.note(entry)
        self._young[entry.ticket, entry.purchase] = (entry, file)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(TAKE_OVER_S, self._age)

    def followed(self, entry: Entry, told: Told) -> Told:
        """This entry is about to be written: of its attempt nothing more is needed once it is. Who is to be told."""
        identity = (entry.ticket, entry.purchase)
        found = self._young.pop(identity, None) or self._old.pop(identity, None)
        file = None if found is None else found[1]
        return told if file is None else partial(_both, file.written, told)

    def flush(self) -> None:
        """Hands all of them over."""
        self._write(self._old)
        self._write(self._young)

    def _age(self) -> None:
        self._write(self._old)
        self._old, self._young = self._young, self._old
        self._loop = asyncio.get_running_loop() if self._old else None
        if self._loop is not None:
            self._loop.call_later(TAKE_OVER_S, self._age)

    def _write(self, attempts: dict[tuple[int, int], tuple[Entry, _File | None]]) -> None:
        while attempts:
            _, (entry, file) = attempts.popitem()
            self._hand_over(entry, _unkept if file is None else file.written)


def _both(first: Told, second: Told, error: BaseException | None) -> None:
    first(error)
    second(error)


def _unkept(error: BaseException | None) -> None:
    """A store in memory has nothing to fall back on, and the purchase's own entry meets the same trouble."""


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

    def written(self, error: BaseException | None) -> None:
        """A transaction that failed has not taken its line over."""
        if error is None:
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
