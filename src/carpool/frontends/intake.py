"""Converts an HTTP request to a `Call`, and a `Reply` to an HTTP response. Used by every frontend."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache

from msgspec.structs import replace

from carpool.core.errors import (
    BadCall,
    CallCancelled,
    CallExpired,
    CallFailed,
    CallLost,
    DeadlineMissed,
)
from carpool.core.model import Call, Headers, Lane, OutcomeKind, ticket_text
from carpool.core.ports import Clock, Parsed, RawRequest
from carpool.engine import Engine, Passage, Reply, Upstream
from carpool.frontends.options import Options
from carpool.planners.ledger import dollars

Ruled = Callable[[Parsed, Options, float], Options]

_FAILURES: dict[OutcomeKind, type[CallFailed]] = {
    OutcomeKind.EXPIRED: CallExpired,
    OutcomeKind.CANCELLED: CallCancelled,
    OutcomeKind.LOST: CallLost,
    OutcomeKind.DEADLINE: DeadlineMissed,
}
_MEANING: dict[OutcomeKind, str] = {
    OutcomeKind.EXPIRED: "was not processed within the provider's window",
    OutcomeKind.CANCELLED: "was cancelled",
    OutcomeKind.LOST: "was bought, but its answer is lost",
    OutcomeKind.DEADLINE: "could not be answered before its deadline",
}
_JSON = ("content-type", "application/json")
# Set anew: the body is no longer framed or compressed as the provider sent it.
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "content-encoding", "keep-alive"})


LONGEST_KEY = 8192  # characters; keys are kept in memory
LONGEST_MODEL = 256  # characters; it goes into the ledger and the log
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PIECE = 2047  # hashlib releases the GIL above this, and getting it back takes longer than the hash


def make_call(engine: Engine, upstream: Upstream, clock: Clock, raw: RawRequest, options: Options) -> Call:
    """The call of a request, with its credential and fingerprint. Raises `BadCall` if the request is invalid."""
    return understand(engine, upstream, clock, raw, options, kept=True)[0]


def recognisable(call: Call, parsed: Parsed) -> Call:
    """The call with its fingerprint, by which the store recognises equal calls."""
    fingerprint = _fingerprint(call.credential, call.endpoint, call.headers, parsed.canonical)
    return replace(call, fingerprint=fingerprint)


def understand(
    engine: Engine,
    upstream: Upstream,
    clock: Clock,
    raw: RawRequest,
    options: Options,
    ruled: Ruled | None = None,
    payer: str | None = None,
    *,
    kept: bool = False,
) -> tuple[Call, Parsed]:
    """The call of a request. Computes its fingerprint only if it is `kept`: that is expensive, and not needed on `now`.

    `ruled` applies the operator's rules to the options. `payer` is the name of the secret that pays, if it is known
    already; otherwise it is taken from the key in the request."""
    parsed, arrived = upstream.dialect.parse(raw), clock.now()
    if ruled is not None:
        options = ruled(parsed, options, arrived)
    _check(parsed)
    if payer is None:
        payer = _enrol(engine, upstream, parsed.secret)
    credential = engine.credential(payer)
    call = Call(
        ticket=engine.new_ticket(),
        provider=upstream.provider,
        dialect=upstream.dialect.name,
        endpoint=parsed.endpoint,
        body=parsed.body,
        headers=parsed.headers,
        credential=credential,
        model=parsed.model,
        arrived=arrived,
        deadline=options.until(arrived),
        stream=parsed.stream,
        max_output_tokens=parsed.max_output_tokens,
        unbatchable=parsed.unbatchable,
        lane=options.lane,
        tags=options.tags,
        key=options.key,
        retry=parsed.retry,
        turn=parsed.turn,
        insists=options.insists,
        note=options.note,
        on_disconnect=options.on_disconnect,
        flexible=parsed.flexible,
        payer=payer,
        fingerprint=_fingerprint(credential, parsed.endpoint, parsed.headers, parsed.canonical) if kept else 0,
    )
    return call, parsed


def _check(parsed: Parsed) -> None:
    if len(parsed.model) > LONGEST_MODEL:
        raise BadCall(f"`model` has {len(parsed.model)} characters; the name of a model has at most {LONGEST_MODEL}.")
    if not parsed.secret:
        raise BadCall("This request carries no API key. Send it as x-api-key, or as Authorization: Bearer.")


def _enrol(engine: Engine, upstream: Upstream, secret: Headers) -> str:
    if any(len(value) > LONGEST_KEY for _, value in secret):
        raise BadCall(f"An API key has at most {LONGEST_KEY} characters; this one has more.")
    return engine.enrol(upstream.provider, secret)


def _fingerprint(credential: str, endpoint: str, headers: Headers, canonical: bytes) -> int:
    """63 bits that identify a call. The credential is part of them, so calls of different credentials never match."""
    digest = _digest_prefix(credential, endpoint, headers).copy()
    if len(canonical) <= _PIECE:
        digest.update(canonical)
    else:
        for start in range(0, len(canonical), _PIECE):
            digest.update(canonical[start : start + _PIECE])
    return int.from_bytes(digest.digest()[:8], "big") >> 1


@lru_cache(maxsize=1024)  # few combinations, many calls
def _digest_prefix(credential: str, endpoint: str, headers: Headers) -> hashlib._Hash:
    return hashlib.sha256(repr((credential, endpoint, headers)).encode())


def failure(reply: Reply) -> CallFailed | None:
    """The typed error of a call that ended without an answer; None if the provider answered."""
    outcome = reply.outcome
    kind = _FAILURES.get(outcome.kind)
    if kind is None:
        return None
    text = ticket_text(reply.ticket)
    why = f": {outcome.reason}" if outcome.reason else ""
    return kind(f"Call {text} {_MEANING[outcome.kind]}{why}.", text)


def answer_headers(reply: Reply) -> Headers:
    """The provider's headers and carpool's own."""
    if not reply.outcome.headers:  # an answer from a batch has none
        return (_JSON, *carpool_headers(reply))
    kept = [(name, value) for name, value in reply.outcome.headers if name not in _FRAMING]
    if not any(name == "content-type" for name, _ in kept):
        kept.append(_JSON)
    return (*kept, *carpool_headers(reply))


def carpool_headers(reply: Reply) -> Headers:
    outcome, entry = reply.outcome, reply.entry
    headers = [("x-carpool-lane", outcome.lane._value_)]
    if entry is None or entry.sent:  # otherwise there is nothing to look up by ticket
        headers.append(("x-carpool-ticket", ticket_text(reply.ticket)))
    if reason := reply.reason or outcome.reason:
        headers.append(("x-carpool-reason", latin(reason)))
    if outcome.batch:
        headers.append(("x-carpool-batch", latin(outcome.batch)))
    if entry is not None and entry.paid is not None:
        headers.append(("x-carpool-cost", dollars(entry.paid)))
        if entry.would_have_paid is not None:
            headers.append(("x-carpool-saved", dollars(entry.would_have_paid - entry.paid)))
    return tuple(headers)


def passing_headers(passage: Passage) -> Headers:
    ticket = None if passage.ticket is None else ticket_text(passage.ticket)
    return early_headers(ticket, passage.lane, passage.reason)


def early_headers(ticket: str | None, lane: Lane, reason: str) -> Headers:
    """carpool's headers before the answer is known."""
    ticket_header = () if ticket is None else (("x-carpool-ticket", ticket),)
    return (("x-carpool-lane", lane._value_), *ticket_header, ("x-carpool-reason", latin(reason)))


def latin(text: str) -> str:
    """Text as a header value: one line of Latin-1. It may come from a provider, a client or a rule."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(" ", text).encode("latin-1", "replace").decode("latin-1")
