"""Converts values of the model to database rows and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import inf
from typing import Any

import msgspec

from carpool.core.lifecycle import BatchState
from carpool.core.model import Batch, Entry, EntryKind, Headers, Lane, Outcome, OutcomeKind, PoolKey, Settled, Usage
from carpool.stores.encryption import Sealing

BIGGEST = 2**63 - 1  # the largest integer that SQLite can store

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


def signed(fingerprint: int) -> int:
    """Maps a signed or unsigned 64-bit number to the signed 64 bits of SQLite."""
    if 0 <= fingerprint <= BIGGEST:  # true for all current fingerprints
        return fingerprint
    return ((fingerprint + 2**63) & (2**64 - 1)) - 2**63


def finite(time: float | None) -> float | None:
    return None if time is None or time == inf else time


def distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# `_value_` is the plain attribute behind the property `value`, which is ten times slower.
def outcome_row(sealing: Sealing, number: int, ticket: int, purchase: int | None, outcome: Outcome) -> Row:
    content = outcome.reason, headers_text(outcome.headers), outcome.body
    reason, headers, body = sealing.outcome_in(ticket, content)
    return (
        number,
        ticket,
        purchase,
        outcome.kind._value_,
        outcome.status,
        outcome.at,
        outcome.lane._value_,
        reason,
        headers,
        outcome.batch,
        body,
    )


def settled_value(sealing: Sealing, row: Row) -> Settled:
    """Converts a row of ticket, outcome and the entry of its purchase; without an entry, its columns are NULL."""
    ticket, kind, status, body, at, lane, reason, headers, batch, *entry = row
    reason, headers, body = sealing.outcome_out(ticket, (reason, headers, body))
    outcome = Outcome(OutcomeKind(kind), status, body, at, Lane(lane), reason, headers_value(headers), batch)
    return Settled(ticket, outcome, None if entry[0] is None else entry_value(sealing, tuple(entry)))


def entry_row(
    sealing: Sealing, entry: Entry, credential: int, kind: EntryKind, would_have_paid: int | None, tags: str | None
) -> Row:
    return (
        entry.ticket,
        entry.purchase,
        entry.at,
        entry.lane._value_,
        kind._value_,
        entry.provider,
        credential,
        entry.model,
        None if entry.usage is None else to_json(entry.usage),
        entry.paid,
        would_have_paid,
        sealing.text_in(entry.reason),
        tags_text(entry.tags) or tags,
    )


def entry_value(sealing: Sealing, row: Row) -> Entry:
    ticket, purchase, at, lane, kind, provider, credential, model, usage, paid, would, reason, tags = row
    return Entry(
        ticket=ticket,
        purchase=purchase,
        at=at,
        lane=Lane(lane),
        kind=EntryKind(kind),
        provider=provider,
        credential=credential,
        model=model,
        usage=None if usage is None else _usage_decoder.decode(usage),
        paid=paid,
        would_have_paid=would,
        reason=sealing.text_out(reason),
        tags={} if tags is None else _tags_decoder.decode(tags),
    )


def batch_value(sealing: Sealing, row: Row, key: PoolKey) -> Batch:
    number, pool, nonce, state, owner, count, size, intended_at, *rest = row
    sent_at, resolved_at, provider_id, expires_at, ended_at, clock_offset, abandoned, note, unsent = rest
    return Batch(
        id=number,
        pool=pool,
        key=key,
        nonce=nonce,
        state=BatchState(state),
        owner=owner,
        count=count,
        bytes=size,
        intended_at=intended_at,
        sent_at=sent_at,
        resolved_at=resolved_at,
        provider_id=provider_id,
        expires_at=expires_at,
        ended_at=ended_at,
        clock_offset=clock_offset,
        abandoned=bool(abandoned),
        note=sealing.text_out(note),
        unsent=bool(unsent),
    )
