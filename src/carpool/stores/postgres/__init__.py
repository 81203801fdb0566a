"""The store in a PostgreSQL database, shared by any number of processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Self

import psycopg

from carpool.errors import StoreError
from carpool.model import Totals
from carpool.stores import _calls, _ledger
from carpool.stores._codec import Row
from carpool.stores._sealing import open_sealing
from carpool.stores._store import OperatedStore
from carpool.stores._writer import InlineWriter, ThreadWriter
from carpool.stores.postgres._groups import PATIENCE_S, PostgresGroups
from carpool.stores.postgres._hearing import Hearing
from carpool.stores.postgres._opening import (
    Address,
    PostgresMeta,
    address_of,
    connect,
    connect_first,
    is_there,
    migrate,
    settle_secret,
)
from carpool.stores.postgres._session import PostgresSession
from carpool.stores.postgres._statements import for_driver, statements
from carpool.stores.postgres._trouble import translate

__all__ = ["PostgresStore", "address_of", "look", "open_alone"]


class PostgresStore(OperatedStore):
    """Several engines of several processes may share it.

    One connection writes and reads, in one thread, what waits together in one transaction; another tells and hears.
    """

    def __init__(
        self, session: PostgresSession, secret: bytes, address: Address, threaded: bool, patience: float
    ) -> None:
        self._session = session
        self._groups = PostgresGroups(session, partial(connect, address), patience)
        super().__init__(ThreadWriter(self._groups) if threaded else InlineWriter(self._groups), secret)
        self._released = False
        self._hearing: Hearing | None = None
        if threaded:
            told = super()._tell_of_settled, super()._tell_of_pools, super()._tell_of_batches
            sign_in = for_driver(session.sql["sign_in"])
            self._hearing = Hearing(partial(connect, address), address.schema, sign_in, *told)

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
        """Opens or makes the store. `threaded` False works in the caller's thread. `own_clock` False takes leases by
        the time that callers say, not by the database's clock. `patience`: seconds for which a server may be away."""
        address = address_of(url)
        asked = partial(_open, address, secret, encrypt, own_clock)
        opened = await _aside(asked) if threaded else asked()
        return cls(*opened, address, threaded, patience)

    @property
    def durable(self) -> bool:
        return True

    @property
    def commits(self) -> int:
        """How many transactions were committed."""
        return self._groups.commits

    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        alive = await super().join(engine, now, ttl, pulse)
        if self._hearing is not None:
            self._hearing.stands_for(engine)
        return alive

    async def leave(self, engine: str) -> None:
        if self._hearing is not None:
            self._hearing.stands_no_more_for(engine)
        await super().leave(engine)

    def _tell_of_settled(self, tickets: Sequence[int]) -> None:
        super()._tell_of_settled(tickets)
        if self._hearing is not None:
            self._hearing.tell_settled(tickets)

    def _tell_of_pools(self, credentials: Sequence[str]) -> None:
        super()._tell_of_pools(credentials)
        if self._hearing is not None:
            self._hearing.tell_pools(credentials)

    def _tell_of_batches(self, batches: Sequence[int]) -> None:
        super()._tell_of_batches(batches)
        if self._hearing is not None:
            self._hearing.tell_batches(batches)

    async def aclose(self) -> None:
        """Finishes what was accepted, then lets go of the connections. May be called twice."""
        await self._writer.aclose()
        if not self._released:
            self._released = True
            if self._hearing is not None:
                await asyncio.get_running_loop().run_in_executor(None, self._hearing.close)
            self._session.connection.close()


Opened = tuple[PostgresSession, bytes]
Transaction = Callable[[], AbstractContextManager[object]]


async def _aside(asked: partial[Opened]) -> Opened:
    """Opens in another thread. A caller that is cancelled meanwhile leaves no connection behind."""
    opening = asyncio.get_running_loop().run_in_executor(None, asked)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_discard)
        raise


def _discard(opening: asyncio.Future[Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].connection.close()


def _open(address: Address, secret: bytes | None, encrypt: bool, own_clock: bool) -> Opened:
    connection = connect_first(address)
    try:
        migrate(connection, address)
        meta = PostgresMeta(connection)
        secret = settle_secret(meta, secret, address, os.environ)
        sealing = open_sealing(meta, secret, address.name, encrypt=encrypt)
    except psycopg.Error as error:
        connection.close()
        raise translate(error, address.name) from None
    except BaseException:
        connection.close()
        raise
    return PostgresSession(connection, address.name, statements(own_clock), sealing), secret


@contextmanager
def open_alone(url: str, *, make: bool) -> Iterator[tuple[PostgresSession, bytes, Transaction]]:
    """A session for whoever manages keys, its secret, and a transaction in which nobody else changes them."""
    address = address_of(url)
    if not make:
        with closing(connect_first(address)) as connection:
            _check_there(connection, address)
    session, secret = _open(address, None, encrypt=False, own_clock=True)
    with closing(session.connection) as connection:
        try:
            yield session, secret, partial(_keys_alone, connection)
        except psycopg.Error as error:
            raise translate(error, address.name) from None


@contextmanager
def _keys_alone(connection: psycopg.Connection[Row]) -> Iterator[None]:
    with connection.transaction():
        connection.execute("LOCK TABLE virtual_keys IN SHARE ROW EXCLUSIVE MODE")
        yield


def _check_there(connection: psycopg.Connection[Row], address: Address) -> None:
    if not is_there(connection, address.schema):
        raise StoreError(f"There is no store at {address.name}. Name the one that carpool keeps its calls in.")


def look(url: str) -> tuple[list[Totals], Mapping[str, int]]:
    """The ledger's sums and the counts by state, as of one moment; changes nothing."""
    address = address_of(url)
    with closing(connect_first(address)) as connection:
        try:
            _check_there(connection, address)
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            session = PostgresSession(connection, address.name, statements(own_clock=True))
            return _ledger.totals(session), _calls.counts(session)
        except psycopg.Error as error:
            raise translate(error, address.name) from None
