"""What every contestant does: the same calls, submitted together, all answers collected. Only the standard library,
because this file runs in the contestants' own environments too."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODEL = "claude-haiku-4-5"
WORDS = "the quick brown fox counts calls while a lazy dog waits for the answers of the whole fleet " * 10

Ask = Callable[[dict[str, Any]], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Job:
    contestant: str
    calls: int
    url: str
    linger_s: float
    poll_s: float
    one_batch: bool
    loop: str = "asyncio"
    profile: str = ""

    @classmethod
    def read(cls) -> Job:
        return cls(**json.loads(sys.argv[1]))

    def text(self) -> str:
        return json.dumps(asdict(self))


def params(number: int) -> dict[str, Any]:
    """The parameters of one call. Every call differs, so that no answer can stand in for another."""
    content = f"Call {number}: {WORDS}"
    return {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": content}]}


def body_bytes(number: int) -> int:
    return len(json.dumps(params(number), separators=(",", ":")))


def rss() -> int:
    """Bytes of memory of this process that are in use right now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Marks:
    """When things happened, and how large the process was then."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.started = time.perf_counter()
        self.before = rss()
        self.waiting: int | None = None
        self.waiting_s: float | None = None
        self.cpu = time.process_time()

    def all_waiting(self) -> None:
        if self.waiting is None:
            self.waiting = rss()
            self.waiting_s = time.perf_counter() - self.started

    async def watch(self, waiting: Callable[[], int]) -> None:
        """Looks until everything waits at the same time."""
        while waiting() < self.calls:  # noqa: ASYNC110  the contestants have no event for it
            await asyncio.sleep(0.01)
        self.all_waiting()


async def run(calls: int, ask: Ask, marks: Marks) -> dict[str, Any]:
    """All calls at once; the clock stops when the last answer is in the hands of its caller."""

    async def one(number: int) -> str:
        return await ask(params(number))

    answers = await asyncio.gather(*(one(number) for number in range(calls)))
    seconds = time.perf_counter() - marks.started
    check(answers, calls)
    return report(marks, seconds)


def check(answers: Sequence[str], calls: int) -> None:
    if len(answers) != calls or not all(answers) or len(set(answers)) != calls:
        raise SystemExit(f"{len(set(answers))} different answers to {calls} different calls")


def report(marks: Marks, seconds: float) -> dict[str, Any]:
    body = body_bytes(marks.calls // 2)
    beyond = None if marks.waiting is None else round((marks.waiting - marks.before) / marks.calls - body)
    return {
        "calls": marks.calls,
        "seconds": round(seconds, 3),
        "calls_per_s": round(marks.calls / seconds, 1),
        "all_waiting_s": None if marks.waiting_s is None else round(marks.waiting_s, 3),
        "cpu_s": round(time.process_time() - marks.cpu, 3),
        "body_bytes": body,
        "rss_before": marks.before,
        "rss_waiting": marks.waiting,
        "rss_peak": peak(),
        "bytes_per_waiting_call": beyond,
    }


def tell(result: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
