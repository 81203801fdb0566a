"""What would become of a request: the provider, the rule and the lane, without sending anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from carpool.capabilities import Capabilities
from carpool.cli.setting_up import defaults_of, upstreams_of
from carpool.config import Config
from carpool.doors.options import PREFIX, from_headers, split_path
from carpool.doors.proxy.choosing import choose
from carpool.doors.proxy.ruling import facts_of
from carpool.engine import Upstream
from carpool.errors import BadCall, CarpoolError, ConfigError
from carpool.forecast import Forecast
from carpool.model import Call, Lane
from carpool.options import Options
from carpool.ports import Parsed, RawRequest, WireRequest, WireResponse
from carpool.routing import Decision, noted, route
from carpool.rules import Ruling, Verdict, decide
from carpool.rules.deciding import span

_MAY = "It may take this lane."
_NO_FLEX = "Its endpoint, its own service tier or its key keeps it from this lane."
_WHOLE = frozenset({"method", "path", "headers", "body"})


@dataclass(frozen=True, slots=True)
class Case:
    """A request from a file, and what it asks for in its path and headers."""

    raw: RawRequest
    options: Options


@dataclass(frozen=True, slots=True)
class Explained:
    provider: str
    base_url: str
    model: str | None
    rule: str | None
    verdicts: list[Verdict]
    options: Options
    lane: str
    reason: str
    batch: str | None = None  # whether it may ride one, or why not
    flex: str | None = None

    def rows(self) -> list[tuple[str, str]]:
        return [(name, str(value)) for name, value in self.document().items() if value is not None and name != "rules"]

    def document(self) -> dict[str, Any]:
        options = self.options
        return {
            "provider": f"{self.provider} at {self.base_url}",
            "model": self.model,
            "rule": self.rule or "none",
            "budget": None if options.budget is None else span(options.budget),
            "tags": ", ".join(f"{name}={value}" for name, value in options.tags.items()) or None,
            "on_disconnect": options.on_disconnect,
            "lane": self.lane,
            "reason": self.reason,
            "batch": self.batch,
            "flex": self.flex,
            "rules": [{"name": one.rule, "matched": one.matched, "because": one.because} for one in self.verdicts],
        }


# ---------------------------------------------------------------- the request


def read_case(path: Path) -> Case:
    """`{"method", "path", "headers", "body"}`, or the bare body of a call."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The request in {path} can't be read: {error}.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"The request in {path} must be a JSON object: a body, or method, path, headers and body.")
    if not document.keys() & {"path", "body"}:
        document = {"body": document}
    if unknown := sorted(document.keys() - _WHOLE):
        raise ConfigError(
            f"The request in {path} has {unknown[0][:60]!r}, which is none of {', '.join(sorted(_WHOLE))}."
        )
    try:
        return _case(document)
    except BadCall as error:
        raise ConfigError(f"The request in {path} would be refused: {error}") from error


def _case(document: dict[str, Any]) -> Case:
    body = document.get("body")
    given = document.get("headers") or {}
    if not isinstance(given, dict):
        raise BadCall("Its headers must be names with values.")
    headers = tuple((str(name).lower(), str(value)) for name, value in given.items())
    where = document.get("path") or _guessed_path(body)
    options, path = split_path(str(where).partition("?")[0])
    asked = tuple(pair for pair in headers if pair[0].startswith(PREFIX))
    kept = tuple(pair for pair in headers if not pair[0].startswith(PREFIX))
    if path == "/v1/messages" and not any(name == "anthropic-version" for name, _ in kept):
        kept = (*kept, ("anthropic-version", "2023-06-01"))
    content = body.encode() if isinstance(body, str) else b"" if body is None else msgspec.json.encode(body)
    method = str(document.get("method") or "POST").upper()
    raw = RawRequest(method, path, str(where).partition("?")[2], kept, content)
    return Case(raw, from_headers(asked).over(options))


def _guessed_path(body: Any) -> str:
    body = body if isinstance(body, dict) else {}
    if "input" in body:
        return "/v1/embeddings" if "embed" in str(body.get("model")) else "/v1/responses"
    is_claude = str(body.get("model")).startswith("claude") or "max_tokens" in body
    return "/v1/messages" if is_claude else "/v1/chat/completions"


# ---------------------------------------------------------------- its way


def explain(config: Config, case: Case, now: float) -> Explained:
    try:
        return _explain(config, case, now)
    except ConfigError:
        raise
    except CarpoolError as error:
        raise ConfigError(f"This request would be refused with status {error.status}: {error}") from error


def _explain(config: Config, case: Case, now: float) -> Explained:
    raw, options = case.raw, case.options
    upstreams = upstreams_of(config, lambda one: _Nowhere())
    upstream = choose(options.provider, raw.path, raw.headers, upstreams, defaults_of(config))
    if not upstream.dialect.handles(raw.method, raw.path):
        reason = "carpool does not batch this endpoint: it passes through untouched, and no rule is asked."
        return Explained(upstream.provider, upstream.base_url, None, None, [], options, "now", reason)
    parsed = upstream.dialect.parse(raw)
    ruling = decide(facts_of(upstream, raw, parsed, options), options, config.book, now)
    abilities = Capabilities({one.name: one.models for one in config.providers})
    asked = (upstream.provider, upstream.dialect.seller, parsed.model)
    no_batch = parsed.unbatchable or abilities.against(Lane.BATCH, *asked)
    no_flex = abilities.against(Lane.FLEX, *asked) if parsed.flexible and options.key is None else _NO_FLEX
    decision = _decision(config, upstream, parsed, ruling, now, no_batch, no_flex)
    return Explained(
        upstream.provider,
        upstream.base_url,
        parsed.model,
        ruling.rule,
        ruling.explanation(),
        ruling.options,
        str(decision.lane),
        decision.reason,
        no_batch or _MAY,
        no_flex or _MAY,
    )


def _decision(
    config: Config,
    upstream: Upstream,
    parsed: Parsed,
    ruling: Ruling,
    now: float,
    no_batch: str | None,
    no_flex: str | None,
) -> Decision:
    """As the engine would decide for a conversation that is not warm, before any refusal taught it more."""
    options = ruling.options
    call = Call(
        ticket=0,
        provider=upstream.provider,
        dialect=upstream.dialect.name,
        endpoint=parsed.endpoint,
        body=parsed.body,
        headers=parsed.headers,
        credential="",
        model=parsed.model,
        arrived=now,
        deadline=options.until(now),
        stream=parsed.stream,
        max_output_tokens=parsed.max_output_tokens,
        unbatchable=parsed.unbatchable,
        lane=options.lane,
        insists=options.insists,
        note=options.note,
        flexible=parsed.flexible,
    )
    found = route(call, config.policy, Forecast(), now, can_batch=no_batch, can_flex=no_flex, default=Lane.NOW)
    return noted(call, found)


class _Nowhere:
    """A wire for upstreams that are only asked who they are."""

    async def send(self, request: WireRequest) -> WireResponse:
        raise ConfigError("Nothing is sent while the config is checked.")

    async def aclose(self) -> None:
        return None
