"""Applies the operator's rules to a parsed request."""

from __future__ import annotations

from carpool.core.keys import VirtualKey
from carpool.core.ports import Parsed, RawRequest
from carpool.engine import Upstream
from carpool.frontends.proxy.parse_head import HeadFacts
from carpool.planners.access.profiles import completed
from carpool.planners.options import Options
from carpool.planners.rules import Facts, RuleBook, decide, is_subagent

MOST = 64  # kinds of calls cached per head
LONGEST = 256  # characters of a cached model name


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


class RuleApplier:
    """Applies the rules to all calls. If they depend neither on the time nor on the size of a call, the result is
    cached with the head, for later calls of the same kind."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book or None
        self._steady = book.steady

    def apply_rules(self, head: HeadFacts, raw: RawRequest, parsed: Parsed, options: Options, now: float) -> Options:
        upstream, key = head.upstream, None if head.guest is None else head.guest.key
        assert upstream is not None
        if self._book is None and key is None:
            return options
        if not self._steady or options.deadline is not None or len(parsed.model) > LONGEST:
            return apply_rules(self._book, key, upstream, raw, parsed, options, now)
        kind, cache = (parsed.endpoint, parsed.model, parsed.stream, parsed.tool_turn), head.memory.ruled
        ruled = cache.get(kind)
        if ruled is None:
            if len(cache) >= MOST:  # clients choose the model names
                cache.clear()
            ruled = cache[kind] = apply_rules(self._book, key, upstream, raw, parsed, options, now)
        return ruled


def apply_rules(
    book: RuleBook | None,
    key: VirtualKey | None,
    upstream: Upstream,
    raw: RawRequest,
    parsed: Parsed,
    options: Options,
    now: float,
) -> Options:
    """The client's options, changed by the rules and the profile of its key."""
    ruled = options
    if book is not None:
        ruled = decide(facts_of(upstream, raw, parsed, options), options, book, now).options
    return ruled if key is None else completed(key, options, ruled, now)
