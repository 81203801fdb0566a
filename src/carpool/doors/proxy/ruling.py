"""The rules of the house, applied to a request that was understood."""

from __future__ import annotations

from carpool.doors.proxy.profiles import completed
from carpool.engine import Upstream
from carpool.keys import VirtualKey
from carpool.options import Options
from carpool.ports import Parsed, RawRequest
from carpool.rules import Facts, RuleBook, decide, is_subagent


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
