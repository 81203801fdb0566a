"""What every benchmark needs around its measuring: the machine's facts, the mock, a word, and a result on disk."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
    }


@contextmanager
def mock() -> Iterator[str]:
    """The mock of the pool's benchmark, in a process of its own; its address."""
    command = [sys.executable, str(HERE / "pool" / "mock.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def keep(name: str, result: dict[str, Any]) -> None:
    """Into a file of its own, never over an earlier one."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    say(f"Written: bench/results/{path.name}")
