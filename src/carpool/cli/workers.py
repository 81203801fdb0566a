"""`carpool serve --workers N`: a supervisor starts and restarts the workers, hosts what they share, and exits last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from carpool.cli.announce import Holding
from carpool.cli.hub import Hub, Ready
from carpool.config import Config
from carpool.core.backoff import backoff
from carpool.core.clock import SystemClock
from carpool.engine.context import BackgroundTasks
from carpool.stores import open_store
from carpool.stores.remote import hosted

log = logging.getLogger("carpool.serve")

SHORTEST_PAUSE_S = 0.5  # before a worker is restarted; doubles each time
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # after so long a worker's pause is reset
FAILED = 2


class Workers:
    """`command` starts a worker. `begun` is called once, when all of them serve, with what the first one found in the
    store."""

    def __init__(self, count: int, command: Sequence[str], begun: Ready) -> None:
        self._count = count
        self._command = command
        self._begun = begun
        self._clock = SystemClock()
        self._background = BackgroundTasks()
        self._live: set[asyncio.subprocess.Process] = set()
        self._ready = 0
        self._found = Holding()
        self._served = asyncio.Event()
        self._stopping = asyncio.Event()
        self.code = 0

    # ------------------------------------------------------------ messages

    def ready(self, holding: Holding) -> None:
        """A worker serves. The others start only after the first one, so that an error is reported once."""
        self._ready += 1
        self._served.set()
        if self._ready == 1:
            self._found = holding
        if self._ready == self._count:
            self._begun(self._found)

    def stop(self, number: int) -> None:
        """Forward a signal. A second one is forwarded too, and means an immediate stop."""
        self._stopping.set()
        self._pass(number)

    def _pass(self, number: int) -> None:
        for process in self._live:
            if process.returncode is None:
                process.send_signal(number)

    # ------------------------------------------------------------ supervision

    async def run(self) -> int:
        """Run until all workers have ended; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._pass, signal.SIGHUP)
        try:
            keepers = [self._background.lend(self._keep(1), "worker 1")]
            first = self._background.lend(self._served.wait(), "first")
            await asyncio.wait((keepers[0], first), return_when=asyncio.FIRST_COMPLETED)
            if self._served.is_set() and not self._stopping.is_set():
                keepers += [self._background.lend(self._keep(n), f"worker {n}") for n in range(2, self._count + 1)]
            await asyncio.gather(*keepers)
        finally:
            self._pass(signal.SIGKILL)
            self._background.abort()
        return self.code

    async def _keep(self, which: int) -> None:
        ended = 0  # exits in a row soon after the start
        while not self._stopping.is_set():
            started = self._clock.now()
            code = await self._live_once(which)
            if self._stopping.is_set():
                return
            if not self._served.is_set():  # it never served, so a restart would fail as well
                self.code = code if code > 0 else FAILED
                return
            lived = self._clock.now() - started
            ended = 1 if lived >= STEADY_S else ended + 1
            pause = backoff(ended, SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            log.warning("Worker %d ended (%s). It is started again in %g s.", which, _how(code), pause)
            await self._wait(pause)

    async def _live_once(self, which: int) -> int:
        # In a new session, or Ctrl-C at a terminal would reach the workers twice.
        process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
        self._live.add(process)
        try:
            if self._stopping.is_set():
                process.send_signal(signal.SIGTERM)
            return await process.wait()
        finally:
            self._live.discard(process)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


async def supervise(count: int, config: Config, port: int, begun: Ready) -> int:
    """Run the workers; host the store if only one process may open it, and share secrets between them."""
    store = await open_store(config.store, encrypt=config.encrypt) if hosted(config.store) else None
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:  # only its owner can enter
        path = Path(folder) / "hub"
        command = [sys.executable, "-m", "carpool", *sys.argv[1:], "--port", str(port), "--hub", str(path)]
        workers = Workers(count, command, begun)
        hub = Hub(store, SystemClock(), workers.ready)
        try:
            await hub.open(path)
            return await workers.run()
        finally:
            await hub.aclose()
            if store is not None:
                await store.aclose()


def able() -> bool:
    """Whether several processes can share a port on this system, each with its own accept queue."""
    return sys.platform == "linux" and hasattr(os, "fork")
