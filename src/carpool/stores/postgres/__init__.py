"""The store in a PostgreSQL database, shared by any number of processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Self

import psycopg

from carpool.core.errors import StoreError
from carpool.core.keys import VirtualKey
from carpool.core.model import Totals
from carpool.stores.encryption import check_sealing, unseal
from carpool.stores.operations import calls, ledger
from carpool.stores.operations.session import Row, Transaction, no_store
from carpool.stores.operations.store import OperatedStore, open_in_thread
from carpool.stores.postgres.groups import PATIENCE_S, PostgresGroups
from carpool.stores.postgres.notify import NotifyChannel
from carpool.stores.postgres.opening import (
    Address,
    address_of,
    connect,
    connect_first,
    find_secret,
    is_there,
    migrate,
    settle_secret,
    standing,
)
from carpool.stores.postgres.session import PostgresSession, for_driver, translate
from carpool.stores.secret import secret_in

__all__ = ["PostgresStore", "address_of", "exists", "inspect", "look", "open_alone"]


class PostgresStore(OperatedStore):
    """A store that several engines in several processes may share.

    One connection, in one thread, runs the queued operations in groups; another one sends and receives notifications.
    """

    durable = True

    def __init__(self, opened: Opened, address: Address, threaded: bool, patience: float) -> None:
        self._session, secret = opened
        groups = PostgresGroups(self._session, partial(connect, address), patience)
        super().__init__(groups, secret, threaded=threaded)
        self._released = False
        self._hearing: NotifyChannel | None = None
        if threaded:
            sign_in = for_driver(self._session.sql["sign_in"])
            self._hearing = NotifyChannel(partial(connect, address), address.schema, sign_in, super().notify)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        threaded: bool = True,
        own_clock: bool = True,
        secret: bytes | None = None,
        encrypt: bool = False,
        patience: float = PATIENCE_S,
    ) -> Self:
        """Opens or creates the store. `threaded` False runs in the caller's thread. `own_clock` False uses the callers'
        time for leases instead of the database's clock. `patience`: how many seconds to wait for a server that can't be
        reached."""
        address = address_of(url)
        opening = partial(_open, address, secret, encrypt, own_clock)
        opened = await open_in_thread(opening, _close) if threaded else opening()
        return cls(opened, address, threaded, patience)

    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        alive = await super().join(engine, now, ttl, pulse)
        if self._hearing is not None:
            self._hearing.stands_for(engine)
        return alive

    async def leave(self, engine: str) -> None:
        if self._hearing is not None:
            self._hearing.stands_no_more_for(engine)
        await super().leave(engine)

    def notify(self, topic: str, names: Sequence[Any]) -> None:
        super().notify(topic, names)
        if self._hearing is not None:
            self._hearing.tell(topic, names)

    async def aclose(self) -> None:
        """Finishes all queued writes, then closes the connections. May be called twice."""
        await self.writer.aclose()
        if not self._released:
            self._released = True
            if self._hearing is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._hearing.close)
            self._session.connection.close()


Opened = tuple[PostgresSession, bytes]


def _close(opened: Opened) -> None:
    opened[0].connection.close()


def _open(address: Address, secret: bytes | None, encrypt: bool, own_clock: bool) -> Opened:
    connection = connect_first(address)
    try:
        migrate(connection, address)
        session = PostgresSession(connection, address.name, own_clock=own_clock)
        secret = settle_secret(session, secret, address, os.environ)
        unseal(session, secret, encrypt=encrypt)
    except psycopg.Error as error:
        connection.close()
        raise translate(error, address.name) from None
    except BaseException:
        connection.close()
        raise
    return session, secret


@contextmanager
def open_alone(url: str, *, make: bool) -> Iterator[tuple[PostgresSession, bytes, Transaction]]:
    """Opens a session for managing keys, with its secret and a transaction that locks the keys."""
    address = address_of(url)
    if not make:
        with closing(connect_first(address)) as connection:
            _check_there(connection, address)
    session, secret = _open(address, None, encrypt=False, own_clock=True)
    with closing(session.connection) as connection:
        try:
            yield session, secret, partial(_lock_keys, connection)
        except psycopg.Error as error:
            raise translate(error, address.name) from None


@contextmanager
def _lock_keys(connection: psycopg.Connection[Row]) -> Iterator[None]:
    with connection.transaction():
        connection.execute("LOCK TABLE virtual_keys IN SHARE ROW EXCLUSIVE MODE")
        yield


def _check_there(connection: psycopg.Connection[Row], address: Address) -> None:
    if not is_there(connection, address.schema):
        raise StoreError(no_store(address.name))


def exists(url: str) -> bool:
    address = address_of(url)
    with closing(connect_first(address)) as connection:
        return is_there(connection, address.schema)


def inspect(url: str, *, encrypt: bool) -> list[VirtualKey]:
    """Raises what opening the store would raise, and creates nothing. Returns its keys."""
    address = address_of(url)
    with closing(connect_first(address)) as connection:
        try:
            if standing(connection, address) == 0:
                secret_in(os.environ)
                check_sealing(None, encrypt=encrypt)
                return []
            session = PostgresSession(connection, address.name)
            find_secret(session, None, address, os.environ)
            check_sealing(session, encrypt=encrypt)
            return calls.all_keys(session)
        except psycopg.Error as error:
            raise translate(error, address.name) from None


def look(url: str) -> tuple[list[Totals], Mapping[str, int]]:
    """Returns the totals of the ledger and the counts by state, from one snapshot; changes nothing."""
    address = address_of(url)
    with closing(connect_first(address)) as connection:
        try:
            _check_there(connection, address)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            session = PostgresSession(connection, address.name)
            return ledger.totals(session), calls.counts(session)
        except psycopg.Error as error:
            raise translate(error, address.name) from None
