"""What a process says when it breaks, and what it leaves behind: where it broke, and nothing of what it held.

A message of an unexpected exception may quote what it stumbled over, be it a key or a prompt. So only its kind and the
places in the code are told. carpool's own errors are sentences made to be read, and are told as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import resource
import sys
import threading
from collections.abc import Iterator
from typing import Any

from carpool.crashes import told

log = logging.getLogger("carpool.serve")
_PR_SET_DUMPABLE = 4


class Discreet(logging.Formatter):
    """Tracebacks without the words of the exception."""

    def formatException(self, ei: Any) -> str:  # noqa: N802  the library's name
        return told(ei[1]) if ei and ei[1] is not None else ""


@contextlib.contextmanager
def keeping_quiet() -> Iterator[None]:
    """Within it nothing that breaks shows what it held: not on a terminal, not in a core file, and not to other
    processes of the same user, who could otherwise read this one's memory and environment."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc: the limit above holds all the same
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = _in_thread, _unraisable
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = before


def on_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody awaited. The loop's own words would show the exception's, and the task's coroutine."""
    error = context.get("exception")
    log.error("Something broke in the background%s", "." if error is None else f":\n{told(error)}")


def _in_thread(broken: threading.ExceptHookArgs) -> None:
    if broken.exc_value is not None:
        log.error("A thread broke:\n%s", told(broken.exc_value))


def _unraisable(broken: sys.UnraisableHookArgs) -> None:
    if broken.exc_value is not None:
        log.error("Something broke while it was let go:\n%s", told(broken.exc_value))
