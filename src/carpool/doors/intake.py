"""From an HTTP request to a Call, and from a Reply to an HTTP answer. Every door goes through here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache

from msgspec.structs import replace

from carpool.doors.options import Options
from carpool.engine import Engine, Reply, Upstream
from carpool.errors import (
    BadCall,
    CallCancelled,
    CallExpired,
    CallFailed,
    CallLost,
    DeadlineMissed,
)
from carpool.ledger import dollars
from carpool.model import Call, Headers, OutcomeKind, ticket_text
from carpool.ports import Clock, Parsed, RawRequest

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
# Ours to say anew: the body is no longer framed or compressed as it was on the provider's wire.
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "content-encoding", "keep-alive"})


LONGEST_KEY = 8192  # it is held in memory
LONGEST_MODEL = 256  # it stands in the ledger and in the log
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PIECE = 2047  # more would let other threads have the interpreter, and coming back takes longer than the hash


def make_call(engine: Engine, upstream: Upstream, clock: Clock, raw: RawRequest, options: Options) -> Call:
    """Understands a request and names its credential. Raises `BadCall` for what can't be understood."""
    return understand(engine, upstream, clock, raw, options, kept=True)[0]


def recognisable(call: Call, parsed: Parsed) -> Call:
    """The call with its fingerprint, by which the store knows it again."""
    fingerprint = _fingerprint(call.credential, call.endpoint, call.headers, parsed.canonical)
    return replace(call, fingerprint=fingerprint)


def understand(
    engine: Engine,
    upstream: Upstream,
    clock: Clock,
    raw: RawRequest,
    options: Options,
    ruled: Ruled | None = None,
    credential: str | None = None,
    *,
    kept: bool = False,
) -> tuple[Call, Parsed]:
    """A call, without its fingerprint unless it is sure to be `kept`: that is dear, and on `now` none is needed.

    `ruled` says what the rules of the house make of the options, `credential` whose call it is where that is known
    already; otherwise the key that it carries says so."""
    parsed, arrived = upstream.dialect.parse(raw), clock.now()
    if ruled is not None:
        options = ruled(parsed, options, arrived)
    if len(parsed.model) > LONGEST_MODEL:
        raise BadCall(f"`model` has {len(parsed.model)} characters; the name of a model has at most {LONGEST_MODEL}.")
    if not parsed.secret:
        raise BadCall("This request carries no API key. Send it as x-api-key, or as Authorization: Bearer.")
    if credential is None:
        credential = _enrolled(engine, upstream, parsed.secret)
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
        fingerprint=_fingerprint(credential, parsed.endpoint, parsed.headers, parsed.canonical) if kept else 0,
    )
    return call, parsed


def _enrolled(engine: Engine, upstream: Upstream, secret: Headers) -> str:
    if any(len(value) > LONGEST_KEY for _, value in secret):
        raise BadCall(f"An API key has at most {LONGEST_KEY} characters; this one has more.")
    return engine.enrol(upstream.provider, secret)


def _fingerprint(credential: str, endpoint: str, headers: Headers, canonical: bytes) -> int:
    """63 bits that tell one call from another. Nothing of one credential ever meets that of another."""
    digest = _begun(credential, endpoint, headers).copy()
    if len(canonical) <= _PIECE:
        digest.update(canonical)
    else:
        for start in range(0, len(canonical), _PIECE):
            digest.update(canonical[start : start + _PIECE])
    return int.from_bytes(digest.digest()[:8], "big") >> 1


@lru_cache(maxsize=1024)  # few kinds, many calls
def _begun(credential: str, endpoint: str, headers: Headers) -> hashlib._Hash:
    return hashlib.sha256(repr((credential, endpoint, headers)).encode())


def failure(reply: Reply) -> CallFailed | None:
    """The typed error of a call that ended without an answer; None where the provider said something."""
    outcome = reply.outcome
    kind = _FAILURES.get(outcome.kind)
    if kind is None:
        return None
    text = ticket_text(reply.ticket)
    why = f": {outcome.reason}" if outcome.reason else ""
    return kind(f"Call {text} {_MEANING[outcome.kind]}{why}.", text)


def answer_headers(reply: Reply) -> Headers:
    """The provider's own headers, and what carpool says of the way the call took."""
    if not reply.outcome.headers:  # of an answer out of a batch
        return (_JSON, *carpool_headers(reply))
    kept = [(name, value) for name, value in reply.outcome.headers if name not in _FRAMING]
    if not any(name == "content-type" for name, _ in kept):
        kept.append(_JSON)
    return (*kept, *carpool_headers(reply))


def carpool_headers(reply: Reply) -> Headers:
    outcome, entry = reply.outcome, reply.entry
    said = [("x-carpool-lane", outcome.lane._value_), ("x-carpool-ticket", ticket_text(reply.ticket))]
    if reason := reply.reason or outcome.reason:
        said.append(("x-carpool-reason", latin(reason)))
    if outcome.batch:
        said.append(("x-carpool-batch", latin(outcome.batch)))
    if entry is not None and entry.paid is not None:
        said.append(("x-carpool-cost", dollars(entry.paid)))
        if entry.would_have_paid is not None:
            said.append(("x-carpool-saved", dollars(entry.would_have_paid - entry.paid)))
    return tuple(said)


def latin(text: str) -> str:
    """Header values are one line of Latin-1. Much of it was said by others: a provider, a client, a rule."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(" ", text).encode("latin-1", "replace").decode("latin-1")
