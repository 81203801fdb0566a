"""The session that operations run on: a connection, its named statements, and cached ids of credentials, texts and
pools; and how values of the model become rows of the database.

The statements are read from the files in `stores/sql`. Sets of states in them are filled in from the lifecycle tables,
so that the guards of UPDATE statements always match the tables.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from math import inf
from typing import Any, Protocol

import msgspec

from carpool.core.errors import StoreCorrupt, StoreError
from carpool.core.lifecycle import TICKET_OPERATIONS, UNFINISHED, BatchState, TicketState
from carpool.core.model import (
    Batch,
    CallRow,
    Entry,
    EntryKind,
    Headers,
    Lane,
    Outcome,
    OutcomeKind,
    PoolKey,
    Settled,
    Usage,
)

BIGGEST = 2**63 - 1  # the largest integer that both databases can store

Row = tuple[Any, ...]
Parameters = Sequence[Any] | Mapping[str, Any]
Content = tuple[str, str, bytes]  # of an outcome: reason, headers, body


def no_store(name: str) -> str:
    return f"There is no store at {name}. Name one with --store or --config; carpool serve makes it when it starts."


def older_store(name: str) -> str:
    return f"The store {name} was last used by an older carpool, which kept less. Start carpool serve with it once."


NO_CIPHER = "The store holds what was encrypted, but not what it takes to read it."
PLAIN, PLAIN_TEXT = b"\0\0", "\1p"  # prefixes of plain values that begin like an encrypted one


class PlainContents:
    """How a store keeps what calls and answers say: as it is. `encryption.Sealing` encrypts it."""

    def bytes_in(self, ticket: int, data: bytes) -> bytes:
        return PLAIN + data if data[:1] == b"\0" else data

    def bytes_out(self, ticket: int, data: bytes) -> bytes:
        if data[:1] != b"\0":
            return data
        if data[:2] != PLAIN:
            raise StoreCorrupt(NO_CIPHER)
        return data[2:]

    def outcome_in(self, ticket: int, content: Content) -> Content:
        reason, headers, body = content
        return reason, headers, self.bytes_in(ticket, body)

    def outcome_out(self, ticket: int, content: Content) -> Content:
        reason, headers, body = content
        return reason, headers, self.bytes_out(ticket, body)

    def text_in(self, text: str) -> str:
        return PLAIN_TEXT + text if text[:1] == "\1" else text

    def text_out(self, text: str) -> str:
        if text[:1] != "\1":
            return text
        if text[:2] != PLAIN_TEXT:
            raise StoreCorrupt(NO_CIPHER)
        return text[2:]

    def key_forms(self, key: str) -> list[str]:
        """Returns every form in which a client's key may be stored, the current one first. It is only ever compared."""
        return [PlainContents.text_in(self, key)]


class ExecutedStatement(Protocol):
    """An executed statement: the common part of both drivers' cursors."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Session(ABC):
    """Used by one thread at a time, inside a transaction that the `Driver` begins and ends."""

    def __init__(self, name: str, sql: Mapping[str, str]) -> None:
        self.name = name
        self.sql = sql
        self.contents = PlainContents()
        self.pepper = b""  # the store's secret; `settle_secret` sets it
        self.awaiters: set[str] = set()  # every engine that this session ever wrote as awaiter of a call
        self.doubted: frozenset[str] = frozenset()  # may be dead or alive, as of the last `mark_dead_engines`
        self._credentials: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._numbers: dict[PoolKey, int] = {}
        self._pools: dict[int, PoolKey] = {}

    @abstractmethod
    def execute(self, text: str, parameters: Parameters = ()) -> ExecutedStatement: ...

    @abstractmethod
    def insert(self, statement: str, rows: Sequence[Row], most: int = 8192) -> None:
        """Runs an INSERT with its `{rows}` filled in, with up to `most` rows per statement."""

    @abstractmethod
    def new_id(self, statement: str, parameters: Parameters = ()) -> int:
        """Runs an INSERT of one row and returns its id."""

    @abstractmethod
    def close(self) -> None:
        """Closes the connection, and what was opened with it. May be called twice."""

    @abstractmethod
    def departed(self, now: float) -> list[str]:
        """Returns the engines that are stored as awaiters of calls and are not alive."""

    # A database that several processes share overrides these; with one process there is nothing to lock or to doubt.

    def mark_dead_engines(self) -> None:  # noqa: B027
        """Marks engines that are provably gone as dead and releases the tickets they await, if the database can tell.
        Engines that may be dead or alive are `doubted` until the next call."""

    def alone(self) -> None:  # noqa: B027
        """Locks succession (leadership, takeover) against other processes until the transaction ends."""

    def hold(self, tickets: str) -> None:  # noqa: B027
        """Locks these calls against other processes until the transaction ends."""

    # running named statements

    def run(self, statement: str, parameters: Parameters = ()) -> ExecutedStatement:
        return self.execute(self.sql[statement], parameters)

    def change(self, statement: str, parameters: Parameters) -> None:
        """As `run`, for statements without a result."""
        self.run(statement, parameters)

    def row(self, statement: str, parameters: Parameters = ()) -> Row | None:
        first: Row | None = self.run(statement, parameters).fetchone()
        return first

    def rows(self, statement: str, parameters: Parameters = ()) -> list[Row]:
        return self.run(statement, parameters).fetchall()

    # metadata

    def meta(self, name: str) -> str | None:
        row = self.row("meta", (name,))
        return None if row is None else str(row[0])

    def make_meta(self, name: str, value: str) -> str:
        """Stores the value unless there is one; returns the stored value."""
        self.run("make_meta", (name, value))
        return self.meta(name) or value

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
            number = self._words[text] = self.new_id("insert_word", (self.contents.text_in(text),))
        return number

    def known_credentials(self, names: Iterable[str]) -> list[int]:
        return [self._credentials[name] for name in dict.fromkeys(names) if name in self._credentials]

    def credential_filter(self, names: Iterable[str] | None) -> str | None:
        """Returns the ids of these credentials, as JSON; None, which stands for all of them, stays None."""
        return None if names is None else to_json(self.known_credentials(names))

    def pool(self, key: PoolKey) -> int:
        number = self._numbers.get(key)
        if number is None:
            headers = self.contents.text_in(headers_text(key.headers))
            row = (self.credential(key.credential), key.provider, key.dialect, key.endpoint, headers)
            number = self.new_id("insert_pool", (*row, key.model, key.size_class, key.deadline_class))
            self._numbers[key], self._pools[number] = number, key
        return number

    def pool_key(self, number: int) -> PoolKey:
        if number not in self._pools:
            raise StoreError(f"The store {self.name} knows no pool {number}.")
        return self._pools[number]

    def pools_of(self, names: Iterable[str]) -> str:
        """Returns the ids of all pools of these credentials, as JSON."""
        wanted = set(names)
        return to_json([number for number, key in self._pools.items() if key.credential in wanted])

    def _pool_value(self, row: Row) -> PoolKey:
        _, provider, dialect, credential, endpoint, headers, model, size_class, deadline_class = row
        pairs = _headers_value(self.contents.text_out(headers))
        return PoolKey(provider, dialect, credential, endpoint, pairs, model, size_class, deadline_class)


# ------------------------------------------------------------ rows


def to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


headers_text = lru_cache(maxsize=1024)(to_json)  # many calls share a few sets of headers
_headers_value = lru_cache(maxsize=1024)(msgspec.json.Decoder(Headers).decode)
_usage_decoder = msgspec.json.Decoder(Usage)
_tags_decoder = msgspec.json.Decoder(dict[str, str])


def tags_text(tags: Mapping[str, str]) -> str | None:
    return to_json(dict(tags)) if tags else None


def _tags(text: str | None) -> dict[str, str]:
    return {} if text is None else _tags_decoder.decode(text)


def signed(fingerprint: int) -> int:
    """Maps a signed or unsigned 64-bit number to the signed 64 bits of the databases."""
    if 0 <= fingerprint <= BIGGEST:  # true for all current fingerprints
        return fingerprint
    return ((fingerprint + 2**63) & (2**64 - 1)) - 2**63


def finite(time: float | None) -> float | None:
    return None if time is None or time == inf else time


# `_value_` is the plain attribute behind the property `value`, which is ten times slower.
def outcome_row(session: Session, number: int, ticket: int, purchase: int | None, outcome: Outcome) -> Row:
    content = outcome.reason, headers_text(outcome.headers), outcome.body
    reason, headers, body = session.contents.outcome_in(ticket, content)
    kind, lane = outcome.kind._value_, outcome.lane._value_
    return number, ticket, purchase, kind, outcome.status, outcome.at, lane, reason, headers, outcome.batch, body


def settled_value(session: Session, row: Row) -> Settled:
    """Converts a row of ticket, outcome and the entry of its purchase; without an entry, its columns are NULL."""
    ticket, kind, status, body, at, lane, reason, headers, batch, *entry = row
    reason, headers, body = session.contents.outcome_out(ticket, (reason, headers, body))
    outcome = Outcome(OutcomeKind(kind), status, body, at, Lane(lane), reason, _headers_value(headers), batch)
    return Settled(ticket, outcome, None if entry[0] is None else entry_value(session, tuple(entry)))


def entry_row(
    session: Session, entry: Entry, credential: int, kind: EntryKind, would_have_paid: int | None, tags: str | None
) -> Row:
    identity = entry.ticket, entry.purchase, entry.at, entry.lane._value_, kind._value_
    usage = None if entry.usage is None else to_json(entry.usage)
    price = usage, entry.paid, would_have_paid
    reason = session.contents.text_in(entry.reason)
    return *identity, entry.provider, credential, entry.model, *price, reason, tags_text(entry.tags) or tags


def entry_value(session: Session, row: Row) -> Entry:
    """Converts a row whose columns are the fields of an entry, in order."""
    ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would, reason, tags = row
    bought = ticket, purchase, at, Lane(lane), EntryKind(kind), provider, credential, model
    used = None if usage is None else _usage_decoder.decode(usage)
    return Entry(*bought, used, paid, would, session.contents.text_out(reason), _tags(tags))


def batch_value(session: Session, row: Row) -> Batch:
    """Converts a row whose columns are the fields of a batch, in order, without `key`."""
    number, pool, nonce, state, *rest, abandoned, note, unsent = row
    flags = bool(abandoned), session.contents.text_out(note), bool(unsent)
    fields: Row = (number, pool, session.pool_key(pool), nonce, BatchState(state), *rest, *flags)
    return Batch(*fields)


def call_value(session: Session, row: Row) -> CallRow:
    """Converts a row whose columns are the fields of a `CallRow`, in order."""
    model, state, lane = session.contents.text_out(row[4]), TicketState(row[5]), Lane(row[6])
    awaited, size, batch, reason, tags, kind, *costs = row[11:]
    sent = bool(awaited), size, batch, session.contents.text_out(reason), _tags(tags)
    fields: Row = (*row[:4], model, state, lane, *row[7:11], *sent, kind and OutcomeKind(kind), *costs)
    return CallRow(*fields)


# ------------------------------------------------------------ statements

_LIVE = "(SELECT name FROM engines WHERE pulse_until >= :now)"
_UNDELIVERED = (
    "SELECT id FROM calls WHERE state = 'queued' UNION ALL SELECT id FROM calls WHERE state = 'boarded' "
    "UNION ALL SELECT id FROM calls WHERE state = 'sending' "
    "UNION ALL SELECT id FROM calls INDEXED BY calls_unclaimed WHERE state = 'settled' AND delivered_at IS NULL"
)
_FILES = (
    "calls.sql",
    "batches.sql",
    "ledger.sql",
    "listing.sql",
    "keys.sql",
    "shapes.sql",
    "forecasts.sql",
    "tasks.sql",
)


def states_list(states: Iterable[str]) -> str:
    return ", ".join(f"'{state}'" for state in states)


def _sources(operation: str) -> str:
    """The states from which an operation moves a ticket. SQLite uses a partial index only for the same `=`."""
    states = sorted(TICKET_OPERATIONS[operation].sources)
    return f"= '{states[0]}'" if len(states) == 1 else f"IN ({states_list(states)})"


def load_statements(folder: str, live: str, words: Mapping[str, str]) -> dict[str, str]:
    """Reads the named statements of a folder and substitutes the names in braces. `live` selects the live engines."""
    unfinished = states_list(sorted(UNFINISHED))
    words = {
        **words,
        "live": live,
        "unfinished": unfinished,
        "finished": states_list(state for state in BatchState if state not in UNFINISHED),  # as in the partial index
        "orphan": (
            f"CASE WHEN sender IS NOT NULL THEN sender NOT IN {live} ELSE awaiter IS NULL OR awaiter NOT IN {live} END"
        ),
        "in_unfinished_batch": (
            f"EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))"  # noqa: S608
        ),
    }
    text = "".join((files("carpool.stores") / "sql" / folder / name).read_text("utf-8") for name in _FILES)
    text = re.sub(r"\{from (\w+)\}", lambda match: _sources(match[1]), text)
    for word, meaning in words.items():
        text = text.replace("{" + word + "}", meaning)
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {
        name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


SQL: dict[str, str] = load_statements("", _LIVE, {"undelivered": _UNDELIVERED})


@cache
def migrations(folder: str = "") -> dict[int, str]:
    """Returns the numbered schema files of a folder, in order."""
    scripts = [file for file in (files("carpool.stores") / "sql" / folder).iterdir() if re.match(r"\d{4}_", file.name)]
    return {int(file.name[:4]): file.read_text("utf-8") for file in sorted(scripts, key=lambda file: file.name)}
