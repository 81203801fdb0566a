"""`carpool serve --workers N`: one process starts the others, starts them again, hosts what they share, ends last."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.cli.hub import Hub
from carpool.clock import SystemClock
from carpool.config import Config
from carpool.engine.tasks import Crew
from carpool.stores import open_store
from carpool.stores.remote import hosted

log = logging.getLogger("carpool.serve")

SHORTEST_PAUSE_S = 0.5  # before a worker that ended is started again; twice as long each time
LONGEST_PAUSE_S = 30.0
STEADY_S = 60.0  # a worker that lived so long starts with the shortest again
FAILED = 2


class Workers:
    """`command` is what one is started with. `begun` is called once, when all of them serve."""

    def __init__(self, count: int, command: Sequence[str], begun: Callable[[], None]) -> None:
        self._count = count
        self._command = command
        self._begun = begun
        self._clock = SystemClock()
        self._crew = Crew()
        self._live: set[asyncio.subprocess.Process] = set()
        self._ready = 0
        self._said = asyncio.Event()
        self._stopping = asyncio.Event()
        self.code = 0

    # ------------------------------------------------------------ what they say, and what they are told

    def ready(self) -> None:
        """A worker serves. When the first does, the others are started: what is wrong is then told once."""
        self._ready += 1
        self._said.set()
        if self._ready == self._count:
            self._begun()

    def stop(self, number: int) -> None:
        """Passes a signal on. The second one is passed on too, and means at once."""
        self._stopping.set()
        self._pass(number)

    def _pass(self, number: int) -> None:
        for process in self._live:
            if process.returncode is None:
                process.send_signal(number)

    # ------------------------------------------------------------ keeping them alive

    async def run(self) -> int:
        """Until all are gone; says with which code this process ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._pass, signal.SIGHUP)
        try:
            keepers = [self._crew.lend(self._keep(1), "worker 1")]
            first = self._crew.lend(self._said.wait(), "first")
            await asyncio.wait((keepers[0], first), return_when=asyncio.FIRST_COMPLETED)
            if self._said.is_set() and not self._stopping.is_set():
                keepers += [self._crew.lend(self._keep(n), f"worker {n}") for n in range(2, self._count + 1)]
            await asyncio.gather(*keepers)
        finally:
            self._pass(signal.SIGKILL)
            self._crew.abort()
        return self.code

    async def _keep(self, which: int) -> None:
        pause = SHORTEST_PAUSE_S
        while not self._stopping.is_set():
            started = self._clock.now()
            code = await self._live_once(which)
            if self._stopping.is_set():
                return
            if not self._said.is_set():  # it never served: what keeps it from that would keep the next from it, too
                self.code = code if code > 0 else FAILED
                return
            lived = self._clock.now() - started
            pause = SHORTEST_PAUSE_S if lived >= STEADY_S else pause
            log.warning("Worker %d ended (%s). It is started again in %g s.", which, _how(code), pause)
            await self._wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _live_once(self, which: int) -> int:
        # A session of its own: Ctrl-C at a terminal would otherwise reach the workers twice.
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


async def supervise(count: int, config: Config, port: int, begun: Callable[[], None]) -> int:
    """Hosts the store where only one process may open it, and hands secrets on; the rest is the workers' own."""
    store = await open_store(config.store, encrypt=config.encrypt) if hosted(config.store) else None
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:  # its owner's alone
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
    """Whether several processes can share a port here, each with a queue of its own."""
    return sys.platform == "linux" and hasattr(os, "fork")
