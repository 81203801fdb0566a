"""The session that operations run on: a connection, its named statements, and cached ids of credentials, texts and
pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from carpool.core.errors import StoreError
from carpool.core.model import PoolKey
from carpool.stores.encryption import PLAIN, Sealing
from carpool.stores.operations.codec import Row, headers_text, headers_value, to_json

Parameters = Sequence[Any] | Mapping[str, Any]


class Ran(Protocol):
    """An executed statement: the common part of both drivers' cursors."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Session(ABC):
    """Used by one thread at a time, inside a transaction that the `Driver` begins and ends."""

    def __init__(self, name: str, sql: Mapping[str, str], sealing: Sealing = PLAIN) -> None:
        self.name = name
        self.sql = sql
        self.sealing = sealing
        self.awaiters: set[str] = set()  # every engine that this session ever wrote as awaiter of a call
        self._credentials: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._numbers: dict[PoolKey, int] = {}
        self._pools: dict[int, PoolKey] = {}

    @abstractmethod
    def execute(self, text: str, parameters: Parameters = ()) -> Ran: ...

    @abstractmethod
    def insert(self, statement: str, rows: Sequence[Row], most: int = 8192) -> None:
        """Runs an INSERT with its `{rows}` filled in, with up to `most` rows per statement."""

    @abstractmethod
    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        """Runs an INSERT of one row and returns its id."""

    @abstractmethod
    def departed(self, now: float) -> list[str]:
        """Returns the engines that are stored as awaiters of calls and are not alive."""

    @abstractmethod
    def bury(self) -> None:
        """Marks engines that are provably gone as dead and releases the tickets they await, if the database can tell.
        Engines that may be dead or alive are in doubt until the next call."""

    @abstractmethod
    def doubtful(self, fingerprints: str) -> list[int]:
        """Returns those of the fingerprints that belong to an undelivered call whose awaiter was in doubt at the last
        `bury`."""

    @abstractmethod
    def in_doubt(self, fingerprint: int, credential: int, newcomer: str | None) -> bool:
        """Whether this credential has such a call. `newcomer`, the engine that asks, knows that it is alive itself."""

    @abstractmethod
    def next_outcome(self) -> int: ...

    @abstractmethod
    def alone(self) -> None:
        """Locks succession (leadership, takeover) against other processes until the transaction ends."""

    @abstractmethod
    def hold(self, tickets: str) -> None:
        """Locks these calls against other processes until the transaction ends."""

    def run(self, statement: str, parameters: Parameters = ()) -> Ran:
        return self.execute(self.sql[statement], parameters)

    def change(self, statement: str, parameters: Parameters) -> None:
        """As `run`, for statements without a result."""
        self.run(statement, parameters)

    def row(self, statement: str, parameters: Parameters = ()) -> Row | None:
        first: Row | None = self.run(statement, parameters).fetchone()
        return first

    def rows(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        return self.run(statement, parameters).fetchall()

    # cached ids

    @abstractmethod
    def forget(self) -> None:
        """Resets the cached ids after a rollback: some of them may never have been written."""

    def credential(self, name: str) -> int:
        number = self._credentials.get(name)
        if number is None:
            number = self._credentials[name] = self.new_id("insert_credential", (name,))
        return number

    def word(self, text: str) -> int:
        number = self._words.get(text)
        if number is None:
            number = self._words[text] = self.new_id("insert_word", (self.sealing.text_in(text),))
        return number

    def known_credentials(self, names: Iterable[str]) -> list[int]:
        return [self._credentials[name] for name in dict.fromkeys(names) if name in self._credentials]

    def pool(self, key: PoolKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self.new_id("insert_pool", self._pool_row(key))
            self._pools[number] = key
        return number

    def pool_key(self, number: int) -> PoolKey:
        if number not in self._pools:
            raise StoreError(f"The store {self.name} knows no pool {number}.")
        return self._pools[number]

    def pools_of(self, names: Iterable[str]) -> str:
        """Returns the ids of all pools of these credentials, as JSON."""
        wanted = set(names)
        return to_json([number for number, key in self._pools.items() if key.credential in wanted])

    def _pool_row(self, key: PoolKey) -> Row:
        return (
            self.credential(key.credential),
            key.provider,
            key.dialect,
            key.endpoint,
            self.sealing.text_in(headers_text(key.headers)),
            key.model,
            key.size_class,
            key.deadline_class,
        )

    def _pool_value(self, row: Row) -> PoolKey:
        _, provider, dialect, credential, endpoint, headers, model, size_class, deadline_class = row
        pairs = headers_value(self.sealing.text_out(headers))
        return PoolKey(provider, dialect, credential, endpoint, pairs, model, size_class, deadline_class)
