"""Opening a PostgreSQL store: addresses, versions, secrets, the driver. Every trouble is a sentence."""

from __future__ import annotations

import asyncio
import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from carpool.core.errors import ConfigError, StoreError, StoreTooNew, WrongSecret
from carpool.core.keys import VirtualKey, new_key
from carpool.core.lifecycle import BatchState
from carpool.stores import carries_password, check_url, open_keys, open_store, peek, peek_forecast, postgres, shown
from carpool.stores.operations.session import SQL
from carpool.stores.postgres import PostgresStore, address_of, migrations
from carpool.stores.postgres.session import statements
from tests.support.postgres import schema_url, shared_url
from tests.support.stores import ME, T0, admission, admit_one, board, settlement

SECRET = b"a secret of the test"


@pytest.fixture
def url() -> str:
    return schema_url()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("CARPOOL_SECRET", raising=False)
    return tmp_path


async def test_what_is_written_is_on_disk_whatever_the_server_is_set_to(url: str) -> None:
    hasty, asked = f"{url}&options=-csynchronous_commit%3Doff", "SHOW synchronous_commit"
    store = await open_store(hasty)
    try:
        with psycopg.connect(address_of(hasty).conninfo) as plain:
            assert plain.execute(asked).fetchone() == ("off",)
        assert store._session.connection.execute(asked).fetchone() == ("on",)
    finally:
        await store.aclose()


# ---------------------------------------------------------------- addresses


def test_an_address_shows_no_password() -> None:
    address = address_of("postgresql://me:hidden@db.example:5433/pools?schema=mine&sslmode=require")
    assert (address.name, address.schema) == ("postgresql://db.example/pools?schema=mine", "mine")
    assert "hidden" not in repr(address)
    assert "schema" not in address.conninfo


def test_an_address_is_shown_without_its_password() -> None:
    url = "postgresql://me:hidden@h:1/d?schema=mine&password=hidden&host=/run/db"
    assert shown(url) == "postgresql://me@h:1/d?schema=mine&host=/run/db"
    assert shown("a:b@c.db") == "a:b@c.db"
    assert carries_password(url)
    assert not carries_password(shown(url))


@pytest.mark.parametrize("url", ["postgresql:///pools", "postgresql:///pools?host=/run/db&schema=mine"])
def test_an_address_may_leave_the_host_to_the_driver(url: str) -> None:
    assert address_of(url).conninfo.startswith("postgresql:///pools")
    assert shown(url) == url


@pytest.mark.parametrize(
    "bad",
    [
        "postgresql://h/d?schema=A",
        "postgresql://h/d?schema=x;y",
        "postgresql://h/d?schema=pg_x",
        "postgres://u:hidden@h/d?no_such=x",
    ],
)
def test_an_address_that_is_none(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"\w+ .*[.]$"):
        check_url(bad)


@pytest.mark.parametrize(
    "what", ["postgresql://nobody:hidden@127.0.0.1:9/db", "postgresql://h.invalid/d?password=hidden"]
)
async def test_a_server_that_is_not_there(what: str) -> None:
    with pytest.raises(StoreError, match=r"can't be reached .*[.]$") as caught:
        await open_store(what)
    assert "hidden" not in str(caught.value)


async def test_a_database_that_is_not_there() -> None:
    missing = shared_url().replace("/postgres?", "/no_such_base?")
    with pytest.raises(StoreError, match="does not exist"):
        await open_store(missing)


def test_without_the_driver_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    there = builtins.__import__

    def without(name: str, *more: Any, **named: Any) -> Any:
        if name.partition(".")[0] == "psycopg":
            raise ImportError(name)
        return there(name, *more, **named)

    for name in [one for one in sys.modules if one.startswith("carpool.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("carpool.stores.postgres")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"needs the package psycopg: pip install 'psycopg\[binary\]'"):
        check_url("postgresql://h/d")


def test_whoever_uses_sqlite_loads_no_driver() -> None:
    code = "import sys, carpool, carpool.cli; sys.exit('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- versions


async def test_many_may_open_a_new_store_at_once(url: str) -> None:
    stores = await asyncio.gather(*(PostgresStore.open(url) for _ in range(6)))
    assert len({store.pepper for store in stores}) == 1
    for store in stores:
        await store.aclose()


def _set(url: str, **values: object) -> None:
    base, _, schema = url.rpartition("schema=")
    with psycopg.connect(base.rstrip("?&"), autocommit=True) as connection:
        for name, value in values.items():
            connection.execute(f"UPDATE {schema}.meta SET value = %s WHERE name = %s", (str(value), name))


async def test_a_newer_schema_is_refused_only_when_it_must_be(url: str) -> None:
    newest = max(migrations())
    await (await PostgresStore.open(url)).aclose()
    _set(url, schema_version=newest + 1, schema_oldest=newest)
    store = await PostgresStore.open(url)
    assert (await admit_one(store, admission(1))).fresh
    await store.aclose()
    _set(url, schema_oldest=newest + 1)
    with pytest.raises(StoreTooNew, match="Upgrade carpool"):
        await PostgresStore.open(url)


async def test_an_older_one_is_brought_up_to_date_while_others_work(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await PostgresStore.open(url, secret=SECRET, own_clock=False)
    newest = max(migrations())
    later = migrations() | {newest + 1: f"-- oldest: {newest}\nALTER TABLE calls ADD COLUMN extra text;"}
    monkeypatch.setattr(postgres, "migrations", lambda: later)
    new = await PostgresStore.open(url, secret=SECRET, own_clock=False)
    await old.join(ME, T0, 300)
    await board(old, [1, 2, 3, 4, 5, 6])
    await board(new, [7, 8], nonce="other")
    assert (await old.counts())["tickets.boarded"] == 8
    for store in (old, new):
        await store.aclose()


def test_both_databases_have_the_same_statements() -> None:
    ours, theirs = set(statements(own_clock=True)), set(SQL)
    beginnings = {"all_pools", "credentials", "words", "engines"}  # read once by who is alone
    beginnings |= {name for name in theirs if name.startswith("void_")}
    assert theirs - ours == beginnings
    text = "".join(path.read_text("utf-8") for path in Path(postgres.__file__).parents[1].rglob("*.py"))
    unnamed = [name for name in ours - theirs if f'"{name}"' not in text and not name.endswith("_known")]
    assert unnamed == []


# ---------------------------------------------------------------- secrets


async def test_the_secret_is_kept_for_this_user_and_wanted_elsewhere(
    url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await PostgresStore.open(url)
    second = await PostgresStore.open(url)
    assert first.pepper == second.pepper
    [file] = (home / "carpool").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "another machine"))
    with pytest.raises(WrongSecret, match=r"Set CARPOOL_SECRET to the same value for every process"):
        await PostgresStore.open(url)
    monkeypatch.setenv("CARPOOL_SECRET", "another secret altogether")
    with pytest.raises(WrongSecret, match="another secret"):
        await PostgresStore.open(url)
    monkeypatch.setenv("CARPOOL_SECRET", first.pepper.decode())
    third = await PostgresStore.open(url)
    for store in (first, second, third):
        await store.aclose()


async def test_what_is_encrypted_can_be_read_with_the_secret_only(url: str) -> None:
    store = await PostgresStore.open(url, secret=SECRET, encrypt=True, own_clock=False)
    await store.join(ME, T0, 300)
    batch = await board(store, [1, 2], state=BatchState.OPEN)
    await store.admit_all(
        [admission(n, body=b"very private", reason="private too", key=f"private {n}") for n in (3, 4)]
    )
    await store.settle([settlement(1, batch.id, "private answer")], T0)
    base, _, schema = url.rpartition("schema=")
    with psycopg.connect(base.rstrip("?&")) as connection:
        for table in ("calls", "bodies", "outcomes", "words", "entries"):
            assert "private" not in repr(connection.execute(f"SELECT * FROM {schema}.{table}").fetchall())
    await store.aclose()
    plain = await PostgresStore.open(url, secret=SECRET, own_clock=False)
    sendable_call = await plain.sendable_call(3)
    assert sendable_call is not None
    assert (sendable_call.body, sendable_call.reason) == (b"very private", "private too")
    assert (await plain.outcomes([1]))[0].outcome.body == b"private answer"
    await plain.aclose()


# ---------------------------------------------------------------- looking in


async def test_a_look_from_outside(url: str) -> None:
    with pytest.raises(StoreError, match="There is no store"):
        await peek(url)
    store = await PostgresStore.open(url, own_clock=False)
    await store.join(ME, T0, 300)
    batch = await board(store, [1, 2, 3], state=BatchState.OPEN)
    await store.settle([settlement(1, batch.id)], T0)
    totals, counts = await peek(url)
    assert (totals[0].purchases, totals[0].paid) == (1, 50)
    assert (counts["tickets.settled"], counts["tickets.boarded"], counts["batches.open"]) == (1, 2, 1)
    await store.aclose()


async def test_keys_are_managed_while_a_store_is_open(url: str) -> None:
    with pytest.raises(StoreError, match="There is no store"), open_keys(url):
        pass
    with open_keys(url, make=True) as cabinet:
        key, _ = new_key(cabinet.pepper, "ci", "anthropic", "KEY", T0)
        cabinet.change(lambda standing: [key])
    store = await PostgresStore.open(url)
    found = await store.keys()
    assert found is not None
    version, [standing] = found
    assert (standing.name, standing.digest) == ("ci", key.digest)
    assert await store.keys(version) is None

    def fail(standing: list[VirtualKey]) -> list[VirtualKey]:
        raise ConfigError("no")

    with open_keys(url) as cabinet, pytest.raises(ConfigError):
        cabinet.change(fail)
    assert await store.keys(version) is None
    await store.aclose()


async def test_the_forecast_is_read_beside_the_running_engine(url: str) -> None:
    store = await open_store(url)
    try:
        assert peek_forecast(url) == b""
        await store.save_forecast(0, b"state")
        assert peek_forecast(url) == b"state"
    finally:
        await store.aclose()
