"""One process per store file: an exclusive lock that the operating system drops when its holder dies."""

from __future__ import annotations

import fcntl
import os

from carpool.errors import StoreLocked, StoreUnwritable


class FileLock:
    """Held from `acquire` to `release`. The lock file keeps its holder's pid, for the message only."""

    def __init__(self, path: str) -> None:
        self._store = path
        self._path = f"{path}.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreLocked(
                f"The store {self._store} is in use by process {holder}. Stop that process, or choose another store."
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise StoreUnwritable(f"{self._path} can't be locked ({error.strerror}). Use a local disk.") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        self._descriptor = descriptor

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnwritable(
                f"The store {self._store} can't be locked: {self._path} can't be written ({error.strerror})."
            ) from error

    def release(self) -> None:
        # The file stays: removing it would let two processes lock two different files of one name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
