"""LISTEN and NOTIFY: processes that share a store tell each other what was settled, what came in, and what has ended.

A thread with a connection of its own says and hears. All of it is hints: whoever waits looks for itself now and then,
so nothing is lost when a connection is, and after that everybody is told that some may have gone untold.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import psycopg

from carpool.stores._codec import Row, to_json

_PAYLOAD = 7_900  # bytes; the server takes less than 8,000
_SETTLED, _POOLS, _BATCHES = "s", "p", "b"
_FORGET_ABOVE = 50_000  # tickets that could not be told: then they are not named one by one
_PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Hearing:
    """`settled`, `pools` and `batches` are called in the hearing's thread, with what other processes told."""

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
        self._engines: set[str] = set()  # of this process: alive as long as this connection is
        self._unsigned = False
        self._lock = threading.Lock()
        self._tickets: list[int] = []
        self._untold = False  # there were too many tickets to name
        self._credentials: set[str] = set()
        self._anything = False
        self._batches: set[int] = set()
        self._woken = False
        self._closing = threading.Event()
        self.hears = threading.Event()  # there is a connection, and it listens
        self.backend = 0  # the server's process behind it
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._work, name="carpool-hearing", daemon=True)
        self._thread.start()

    # what this process tells, from any thread

    def stands_for(self, engine: str) -> None:
        """From now on this connection says that the engine lives."""
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
        """Says what is left to say, and ends."""
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
                self._closing.wait(_PAUSES[min(failed, len(_PAUSES) - 1)])
                failed += 1
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
            with self._lock:  # others are told that something happened, once there is a connection again
                self._untold = self._anything = True
            raise

    def _hear(self, connection: psycopg.Connection[Row]) -> None:
        told = [one.payload for one in connection.notifies(timeout=0) if one.pid != self.backend]
        tickets = [int(ticket) for one in told if one[0] == _SETTLED for ticket in one[2:].split()]
        if tickets:
            self._on_settled(tickets)
        if _SETTLED in told:
            self._on_settled(())
        if batches := [int(batch) for one in told if one[0] == _BATCHES for batch in one[2:].split()]:
            self._on_batches(batches)
        pools = [one[2:].split() for one in told if one[0] == _POOLS]
        if pools:
            self._on_pools(() if [] in pools else sorted({name for names in pools for name in names}))


def _packed(kind: str, words: Iterable[str]) -> Iterator[str]:
    """Words one after the other, in as few payloads as take them."""
    payload = kind
    for word in words:
        if len(payload) + 1 + len(word) > _PAYLOAD:
            yield payload
            payload = kind
        payload += " " + word
    if payload != kind:
        yield payload
