"""The rules of the house, applied to a request that was understood."""

from __future__ import annotations

from carpool.doors.proxy.greeting import Greeting
from carpool.doors.proxy.profiles import completed
from carpool.engine import Upstream
from carpool.keys import VirtualKey
from carpool.options import Options
from carpool.ports import Parsed, RawRequest
from carpool.rules import Facts, RuleBook, decide, is_subagent

MOST = 64  # kinds of calls remembered for one head
LONGEST = 256  # of the model's name in one of them


def facts_of(upstream: Upstream, raw: RawRequest, parsed: Parsed, options: Options) -> Facts:
    headers = dict(raw.headers)
    return Facts(
        dialect=upstream.dialect.name,
        provider=upstream.provider.lower(),
        endpoint=parsed.endpoint.lower(),
        model=parsed.model.lower(),
        user_agent=headers.get("user-agent", "").lower(),
        headers=headers,
        tags=options.tags,
        streaming=parsed.stream,
        tool_turn=parsed.tool_turn,
        subagent=is_subagent(headers),
        has_budget=options.timed,
        size=len(raw.body),
    )


class House:
    """The rules for everybody's calls. Where neither the hour nor the length of a call matters to them, what they make
    of it is remembered for the next of its kind, under the head that both have."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book or None
        self._steady = book.steady

    def ruled(self, greeting: Greeting, raw: RawRequest, parsed: Parsed, options: Options, now: float) -> Options:
        upstream, key = greeting.upstream, None if greeting.guest is None else greeting.guest.key
        assert upstream is not None
        if self._book is None and key is None:
            return options
        if not self._steady or options.deadline is not None or len(parsed.model) > LONGEST:
            return ruled(self._book, key, upstream, raw, parsed, options, now)
        kind, known = (parsed.endpoint, parsed.model, parsed.stream, parsed.tool_turn), greeting.memory.ruled
        found = known.get(kind)
        if found is None:
            if len(known) >= MOST:  # models are named by clients
                known.clear()
            found = known[kind] = ruled(self._book, key, upstream, raw, parsed, options, now)
        return found


def ruled(
    book: RuleBook | None,
    key: VirtualKey | None,
    upstream: Upstream,
    raw: RawRequest,
    parsed: Parsed,
    options: Options,
    now: float,
) -> Options:
    """What the client asked for, and what the rules and the profile of its key make of it."""
    found = options
    if book is not None:
        found = decide(facts_of(upstream, raw, parsed, options), options, book, now).options
    return found if key is None else completed(key, options, found, now)
