"""What operations work on: a connection, its statements by name, and the numbers of credentials, words and pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from carpool.errors import StoreError
from carpool.model import PoolKey
from carpool.stores._codec import Row, headers_text, headers_value, to_json
from carpool.stores._sealing import PLAIN, Sealing

Parameters = Sequence[Any] | Mapping[str, Any]


class Ran(Protocol):
    """A statement that was run: what both drivers' cursors have in common."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Session(ABC):
    """Used by one thread at a time, inside a transaction that its driver begins and ends."""

    def __init__(self, name: str, sql: Mapping[str, str], sealing: Sealing = PLAIN) -> None:
        self.name = name
        self.sql = sql
        self.sealing = sealing
        self.awaiters: set[str] = set()  # every engine that a call was ever said to be awaited by, in this session
        self._credentials: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._numbers: dict[PoolKey, int] = {}
        self._pools: dict[int, PoolKey] = {}

    @abstractmethod
    def execute(self, text: str, parameters: Parameters = ()) -> Ran: ...

    @abstractmethod
    def insert(self, statement: str, rows: Sequence[Row], most: int = 8192) -> None:
        """Runs an INSERT with its `{rows}` filled in, many rows at a time, at most so many."""

    @abstractmethod
    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        """Runs an INSERT of one row; says which number it was given."""

    @abstractmethod
    def departed(self, now: float) -> list[str]:
        """Engines that calls are said to be awaited by, and that are not alive."""

    @abstractmethod
    def bury(self) -> None:
        """Engines that are provably gone, where that can be told, count as dead from now on, and await nothing; those
        that may be are in doubt."""

    @abstractmethod
    def doubtful(self, fingerprints: str) -> list[int]:
        """Those of these fingerprints that an undelivered call has whose awaiter was in doubt at the last `bury`."""

    @abstractmethod
    def in_doubt(self, fingerprint: int, credential: int, newcomer: str | None) -> bool:
        """Whether there is such a call of this credential. Who brings it knows of itself that it lives."""

    @abstractmethod
    def next_outcome(self) -> int: ...

    @abstractmethod
    def alone(self) -> None:
        """Keeps others from deciding who follows whom until the transaction ends, where there are others."""

    @abstractmethod
    def hold(self, tickets: str) -> None:
        """Keeps others away from these calls until the transaction ends, where there are others."""

    def run(self, statement: str, parameters: Parameters = ()) -> Ran:
        return self.execute(self.sql[statement], parameters)

    def change(self, statement: str, parameters: Parameters) -> None:
        """As `run`, where nothing is to be read."""
        self.run(statement, parameters)

    def row(self, statement: str, parameters: Parameters = ()) -> Row | None:
        found: Row | None = self.run(statement, parameters).fetchone()
        return found

    def rows(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        return self.run(statement, parameters).fetchall()

    # numbers

    @abstractmethod
    def forget(self) -> None:
        """After a rollback: the remembered numbers may never have been written."""

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
        """The numbers of all pools of these credentials, as JSON."""
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
        said = headers_value(self.sealing.text_out(headers))
        return PoolKey(provider, dialect, credential, endpoint, said, model, size_class, deadline_class)
