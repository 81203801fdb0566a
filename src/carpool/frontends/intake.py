"""Converts an HTTP request to a `Call`, and a `Reply` to an HTTP response. Used by every frontend."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from carpool.core.errors import BadCall, CallCancelled, CallExpired, CallFailed, CallLost, DeadlineMissed
from carpool.core.keys import BEARER
from carpool.core.model import Call, Headers, Lane, OutcomeKind, ticket_text
from carpool.core.ports import Clock, Parsed, RawRequest
from carpool.dialects.keep_alive import client_label
from carpool.engine import Engine, Reply, StreamedResponse, Upstream
from carpool.planners.access.options import Options
from carpool.planners.access.rules import call_of, understand
from carpool.planners.ledger import dollars

_FAILURES: dict[OutcomeKind, tuple[type[CallFailed], str]] = {
    OutcomeKind.EXPIRED: (CallExpired, "was not processed within the provider's window"),
    OutcomeKind.CANCELLED: (CallCancelled, "was cancelled"),
    OutcomeKind.LOST: (CallLost, "was bought, but its answer is lost"),
    OutcomeKind.DEADLINE: (DeadlineMissed, "could not be answered before its deadline"),
}
_JSON = ("content-type", "application/json")
NO_RETRY = ("x-should-retry", "false")  # SDKs obey it; Claude Code would otherwise retry a refused key for minutes
# Set again: the body is no longer framed or compressed as the provider sent it.
_FRAMING = frozenset({"content-length", "transfer-encoding", "connection", "content-encoding", "keep-alive"})

HOP_BY_HOP = frozenset(
    {"connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization"}
    | {"proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_NOT_PASSED_ON = HOP_BY_HOP - {"content-length"}
_NO_NAMES: frozenset[str] = frozenset()
_USUAL_VALUES = ("keep-alive", "close")

LONGEST_KEY = 8192  # characters; keys are kept in memory
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PIECE = 2047  # hashlib releases the GIL above this, and getting it back takes longer than the hash


class Caller(Struct):
    """Who sends calls: the same for all calls with one head. What is not known yet is found with the first call."""

    client: str  # the kind of client, for the record of calls
    payer: str | None = None  # the name of the secret that pays
    credential: str = ""


def make_call(engine: Engine, upstream: Upstream, clock: Clock, raw: RawRequest, options: Options) -> Call:
    """The call of a request, with its credential and fingerprint. Raises `BadCall` if the request is invalid."""
    parsed = understand(upstream, raw)
    caller = Caller(client_label(raw.headers, upstream.dialect.subagent_headers))
    return with_fingerprint(identify(engine, upstream, parsed, options, clock.now(), caller), parsed)


def identify(
    engine: Engine, upstream: Upstream, parsed: Parsed, options: Options, arrived: float, caller: Caller
) -> Call:
    """The call of a parsed request, with its ticket, its credential, the shape to be recorded and the chain of its
    prompt. It has no fingerprint: that is expensive, and not needed on `now`."""
    if not parsed.secret:
        ways = ["Authorization: Bearer" if name == BEARER else name for name in upstream.dialect.key_headers]
        raise BadCall(f"This request carries no API key. Send it as {' or '.join(ways)}.")
    if caller.payer is None:
        if any(len(value) > LONGEST_KEY for _, value in parsed.secret):
            raise BadCall(f"An API key has at most {LONGEST_KEY} characters; this one has more.")
        caller.payer = engine.add_secret(upstream.provider, parsed.secret)
    if not caller.credential:
        caller.credential = engine.credential(caller.payer)
    ticket, credential, payer = engine.new_ticket(), caller.credential, caller.payer
    whose = {"credential": credential, "payer": payer, "agent": caller.client}
    call = call_of(upstream, parsed, options, arrived, ticket=ticket, **whose)
    if not call.task and call.conversation is not None:
        call = replace(call, task=engine.tasks.conversation_name(credential, call.conversation))
    return engine.recorder.described(upstream.dialect, parsed, call, caller.client)


def with_fingerprint(call: Call, parsed: Parsed) -> Call:
    """The call with its fingerprint, by which the store recognises equal calls: 63 bits. The credential is part of
    them, so calls of different credentials never match."""
    digest = _digest_prefix(call.credential, call.endpoint, call.headers).copy()
    canonical = parsed.document.canonical(without="stream")
    for start in range(0, len(canonical), _PIECE):
        digest.update(canonical[start : start + _PIECE])
    return replace(call, fingerprint=int.from_bytes(digest.digest()[:8], "big") >> 1)


@lru_cache(maxsize=1024)  # few combinations, many calls
def _digest_prefix(credential: str, endpoint: str, headers: Headers) -> hashlib._Hash:
    return hashlib.sha256(repr((credential, endpoint, headers)).encode())


def failure(reply: Reply) -> CallFailed | None:
    """The typed error of a call that ended without an answer; None if the provider answered."""
    outcome = reply.outcome
    if outcome.kind not in _FAILURES:
        return None
    kind, meaning = _FAILURES[outcome.kind]
    text, why = ticket_text(reply.ticket), f": {outcome.reason}" if outcome.reason else ""
    return kind(f"Call {text} {meaning}{why}.", text)


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


def streamed_headers(streamed: StreamedResponse) -> Headers:
    ticket = None if streamed.ticket is None else ticket_text(streamed.ticket)
    return early_headers(ticket, streamed.lane, streamed.reason)


def early_headers(ticket: str | None, lane: Lane, reason: str) -> Headers:
    """carpool's headers before the answer is known."""
    ticket_header = () if ticket is None else (("x-carpool-ticket", ticket),)
    return (("x-carpool-lane", lane._value_), *ticket_header, ("x-carpool-reason", latin(reason)))


def latin(text: str) -> str:
    """Text as a header value: one line of Latin-1. It may come from a provider, a client or a rule."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROLS.sub(" ", text).encode("latin-1", "replace").decode("latin-1")


# ------------------------------------------------------------ headers that are passed on


def end_to_end(headers: Headers) -> list[tuple[str, str]]:
    """The headers without hop-by-hop ones, whether known by name or listed in `connection`."""
    dropped = HOP_BY_HOP | _listed_in_connection(headers)
    return [pair for pair in headers if pair[0] not in dropped]


def forwarded_headers(headers: Headers) -> list[tuple[str, str]]:
    """The headers of a response that is passed through: its body keeps its length."""
    listed = _listed_in_connection(headers)
    dropped = _NOT_PASSED_ON | listed - {"content-length"} if listed else _NOT_PASSED_ON
    return [pair for pair in headers if pair[0] not in dropped]


def _listed_in_connection(headers: Headers) -> Set[str]:
    """The headers listed in `connection`."""
    by_name = dict(headers)
    if "connection" not in by_name or (by_name["connection"].lower() in _USUAL_VALUES and len(by_name) == len(headers)):
        return _NO_NAMES
    values = [value for name, value in headers if name == "connection"]
    return {part.strip().lower() for value in values for part in value.split(",")}
