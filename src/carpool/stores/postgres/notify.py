"""LISTEN and NOTIFY: processes that share a store notify each other of settled tickets, new calls and ended batches.

A thread with its own connection sends and receives. Notifications are hints: every waiting process also polls, so a
lost connection loses nothing. After a reconnect, listeners are told that notifications may have been lost.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import psycopg

from carpool.core.backoff import backoff
from carpool.stores.operations.codec import Row, to_json

_PAYLOAD = 7_900  # bytes; the server's limit is just below 8,000
_SETTLED, _POOLS, _BATCHES = "s", "p", "b"
_FORGET_ABOVE = 50_000  # with more unsent tickets than this, send only that some were settled
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class NotifyChannel:
    """Sends and receives notifications. `settled`, `pools` and `batches` are called in its thread with what other
    processes sent."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Row]],
        schema: str,
        sign_in: str,
        settled: Callable[[Sequence[int]], None],
        pools: Callable[[Sequence[str]], None],
        batches: Callable[[Sequence[int]], None],
    ) -> None:
        self._connect = connect
        self._channel = f"carpool_{schema}"[:63]
        self._sign_in = sign_in
        self._on_settled, self._on_pools, self._on_batches = settled, pools, batches
        self._engines: set[str] = set()  # the engines of this process: alive as long as this connection
        self._unsigned = False
        self._lock = threading.Lock()
        self._tickets: list[int] = []
        self._untold = False  # there were too many tickets to list, or sending failed
        self._credentials: set[str] = set()
        self._anything = False
        self._batches: set[int] = set()
        self._woken = False
        self._closing = threading.Event()
        self.hears = threading.Event()  # set while the connection is up and listening
        self.backend = 0  # the pid of its backend process
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._work, name="carpool-hearing", daemon=True)
        self._thread.start()

    # sending, called from any thread

    def stands_for(self, engine: str) -> None:
        """Registers an engine: from now on it counts as alive while this connection is open."""
        with self._lock:
            if engine not in self._engines:
                self._engines.add(engine)
                self._unsigned = True
                self._wake()

    def stands_no_more_for(self, engine: str) -> None:
        with self._lock:
            self._engines.discard(engine)

    def tell_settled(self, tickets: Sequence[int]) -> None:
        with self._lock:
            self._tickets += tickets
            if len(self._tickets) > _FORGET_ABOVE:
                self._tickets, self._untold = [], True
            self._wake()

    def tell_pools(self, credentials: Sequence[str]) -> None:
        with self._lock:
            self._credentials.update(credentials)
            self._anything = self._anything or not credentials
            self._wake()

    def tell_batches(self, batches: Sequence[int]) -> None:
        with self._lock:
            self._batches.update(batches)
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            os.write(self._writing, b"!")

    def close(self) -> None:
        """Sends what is left to send, and ends the thread."""
        self._closing.set()
        with self._lock:
            self._wake()
        self._thread.join()
        os.close(self._reading)
        os.close(self._writing)

    # the thread

    def _work(self) -> None:
        failed, first = 0, True
        while not self._closing.is_set():
            try:
                with contextlib.closing(self._connect()) as connection:
                    connection.execute(f'LISTEN "{self._channel}"')
                    self.backend, self._unsigned, failed = connection.info.backend_pid, True, 0
                    self.hears.set()
                    if not first:
                        self._on_settled(())
                        self._on_pools(())
                    first = False
                    self._attend(connection)
            except psycopg.Error:
                failed += 1
                self._closing.wait(backoff(failed, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            finally:
                self.hears.clear()

    def _attend(self, connection: psycopg.Connection[Row]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._reading, selectors.EVENT_READ)
            while True:
                self._say(connection)
                self._hear(connection)
                if self._closing.is_set():
                    return
                selector.select()

    def _say(self, connection: psycopg.Connection[Row]) -> None:
        with self._lock:
            if self._woken:
                os.read(self._reading, 1)
                self._woken = False
            payloads = [*_packed(_SETTLED, map(str, self._tickets)), *_packed(_POOLS, sorted(self._credentials))]
            payloads += _packed(_BATCHES, map(str, sorted(self._batches)))
            payloads += [_SETTLED] * self._untold + [_POOLS] * self._anything
            unsigned, self._unsigned = self._unsigned, False
            engines = sorted(self._engines)
            self._tickets, self._credentials, self._batches = [], set(), set()
            self._untold = self._anything = False
        try:
            if unsigned and engines:
                connection.execute(self._sign_in, (to_json(engines),))
            if payloads:
                connection.execute("SELECT pg_notify(%s, told) FROM unnest(%s::text[]) told", (self._channel, payloads))
        except psycopg.Error:
            with self._lock:  # after the reconnect, others are told that something has happened
                self._untold = self._anything = True
            raise

    def _hear(self, connection: psycopg.Connection[Row]) -> None:
        payloads = [notify.payload for notify in connection.notifies(timeout=0) if notify.pid != self.backend]
        tickets = [int(ticket) for text in payloads if text[0] == _SETTLED for ticket in text[2:].split()]
        if tickets:
            self._on_settled(tickets)
        if _SETTLED in payloads:
            self._on_settled(())
        if batches := [int(batch) for text in payloads if text[0] == _BATCHES for batch in text[2:].split()]:
            self._on_batches(batches)
        pools = [text[2:].split() for text in payloads if text[0] == _POOLS]
        if pools:
            self._on_pools(() if [] in pools else sorted({name for names in pools for name in names}))


def _packed(kind: str, names: Iterable[str]) -> Iterator[str]:
    """Packs names into as few payloads as possible."""
    payload = kind
    for name in names:
        if len(payload) + 1 + len(name) > _PAYLOAD:
            yield payload
            payload = kind
        payload += " " + name
    if payload != kind:
        yield payload
