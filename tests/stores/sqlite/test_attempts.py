"""Attempts on `now` reach the ledger whatever becomes of the process that made them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from carpool.core.errors import StoreUnwritable
from carpool.stores import SqliteStore, sqlite
from tests.support import ROOT
from tests.support.stores import entry

SECRET = b"s" * 20


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s.db")


def files(path: str) -> list[str]:
    return sorted(file.name for file in Path(path).parent.glob("*.attempts-*"))


async def test_an_attempt_of_a_killed_process_stands_as_unknown(path: str) -> None:
    code = f"""
        import asyncio, os, sys
        from tests.support.stores import entry
        from carpool.stores import SqliteStore

        async def main():
            store = await SqliteStore.open({path!r}, secret={SECRET!r})
            await store.record(entry(1, -1, paid=None))
            for ticket in (1, 2, 3):
                await store.attempt(entry(ticket, -1, paid=None))
            os._exit(9)  # before the store's thread can take them

        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)  # noqa: ASYNC221
    assert done.returncode == 9, done.stderr
    assert files(path)
    store = await SqliteStore.open(path, secret=SECRET)
    for ticket in (1, 2, 3):
        assert [(line.purchase, line.paid) for line in await store.entries(ticket)] == [(-1, None)]
    assert [(row.purchases, row.unknown) for row in await store.totals()] == [(3, 3)]
    assert not files(path)
    await store.aclose()


async def test_what_was_completed_before_the_crash_stays_complete(path: str) -> None:
    store = await SqliteStore.open(path, secret=SECRET)
    await store.attempt(entry(1, -1, paid=None))
    await store.record(entry(1, -1, paid=70))
    [file] = files(path)
    lines = (Path(path).parent / file).read_bytes()
    await store.aclose()
    assert not files(path)  # nothing is left of a clean end
    (Path(path).parent / file).write_bytes(lines + b'\n{"ticket": 2, torn')
    store = await SqliteStore.open(path, secret=SECRET)
    assert [line.paid for line in await store.entries(1)] == [70]
    assert [(row.purchases, row.unknown) for row in await store.totals()] == [(1, 0)]
    await store.aclose()


async def test_the_files_take_turns_and_stay_small(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "TURN", 2_000)
    store = await SqliteStore.open(path, secret=SECRET)
    for ticket in range(1, 201):
        await store.attempt(entry(ticket, -1, paid=None))
        if ticket % 10 == 0:
            await store.totals()  # everything before it is written
    assert len(files(path)) == 2
    assert all((Path(path).parent / file).stat().st_size < 10_000 for file in files(path))
    assert [(row.purchases, row.unknown) for row in await store.totals()] == [(200, 200)]
    await store.aclose()


async def test_what_can_not_be_noted_is_not_sent(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await SqliteStore.open(path, secret=SECRET)
    await store.attempt(entry(1, -1, paid=None))
    with monkeypatch.context() as patch:
        patch.setattr(sqlite.os, "write", lambda descriptor, line: len(line) - 1)
        with pytest.raises(StoreUnwritable, match="full"):
            await store.attempt(entry(2, -1, paid=None))
    assert await store.entries(2) == []
    await store.aclose()
