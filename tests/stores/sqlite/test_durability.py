"""`kill -9` at any moment: what was acknowledged is there, and the file is whole."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.stores import SqliteStore
from tests.support import ROOT
from tests.support.stores import CRED, T0

CHILD = """
import asyncio, sys
from tests.support.stores import *

async def calls(store, start):
    for ticket in range(start, start + 1_000_000):
        await admit_one(store, admission(ticket, body=b"x" * 2000))
        print("call", ticket, flush=True)

async def batches(store):
    number = 0
    while True:
        number += 1
        views = await store.pools([CRED])
        for view in views:
            batch = await store.intend(Intent(view.pool, f"n{number}", 5, 10**9, ME, T0))
            if batch is not None:
                tickets = await store.unmentioned(batch.id, 0, 10)
                print("batch", batch.id, *tickets, flush=True)
                ticket = tickets[0]
                await store.settle([settlement(ticket, batch.id)], T0)
                print("settled", ticket, flush=True)

async def main():
    store = await SqliteStore.open(sys.argv[1])
    print("ready", flush=True)
    await asyncio.gather(batches(store), *(calls(store, n * 10_000_000) for n in range(1, 9)))

asyncio.run(main())
"""


def killed_while_working(path: str, seconds: float) -> list[list[str]]:
    """Everything that the child said was done before it was killed."""
    command = [sys.executable, "-c", CHILD, path]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(seconds)
        child.kill()
        said = child.stdout.read()
    return [line.split() for line in said[: said.rfind("\n")].splitlines()]


@pytest.mark.parametrize("round_", range(2))
async def test_what_was_acknowledged_survives(tmp_path: Path, round_: int) -> None:
    path = str(tmp_path / "carpool.db")
    said = killed_while_working(path, random.uniform(0.3, 0.6))
    assert len(said) > 20
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    kept = {row[0]: row[1:] for row in connection.execute("SELECT id, state, batch FROM calls")}
    batches = {row[0] for row in connection.execute("SELECT id FROM batches")}
    connection.close()
    for what, *numbers in said:
        first, *rest = map(int, numbers)
        if what == "batch":
            assert first in batches
            assert {kept[ticket][1] for ticket in rest} == {first}
        else:
            assert first in kept
            assert what == "call" or kept[first][0] == "settled"
    store = await SqliteStore.open(path)
    assert await store.take_over("next", [CRED], T0) == len(batches)
    settled = [int(number) for what, number, *_ in said if what == "settled"]
    assert all([await store.outcome(ticket, CRED) for ticket in settled])
    totals = await store.totals()
    assert sum(one.purchases for one in totals) >= len(settled)
    await store.aclose()
