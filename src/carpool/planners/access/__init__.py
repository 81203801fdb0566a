"""Access: who may ask for what, and what a request gets. Pure.

`hosts` decides which host names are answered, `providers` which provider a request is for, `virtual_keys` who holds a
key and what it allows, `options` what the client asked for, `rules` what the operator adds or limits.

A request is understood, ruled and decided in three steps, which proxy, library and `serve --check` share: `understand`
parses it, `rules.apply_rules` completes its options, and `routing.route` chooses the lane of the call that
`call_of` makes of both.
"""

from __future__ import annotations

from carpool.core.errors import BadCall
from carpool.core.model import Call
from carpool.core.ports import Parsed, RawRequest
from carpool.core.upstream import Upstream
from carpool.planners.access.options import Options

LONGEST_MODEL = 256  # characters; it goes into the ledger and the log


def understand(upstream: Upstream, raw: RawRequest) -> Parsed:
    """Parse a request. Raises `BadCall` if it is invalid."""
    parsed = upstream.dialect.parse(raw)
    if len(parsed.model) > LONGEST_MODEL:
        raise BadCall(f"`model` has {len(parsed.model)} characters; the name of a model has at most {LONGEST_MODEL}.")
    return parsed


def call_of(
    upstream: Upstream,
    parsed: Parsed,
    options: Options,
    arrived: float,
    *,
    ticket: int = 0,
    credential: str = "",
    payer: str = "",
    fingerprint: int = 0,
) -> Call:
    """The call of a parsed request, after the rules."""
    return Call(
        ticket=ticket,
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
        fingerprint=fingerprint,
    )
