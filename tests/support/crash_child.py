"""The processes that are killed. One parent imports everything once; each job is a fork of it that runs a real fleet.

Jobs come in as lines of JSON. What happens goes out as lines `<job> <word> <rest>`: every named point as it is reached,
every answer, every exit.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import traceback
from collections import Counter
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.types import Message
from anthropic.types.beta import BetaMessage
from openai import AsyncOpenAI

import carpool.engine.batch.buy
import carpool.engine.batch.collect
import carpool.engine.batch.follow
import carpool.engine.engine
import carpool.stores.postgres.session
from carpool import FleetDispatcher, RoutingPolicy
from carpool.core.model import Lane, Usage
from carpool.core.prices import PriceBook
from carpool.dialects import ANTHROPIC
from carpool.engine.cluster.membership import Lease

UNFINISHED = ("submitting", "unknown", "open", "cancelling", "ended")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


class Life:
    """One run of a fleet, up to its end or to the point where it is killed."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.name = job["job"]
        self.job = job
        self.stop: dict[str, Any] = job.get("stop") or {"point": None}
        self.reached: Counter[str] = Counter()
        self.settled = 0
        self.answered = 0
        self.together: dict[str, Any] = job.get("together") or {"point": None}
        self.all_there = asyncio.Event()
        self.late = asyncio.Event()
        if not job.get("late_count"):
            self.late.set()

    async def probe(self, point: str) -> None:
        self.reached[point] += 1
        count = self.reached[point]
        if point == "bought" and count == self.job.get("late_count"):
            self.late.set()
        if point != self.stop["point"] or count < self.stop["from"]:
            say(self.name, "point", point, count)
            await self.company(point, count)
            return
        if count == self.stop["at"]:
            while self.stop["drain"] and self.answered < self.settled:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            self.freeze(point, count)
        say(self.name, "point", point, count)
        await asyncio.Event().wait()

    async def company(self, point: str, count: int) -> None:
        """Whoever comes to this point goes on when so many are there."""
        if point == self.together["point"]:
            if count == self.together["count"]:
                self.all_there.set()
            await self.all_there.wait()

    def hook(self, event: object) -> None:
        word = type(event).__name__
        self.settled += word == "CallSettled"
        self.reached[word] += 1
        if word == self.stop["point"] and self.reached[word] == self.stop["at"]:
            self.freeze(word, self.reached[word])

    def freeze(self, point: str, count: int) -> None:
        """Nothing in this process moves any more: here it is killed."""
        say(self.name, "point", point, count)
        while True:
            signal.pause()

    async def live(self) -> None:
        client: AsyncAnthropic | AsyncOpenAI = AsyncAnthropic(base_url=self.job["url"], api_key="k")
        if self.job.get("openai"):
            client = AsyncOpenAI(base_url=f"{self.job['url']}/v1", api_key="k")
        policy = RoutingPolicy(**self.job["policy"])
        fleet = FleetDispatcher(client, store=self.job["store"], policy=policy, hooks=[self.hook], probe=self.probe)
        async with fleet:
            say(self.name, "started")
            await asyncio.gather(*(self.submit(fleet, call) for call in self.job["calls"]))
            await self.wait_for_the_books(fleet)
        await client.close()

    async def submit(self, fleet: FleetDispatcher, call: dict[str, Any]) -> None:
        if call["late"]:
            await self.late.wait()
        message = await fleet.submit(**call["options"], **call["params"])
        self.answered += 1
        text = message.choices[0].message.content if self.job.get("openai") else message.content[0].text
        say(self.name, "answer", json.dumps([call["number"], message.id, text]))

    async def wait_for_the_books(self, fleet: FleetDispatcher) -> None:
        """All is answered; what was bought is followed to its end all the same."""
        say(self.name, "answered")
        assert fleet._engine is not None
        store = fleet._engine._context.store
        while True:
            counts = await store.counts()
            if not any(counts.get(f"batches.{state}", 0) for state in UNFINISHED):
                break
            await asyncio.sleep(0.02)
        assert fleet._engine.failures == 0


def doubt_for(seconds: float) -> None:
    """How long a process whose connection is gone may be alive."""
    known = carpool.stores.postgres.session.statements(True)
    for name in ("missing", "mark_dead_engines"):
        known[name] = known[name].replace("interval '5 seconds'", f"interval '{seconds} seconds'")


def run(line: bytes) -> None:
    """A child's whole life. It never returns."""
    status = 1
    try:
        job = json.loads(line)
        carpool.engine.batch.follow.GRACE_S = job["grace_s"]
        carpool.engine.batch.collect.CHUNK = 400
        if "lease" in job:
            carpool.engine.engine.LEASE = Lease(*job["lease"])
            carpool.engine.batch.buy.CREATE_IDLE_TIMEOUT_S = job["create_silence_s"]
            doubt_for(job["doubt_s"])
        asyncio.run(Life(job).live())
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def reap(jobs: dict[int, str]) -> None:
    while jobs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        say(jobs.pop(pid), "exit", os.waitstatus_to_exitcode(status))


def warm_up() -> None:
    """What would take every child half a second, done once before the first of them."""
    client = AsyncAnthropic(api_key="k")
    _ = client.messages, client.beta.messages
    PriceBook().price(ANTHROPIC, "claude-haiku-4-5", Usage(1, 1), Lane.BATCH, 1_800_000_000.0)
    usage = {"input_tokens": 1, "output_tokens": 1, "cache_creation": {}, "output_tokens_details": {}}
    answer = {"id": "m", "content": [{"type": "text", "text": "warm"}], "usage": usage, "role": "assistant"}
    Message.construct(**answer)
    BetaMessage.construct(**answer)


def main() -> None:
    warm_up()
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in)
    jobs: dict[int, str] = {}
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_out], [], [])
        if wake_out in ready:
            os.read(wake_out, 4096)
            reap(jobs)
        if 0 in ready:
            piece = os.read(0, 1 << 20)
            if not piece:
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                start(line, jobs)


def start(line: bytes, jobs: dict[int, str]) -> None:
    name = json.loads(line)["job"]
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run(line)
    jobs[pid] = name
    say(name, "pid", pid)


if __name__ == "__main__":
    main()
