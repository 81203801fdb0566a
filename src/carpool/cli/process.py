"""Process settings: crash reports without secrets, memory, open files.

The message of an unexpected exception may contain a key or a prompt. So only its type and the places in the code are
logged. carpool's own errors are written to be read, and are logged in full.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import resource
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.config import ConnectionLimits
from carpool.core.errors import safe_traceback
from carpool.core.ports import Clock

log = logging.getLogger("carpool.serve")
_PR_SET_DUMPABLE = 4


class SafeFormatter(logging.Formatter):
    """Formats tracebacks without the message of the exception."""

    def formatException(self, ei: Any) -> str:  # noqa: N802  the library's name
        return safe_traceback(ei[1]) if ei and ei[1] is not None else ""


@contextlib.contextmanager
def no_data_in_crashes() -> Iterator[None]:
    """Within this context a crash reveals no data: not on a terminal, not in a core file, and not to other processes of
    the same user, which could otherwise read this process's memory and environment."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc: the limit above still applies
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = _in_thread, _unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def log_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions that were never awaited. The loop's own handler would log their message and the coroutine."""
    error = context.get("exception")
    log.error("Something broke in the background%s", "." if error is None else f":\n{safe_traceback(error)}")


def _in_thread(broken: threading.ExceptHookArgs) -> None:
    if broken.exc_value is not None:
        log.error("A thread broke:\n%s", safe_traceback(broken.exc_value))


def _unraisable(broken: sys.UnraisableHookArgs) -> None:
    if broken.exc_value is not None:
        log.error("Something broke while it was let go:\n%s", safe_traceback(broken.exc_value))


# ------------------------------------------------------------ memory
# Memory of the server process: large bodies are returned to the system when they are freed.

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
LARGE = 256 << 10  # bytes: few calls are larger
MAX_UNUSED = 4 << 20  # bytes at the end of the heap
TRIM_EVERY_S = 2.0
WORTH_TRIMMING = 6 << 20  # bytes that are unused since the last trimming


def collect_rarely() -> None:
    """Run the garbage collector rarely: calls create almost no reference cycles, and collecting takes a sixth of the
    time of a quick call. Objects from the start are excluded for good."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def give_back_large_blocks() -> None:
    """Fix glibc's mmap threshold. glibc maps large blocks separately and unmaps them when freed, but by default the
    threshold rises with the first freed block, up to 32 MB. Then bodies are in the heap, and small objects between them
    keep it from shrinking. An explicit threshold stays fixed. Other C libraries are left alone."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, MAX_UNUSED)


async def trim_heap(clock: Clock) -> None:
    """Return free pages inside the heap to the system, again and again. `give_back_large_blocks` covers blocks of the
    size of a body; the pieces in which bodies are received and sent are smaller, and one live object above them keeps
    the free pages below it. Trimming takes about 0.2 ms per megabyte, so it waits until there is much to return."""
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "mallinfo2"):  # glibc has it since 2.33
        return
    libc.mallinfo2.restype = _Mallinfo
    lowest = _unused_bytes(libc)
    while True:
        await clock.sleep(TRIM_EVERY_S)
        unused = _unused_bytes(libc)
        if unused - lowest > WORTH_TRIMMING:
            libc.malloc_trim(0)
            lowest = _unused_bytes(libc)
        lowest = min(lowest, unused)


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc: sizes in bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keep".split()  # noqa: SIM905
    )


def _unused_bytes(libc: ctypes.CDLL) -> int:
    """Resident memory that is not allocated through malloc: code, Python's own arenas, and free pages of the heap."""
    info = libc.mallinfo2()
    resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    return int(resident - info.uordblks - info.hblkhd)


# ------------------------------------------------------------ open files
# The number of open connections: the configured limit, or the system's if that is lower.

KEPT = 100  # files that are not connections


def within_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """The limits, lowered to what the system allows. A client may need a second connection, to its provider; clients
    that wait for a batch, usually the most, need none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections * 2 + KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return limits
    return replace(limits, max_connections=max(1, min(limits.max_connections, (soft - KEPT) * 3 // 4)))
