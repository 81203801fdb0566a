"""Heads of requests, read once: whoever is recognised is treated as if it had been met for the first time."""

import random
from typing import Any

import pytest

from carpool.core.errors import BadCall
from carpool.frontends.intake import end_to_end
from carpool.frontends.proxy import parse_head as module
from carpool.frontends.proxy.parse_head import HeadFacts, HeadParser, request_headers
from carpool.planners.access.providers import ConfiguredKeys
from tests.support.sockets import Peer, ask, provider, proxied, request

from .test_provider_choice import BOTH

BODY = b'{"model":"m","max_tokens":5,"messages":[]}'


def scope(*headers: tuple[bytes, bytes], path: bytes = b"/v1/messages", method: str = "POST") -> dict[str, Any]:
    return {"method": method, "raw_path": path, "headers": [(b"host", b"localhost"), *headers]}


def greeter(**keys: tuple[str, str]) -> HeadParser:
    return HeadParser(BOTH, frozenset(), ConfiguredKeys(keys))


def test_requests_that_differ_in_their_own_headers_only_share_a_greeting() -> None:
    one = greeter()
    first = scope((b"x-api-key", b"k"), (b"content-length", b"5"), (b"traceparent", b"a"), (b"x-beta", b"1"))
    second = scope((b"x-api-key", b"k"), (b"content-length", b"66"), (b"traceparent", b"b"), (b"x-beta", b"1"))
    greeting = one.facts_of_head(first)
    assert one.facts_of_head(second) is greeting
    assert greeting.headers_of(first) == request_headers(first["headers"])
    assert greeting.headers_of(second) == request_headers(second["headers"])


@pytest.mark.parametrize(
    "other",
    [
        scope((b"x-api-key", b"other"), (b"content-length", b"5")),
        scope((b"x-api-key", b"k"), (b"content-length", b"5"), (b"x-carpool-budget", b"1h")),
        scope((b"x-api-key", b"k"), (b"content-length", b"5"), (b"x-stainless-retry-count", b"1")),
        scope((b"x-api-key", b"k"), (b"content-length", b"5"), path=b"/@budget=1h/v1/messages"),
        scope((b"x-api-key", b"k"), (b"content-length", b"5"), method="GET"),
        scope((b"content-length", b"5"), (b"x-api-key", b"k")),
        scope((b"x-api-key", b"k")),
    ],
)
def test_whatever_else_differs_is_another_greeting(other: dict[str, Any]) -> None:
    one = greeter()
    known = one.facts_of_head(scope((b"x-api-key", b"k"), (b"content-length", b"5")))
    assert one.facts_of_head(other) is not known
    assert one.facts_of_head(other).headers_of(other) == _less_carpools(other)


def _less_carpools(one: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(pair for pair in request_headers(one["headers"]) if not pair[0].startswith("x-carpool-"))


def test_a_head_that_is_refused_is_refused_again() -> None:
    one, foreign = greeter(), {**scope(), "headers": [(b"host", b"evil.example")]}
    for _ in range(2):
        with pytest.raises(BadCall, match="does not answer to the name"):
            one.facts_of_head(foreign)


NAMES = (
    *("x-api-key", "authorization", "anthropic-version", "content-length", "content-encoding", "traceparent"),
    *("x-request-id", "connection", "x-carpool-tags.y", "prefer", "user-agent", "origin", "idempotency-key"),
)
VALUES = ("a=1", "b=2", "gzip", "respond-async", "traceparent", "keep-alive", "http://evil.example")


def test_a_greeting_from_memory_is_what_a_fresh_one_would_be() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    old = greeter(anthropic=("x-api-key", "of the house"))
    for _ in range(3000):
        asked = scope(
            *[(dice.choice(NAMES).encode(), dice.choice(VALUES).encode()) for _ in range(dice.randrange(5))],
            path=dice.choice([b"/v1/messages", b"/@tags.x=1/v1/messages", b"/carpool/health", b"/v1/responses"]),
        )
        remembered = old.facts_of_head(asked)
        fresh = greeter(anthropic=("x-api-key", "of the house")).facts_of_head(asked)
        assert _facts(remembered, asked) == _facts(fresh, asked)
        if remembered.forwarded is not None:
            assert remembered.forwarded == tuple(end_to_end(fresh.headers_of(asked)))


def _facts(greeting: HeadFacts, asked: dict[str, Any]) -> tuple[object, ...]:
    fields = (getattr(greeting, name) for name in HeadFacts.__struct_fields__)
    return (*fields, greeting.headers_of(asked))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    one = greeter()
    for number in range(100):
        one.facts_of_head(scope((b"x-api-key", b"%d" % number)))
    one.facts_of_head(scope((b"x-api-key", b"k"), (b"x-long", b"x" * module.MAX_BYTES)))
    one.facts_of_head(scope((b"x-api-key", b"k"), path=b"/v1/messages?" + b"x" * module.MAX_BYTES))
    assert len(one._known) == 10


def test_secrets_are_not_shown() -> None:
    assert "sk-secret" not in repr(greeter().facts_of_head(scope((b"x-api-key", b"sk-secret"))))


async def test_each_request_reaches_the_provider_with_its_own_headers() -> None:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    async with provider(script) as (base, heard), proxied(base) as house:
        for number in range(3):
            own = (f"X-Request-Id: r{number}", "X-Api-Key: k", f"Traceparent: t{number}")
            body = BODY + b" " * number
            assert (await ask(house.url, request("POST /v1/messages", *own, body=body))).status == 200
    said = [(one.header("x-request-id"), one.header("traceparent"), one.body) for one in heard]
    assert said == [([f"r{number}"], [f"t{number}"], BODY + b" " * number) for number in range(3)]
