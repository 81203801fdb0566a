"""Disks that are really full: a small file system of its own, or, where nothing may be mounted, a limit that the system
sets on how far the files of a process may grow."""

from __future__ import annotations

import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


class Disk(ABC):
    @abstractmethod
    def fill(self) -> None:
        """From now on nothing on it can grow."""

    @abstractmethod
    def free(self) -> None: ...


class Mounted(Disk):
    """A file system in memory. A file that takes all the room fills it."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        with self._ballast.open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(4096))
            except OSError:
                return

    def free(self) -> None:
        self._ballast.unlink()


class Limited(Disk):
    """Writes beyond so many bytes of a file fail in these processes, and in those that they start."""

    def __init__(self, most: int, processes: Callable[[], Iterable[int]], user: str | None = None) -> None:
        self._most = most
        self._processes = processes
        self._user = user  # whose processes they are: nobody else may limit them

    def fill(self) -> None:
        self._limit(str(self._most))

    def free(self) -> None:
        self._limit("unlimited")

    def _limit(self, most: str) -> None:
        done: set[int] = set()
        while new := set(self._processes()) - done:  # until none is left that was started meanwhile
            for process in new:
                asked = ["prlimit", f"--pid={process}", f"--fsize={most}:"]
                ran = subprocess.run(asked, user=self._user, capture_output=True, text=True, check=False)
                assert ran.returncode == 0 or process not in self._processes(), ran.stderr  # some end by themselves
            done |= new


@contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@cache
def ways() -> tuple[str, ...]:
    """How a disk can be filled on this machine; at least one."""
    return ("mounted", "limited") if _may_mount() else ("limited",)


@cache
def _may_mount() -> bool:
    if os.geteuid() != 0:
        return False
    with TemporaryDirectory() as folder:
        try:
            with mounted(Path(folder) / "try", 1):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False
