"""How the SQLite store works inside: group commit, plans of its queries, the inline mode, unmapped errors."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.core.errors import StoreError
from carpool.core.lifecycle import BATCH_MOVES, TICKET_MOVES, UNFINISHED, BatchState, TicketState
from carpool.core.model import Intent, Settlement
from carpool.stores import SqliteStore
from carpool.stores.operations.session import SQL
from tests.support import ROOT
from tests.support.stores import CRED, ME, T0, admission, admit, admit_one, board, entry, outcome, settlement


def multiply(store: SqliteStore, count: int) -> None:
    """Copies call 1 until there are so many: quicker than admitting them."""
    connection = store._session.connection
    columns = [row[1] for row in connection.execute("PRAGMA table_info(calls)") if row[1] != "id"]
    connection.execute(
        f"""WITH RECURSIVE numbers (n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM numbers WHERE n < {count})
        INSERT INTO calls (id, {", ".join(columns)}) SELECT n, {", ".join(columns)} FROM numbers, calls WHERE id = 1"""
    )


# ---------------------------------------------------------------- group commit


async def test_many_operations_share_few_commits(tmp_path: Path) -> None:
    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    before = store.writer._groups.commits
    await asyncio.gather(*(admit_one(store, admission(ticket)) for ticket in range(1, 5001)))
    assert store.writer._groups.commits - before < 50
    before = store.writer._groups.commits
    await asyncio.gather(*(store.settle([Settlement(ticket, outcome())], T0) for ticket in range(1, 1001)))
    assert store.writer._groups.commits - before < 20
    await store.aclose()


async def test_a_collection_is_copied_before_the_writer_thread_reads_it(tmp_path: Path) -> None:
    readers: list[threading.Thread] = []

    def names() -> Iterator[str]:
        readers.append(threading.current_thread())
        yield CRED

    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    await admit(store, 1)
    assert len(await store.pools(names())) == 1
    assert len(await store.due(names(), until=T0 + 1e9, limit=1)) == 1
    assert readers == [threading.current_thread()] * 2
    await store.aclose()


async def test_a_failure_in_a_group_is_its_callers_alone(tmp_path: Path) -> None:
    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    await admit(store, 1)
    batch = await board(store, [2])
    racing: list[Coroutine[Any, Any, Any]] = []
    for number in range(10, 40):
        racing += [
            admit_one(store, admission(number)),
            admit_one(store, admission(1, credential=f"new-{number}")),  # a number that is taken
            store.move(batch.id, BatchState.COLLECTED),  # a move that is forbidden
            store.remember("kind", str(number), "x", T0),
            store.attempts(2**70),  # a number that fits nowhere
            store.remember("kind", "\ud800", "x", T0),  # no text at all
        ]
    results = await asyncio.gather(*racing, return_exceptions=True)
    failed = [isinstance(one, StoreError) for one in results]
    assert failed == [False, True, True, False, True, True] * 30
    assert len(await store.recall("kind")) == 30
    assert len(await store.views(range(10, 40))) == 30
    await store.aclose()


async def test_a_number_that_was_rolled_back_is_not_remembered(tmp_path: Path) -> None:
    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    await admit(store, 1)
    with pytest.raises(StoreError):
        await admit_one(store, admission(1, credential="new", model="new"))
    await admit_one(store, admission(2, credential="new", model="new"))
    [view] = await store.pools(["new"])
    assert view.key.model == "new"
    await store.aclose()


async def test_no_error_of_the_driver_escapes(tmp_path: Path) -> None:
    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    store._session.connection.execute("DROP TABLE memos")
    with pytest.raises(StoreError, match="no such table") as caught:
        await store.recall("kind")
    assert isinstance(caught.value.__cause__, sqlite3.Error)
    await store.aclose()


async def test_a_file_waits_for_the_disk(tmp_path: Path) -> None:
    """The contract suite does not, to be quick; so here it is said that a store in earnest does."""
    store = await SqliteStore.open(str(tmp_path / "carpool.db"))
    asked = [store._session.connection.execute(f"PRAGMA {name}").fetchone() for name in ("synchronous", "journal_mode")]
    assert asked == [(2,), ("wal",)]  # 2 is FULL
    await store.aclose()


async def test_a_listener_on_another_loop_hears_on_its_own() -> None:
    store = await SqliteStore.open(None)
    await admit(store, 1, 2)
    heard: list[tuple[list[int], int]] = []
    subscribed = threading.Event()

    async def elsewhere() -> None:
        told = asyncio.Event()

        def listen(tickets: Sequence[int]) -> None:
            heard.append((list(tickets), threading.get_ident()))
            told.set()

        store.subscribe(listen)  # and it goes away without ending that
        subscribed.set()
        await asyncio.wait_for(told.wait(), 10)

    thread = threading.Thread(target=asyncio.run, args=(elsewhere(),))
    thread.start()
    await asyncio.to_thread(subscribed.wait, 10)
    await store.settle([Settlement(1, outcome())], T0)
    await asyncio.to_thread(thread.join)
    assert heard == [([1], thread.ident)]
    assert await store.settle([Settlement(2, outcome())], T0) == [True]  # that loop is closed by now
    await store.aclose()


async def test_the_thread_ends_with_the_store() -> None:
    store = await SqliteStore.open(None)
    assert any(thread.name == "carpool-store" for thread in threading.enumerate())
    await store.aclose()
    assert not any(thread.name == "carpool-store" for thread in threading.enumerate())


async def test_the_event_loop_runs_while_the_store_works() -> None:
    store = await SqliteStore.open(None)
    await admit(store, 1)
    multiply(store, 20_000)
    [view] = await store.pools([CRED])
    assert view.count == 20_000
    intending = asyncio.ensure_future(store.intend(Intent(view.pool, "n", 100_000, 10**12, ME, T0)))
    turns = 0
    while not intending.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10
    await store.aclose()


# ---------------------------------------------------------------- inline


def driven(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never really waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waited")


def test_the_inline_store_needs_no_event_loop_and_no_thread() -> None:
    before = threading.active_count()
    store = driven(SqliteStore.open(None, threaded=False))
    assert driven(admit_one(store, admission(1))).fresh
    [view] = driven(store.pools([CRED]))
    batch = driven(store.intend(Intent(view.pool, "n", 10, 10**9, ME, T0)))

    async def lines() -> list[Any]:
        return [chunk async for chunk in store.lines(batch.id)]

    assert driven(lines()) == [[(1, b"body 1")]]
    assert driven(store.settle([settlement(1, batch.id)], T0)) == [True]
    assert threading.active_count() == before
    driven(store.aclose())


# ---------------------------------------------------------------- plans


@pytest.fixture
async def connection() -> AsyncIterator[sqlite3.Connection]:
    store = await SqliteStore.open(None, threaded=False)
    yield store._session.connection
    await store.aclose()


def prepared(name: str) -> str:
    columns = SQL[name].partition("(")[2].partition(")")[0].count(",") + 1
    row = f"({', '.join('?' * columns)})"
    text = SQL[name].replace("{rows}", row).replace("{changes}", "note = ?").replace("{sources}", "'open'")
    return text.replace("{found}", SQL["newest_calls"])


def plan(connection: sqlite3.Connection, name: str) -> list[str]:
    text = prepared(name)
    named = re.findall(r":(\w+)", text)
    values: Any = dict.fromkeys(named, 1) if named else [1] * text.count("?")
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {text}", values)]


SMALL = {"credentials", "all_pools", "totals", "void_engines", "batch_counts", "batches_bought", "call_counts"} | {
    "timed_batches"  # a report reads a whole period
}
PARTIAL = "calls_queued|calls_boarded|calls_sending|calls_unclaimed|batches_unfinished|batches_state"
LARGE = r"SCAN (calls|c|bodies|b|batches|outcomes|o|entries|e|suspects|s)\b"


@pytest.mark.parametrize("name", sorted(set(SQL) - SMALL))
def test_no_query_scans_a_table_that_grows(connection: sqlite3.Connection, name: str) -> None:
    for step in plan(connection, name):
        partial = re.search(rf"USING (COVERING )?INDEX ({PARTIAL})", step)
        assert partial or not re.match(LARGE, step), f"{name}: {step}"


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("pools", "calls_queued"),
        ("anything_waiting", "calls_queued"),
        ("claim", "calls_queued"),
        ("call_counts", "calls_boarded"),
        ("due", "calls_due"),
        ("next_due", "calls_due"),
        ("open_calls", "calls_boarded"),
        ("unmentioned", "calls_batch"),
        ("release_boarded", "calls_boarded"),
        ("line_sizes", "calls_batch"),
        ("adoptable", "calls_adoptable"),
        ("known_fingerprints", "calls_adoptable"),
        ("lately_delivered", "calls_delivered"),
        ("call_by_key", "calls_key"),
        ("batches", "batches_unfinished"),
        ("take_batches", "batches_unfinished"),
        ("known_provider_ids", "batches_bought"),
        ("forget_awaiters", "calls_unclaimed"),
        ("return_orphans", "calls_sending"),
        ("removable_done", "calls_done"),
        ("removable_unclaimed", "calls_unclaimed"),
    ],
)
def test_the_engines_questions_have_their_index(connection: sqlite3.Connection, name: str, index: str) -> None:
    assert any(re.search(rf"INDEX {index}\b", step) for step in plan(connection, name)), plan(connection, name)


@pytest.mark.parametrize("name", ["anything_waiting", "batches", "next_due", "adoptable", "unmentioned"])
def test_what_must_be_in_order_is_read_in_order(connection: sqlite3.Connection, name: str) -> None:
    assert not any("TEMP B-TREE" in step for step in plan(connection, name)), plan(connection, name)


async def walk(store: SqliteStore, count: int, every: int) -> tuple[list[int], int, int]:
    """Walks a batch of so many calls, of which every n-th has its line; what was found, and how much was done."""
    batch = await board(store, [1], state=BatchState.ENDED)
    multiply(store, count)
    for chunk in range(0, count, 2000):
        mentioned = [ticket for ticket in range(chunk + 1, min(chunk + 2000, count) + 1) if ticket % every == 0]
        await store.settle([Settlement(ticket, entry=entry(ticket, batch.id)) for ticket in mentioned], T0)
    steps, statements, found, after = 0, 0, [], 0

    def step() -> None:
        nonlocal steps
        steps += 1

    connection = store._session.connection
    connection.set_progress_handler(step, 1)
    while tickets := await store.unmentioned(batch.id, after, 500):
        found += tickets
        after = tickets[-1]
        statements += 1
    connection.set_progress_handler(None, 1)
    assert found == [ticket for ticket in range(1, count + 1) if ticket % every]
    return found, steps, statements


@pytest.mark.parametrize("every", [3, 1_000_000])
async def test_walking_a_batch_costs_as_much_as_it_has_calls(every: int) -> None:
    steps = {}
    for count in (5_000, 20_000):
        store = await SqliteStore.open(None, threaded=False)
        found, steps[count], statements = await walk(store, count, every)
        assert statements == -(-len(found) // 500)
        await store.aclose()
    assert steps[20_000] < 4.2 * steps[5_000]  # four times the calls, four times the work of the virtual machine
    assert steps[20_000] < 40 * 20_000


async def test_a_batch_whose_every_call_has_its_line_is_walked_once() -> None:
    store = await SqliteStore.open(None, threaded=False)
    found, steps, _ = await walk(store, 20_000, 1)
    assert found == []
    assert steps < 40 * 20_000
    await store.aclose()


def test_the_unmentioned_are_sought_from_the_cursor_on(connection: sqlite3.Connection) -> None:
    steps = plan(connection, "unmentioned")
    assert any(
        re.search(r"SEARCH calls USING (COVERING )?INDEX calls_batch \(batch=\? AND rowid>\?\)", s) for s in steps
    )
    entry = r"SEARCH e USING COVERING INDEX entries_identity \(ticket=\? AND purchase=\?\)"
    assert any(re.search(entry, step) for step in steps), steps
    assert not any(re.match(r"SCAN (calls|e)\b", s) for s in steps), steps


# ---------------------------------------------------------------- states


def test_the_schemas_words_are_the_lifecycles() -> None:
    finished = {state for state in BatchState if state not in UNFINISHED}
    text = ROOT.joinpath("src/carpool/stores/sql/0001_initial.sql").read_text()
    [listed] = re.findall(r"WHERE state NOT IN \((.*?)\);", text)
    assert {word.strip(" '") for word in listed.split(",")} == finished
    assert TICKET_MOVES[TicketState.SETTLED] == frozenset()
    assert all(BATCH_MOVES[state] == frozenset() for state in finished)


def test_every_statement_is_used() -> None:
    package = ROOT / "src/carpool/stores"
    text = "\n".join(file.read_text() for file in package.rglob("*.py"))
    assert [name for name in SQL if f'"{name}"' not in text] == []
