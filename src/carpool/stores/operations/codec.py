"""Converts values of the model to database rows and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import inf
from typing import Any

import msgspec

from carpool.core.lifecycle import BatchState, TicketState
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
from carpool.stores.encryption import Sealing

BIGGEST = 2**63 - 1  # the largest integer that both databases can store

Row = tuple[Any, ...]

_headers_type = tuple[tuple[str, str], ...]
_headers_decoder = msgspec.json.Decoder(_headers_type)
_usage_decoder = msgspec.json.Decoder(Usage)
_tags_decoder = msgspec.json.Decoder(dict[str, str])


def to_json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@lru_cache(maxsize=1024)  # many calls share a few sets of headers
def headers_text(headers: Headers) -> str:
    return to_json(headers)


@lru_cache(maxsize=1024)
def headers_value(text: str) -> Headers:
    return _headers_decoder.decode(text)


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
def outcome_row(sealing: Sealing, number: int, ticket: int, purchase: int | None, outcome: Outcome) -> Row:
    content = outcome.reason, headers_text(outcome.headers), outcome.body
    reason, headers, body = sealing.outcome_in(ticket, content)
    kind, lane = outcome.kind._value_, outcome.lane._value_
    return number, ticket, purchase, kind, outcome.status, outcome.at, lane, reason, headers, outcome.batch, body


def settled_value(sealing: Sealing, row: Row) -> Settled:
    """Converts a row of ticket, outcome and the entry of its purchase; without an entry, its columns are NULL."""
    ticket, kind, status, body, at, lane, reason, headers, batch, *entry = row
    reason, headers, body = sealing.outcome_out(ticket, (reason, headers, body))
    outcome = Outcome(OutcomeKind(kind), status, body, at, Lane(lane), reason, headers_value(headers), batch)
    return Settled(ticket, outcome, None if entry[0] is None else entry_value(sealing, tuple(entry)))


def entry_row(
    sealing: Sealing, entry: Entry, credential: int, kind: EntryKind, would_have_paid: int | None, tags: str | None
) -> Row:
    identity = entry.ticket, entry.purchase, entry.at, entry.lane._value_, kind._value_
    usage = None if entry.usage is None else to_json(entry.usage)
    price = usage, entry.paid, would_have_paid
    reason = sealing.text_in(entry.reason)
    return *identity, entry.provider, credential, entry.model, *price, reason, tags_text(entry.tags) or tags


def entry_value(sealing: Sealing, row: Row) -> Entry:
    """Converts a row whose columns are the fields of an entry, in order."""
    ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would, reason, tags = row
    bought = ticket, purchase, at, Lane(lane), EntryKind(kind), provider, credential, model
    used = None if usage is None else _usage_decoder.decode(usage)
    return Entry(*bought, used, paid, would, sealing.text_out(reason), _tags(tags))


def batch_value(sealing: Sealing, row: Row, key: PoolKey) -> Batch:
    """Converts a row whose columns are the fields of a batch, in order, without `key`."""
    number, pool, nonce, state, *rest, abandoned, note, unsent = row
    flags = bool(abandoned), sealing.text_out(note), bool(unsent)
    fields: Row = (number, pool, key, nonce, BatchState(state), *rest, *flags)
    return Batch(*fields)


def call_value(sealing: Sealing, row: Row) -> CallRow:
    """Converts a row whose columns are the fields of a `CallRow`, in order."""
    model, state, lane = sealing.text_out(row[4]), TicketState(row[5]), Lane(row[6])
    awaited, size, batch, reason, tags, kind, *costs = row[11:]
    sent = bool(awaited), size, batch, sealing.text_out(reason), _tags(tags)
    fields: Row = (*row[:4], model, state, lane, *row[7:11], *sent, kind and OutcomeKind(kind), *costs)
    return CallRow(*fields)
