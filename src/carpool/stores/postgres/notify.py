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
from typing import Any

import psycopg

from carpool.core.bounded import backoff
from carpool.stores.operations.session import Row, to_json
from carpool.stores.operations.store import BATCHES, POOLS, SETTLED

_PAYLOAD = 7_900  # bytes; the server's limit is just below 8,000
_LETTERS = {SETTLED: "s", POOLS: "p", BATCHES: "b"}  # the first letter of a payload
_FORGET_ABOVE = 50_000  # with more unsent names than this, send only that something has happened
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class NotifyChannel:
    """Sends and receives notifications. `on_notification` is called in its thread with a topic and the names that other
    processes sent."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Row]],
        schema: str,
        sign_in: str,
        on_notification: Callable[[str, Sequence[Any]], None],
    ) -> None:
        self._connect = connect
        self._channel = f"carpool_{schema}"[:63]
        self._sign_in = sign_in
        self._on_notification = on_notification
        self._engines: set[str] = set()  # the engines of this process: alive as long as this connection
        self._unsigned = False
        self._lock = threading.Lock()
        self._unsent: dict[str, dict[str, None]] = {topic: {} for topic in _LETTERS}  # names by topic, in order;
        # an empty name stands for too many names to list, for none, or for a failure to send
        self._woken = False
        self._closing = threading.Event()
        self.listening = threading.Event()  # set while the connection is up and listening
        self.backend = 0  # the pid of its backend process
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._work, name="carpool-hearing", daemon=True)
        self._thread.start()

    # sending, called from any thread

    def register_engine(self, engine: str) -> None:
        """Registers an engine: from now on it counts as alive while this connection is open."""
        with self._lock:
            if engine not in self._engines:
                self._engines.add(engine)
                self._unsigned = True
                self._wake()

    def unregister_engine(self, engine: str) -> None:
        with self._lock:
            self._engines.discard(engine)

    def send(self, topic: str, names: Sequence[object]) -> None:
        with self._lock:
            unsent = self._unsent[topic]
            unsent.update(dict.fromkeys(map(str, names)))
            if not names or len(unsent) > _FORGET_ABOVE:
                unsent.clear()
                unsent[""] = None
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
                    self.listening.set()
                    if not first:
                        self._on_notification(SETTLED, ())
                        self._on_notification(POOLS, ())
                    first = False
                    self._serve(connection)
            except psycopg.Error:
                failed += 1
                self._closing.wait(backoff(failed, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            finally:
                self.listening.clear()

    def _serve(self, connection: psycopg.Connection[Row]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._reading, selectors.EVENT_READ)
            while True:
                self._send_pending(connection)
                self._receive(connection)
                if self._closing.is_set():
                    return
                selector.select()

    def _send_pending(self, connection: psycopg.Connection[Row]) -> None:
        with self._lock:
            if self._woken:
                os.read(self._reading, 1)
                self._woken = False
            payloads = [text for topic, letter in _LETTERS.items() for text in _packed(letter, self._unsent[topic])]
            unsigned, self._unsigned = self._unsigned, False
            engines = sorted(self._engines)
            self._unsent = {topic: {} for topic in _LETTERS}
        try:
            if unsigned and engines:
                connection.execute(self._sign_in, (to_json(engines),))
            if payloads:
                connection.execute(
                    "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) payload", (self._channel, payloads)
                )
        except psycopg.Error:
            with self._lock:  # after the reconnect, others learn that something has happened
                self._unsent[SETTLED][""] = self._unsent[POOLS][""] = None
            raise

    def _receive(self, connection: psycopg.Connection[Row]) -> None:
        payloads = [notify.payload for notify in connection.notifies(timeout=0) if notify.pid != self.backend]
        for topic, letter in _LETTERS.items():
            texts = [text for text in payloads if text[0] == letter]
            names = list(dict.fromkeys(name for text in texts for name in text[2:].split()))
            if names:
                self._on_notification(topic, names if topic == POOLS else [int(name) for name in names])
            if letter in texts:  # something without names
                self._on_notification(topic, ())


def _packed(kind: str, names: Iterable[str]) -> Iterator[str]:
    """Packs names into as few payloads as possible; an empty name is a payload without names."""
    payload = kind
    for name in names:
        if not name:
            yield kind
            continue
        if len(payload) + 1 + len(name) > _PAYLOAD:
            yield payload
            payload = kind
        payload += " " + name
    if payload != kind:
        yield payload
