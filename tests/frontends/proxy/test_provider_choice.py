"""Which provider a request goes to."""

import json
from typing import Any, cast

import pytest

from carpool.core.errors import NoProvider
from carpool.core.model import Headers
from carpool.dialects import dialect_of_request
from carpool.dialects import get as get_dialect
from carpool.engine import Upstream
from carpool.planners.access.providers import choose
from tests.support.sockets import Peer, Script, ask, provider, proxied, request

NOBODY = cast("Any", None)


def upstreams(**speaks: str) -> dict[str, Upstream]:
    return {
        name: Upstream(name, f"https://{name}.example", get_dialect(dialect), NOBODY)
        for name, dialect in speaks.items()
    }


BOTH = upstreams(anthropic="anthropic", openai="openai")
VERSION = ("anthropic-version", "2023-06-01")
BEARER = ("authorization", "Bearer k")
KEY = ("x-api-key", "k")
AZURE = ("api-key", "k")
ANTHROPICS = ("authorization", "Bearer sk-ant-api03-k")


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/messages", (), "anthropic"),
        ("/v1/messages", (BEARER,), "anthropic"),
        ("/v1/messages/batches/x/results", (BEARER,), "anthropic"),
        ("/v1/messages/count_tokens", (KEY,), "anthropic"),
        ("/v1/models", (VERSION, BEARER), "anthropic"),
        ("/v1/models", (KEY,), "anthropic"),
        ("/v1/files", (KEY,), "anthropic"),
        ("/", (KEY,), "anthropic"),
        ("/v1/skills", (VERSION, BEARER), "anthropic"),
        ("/v1/chat/completions", (BEARER,), "openai"),
        ("/v1/chat/completions", (KEY,), "openai"),
        ("/v1/chat/completions", (VERSION, BEARER), "anthropic"),
        ("/v1/responses", (BEARER,), "openai"),
        ("/v1/responses/resp_1/cancel", (), "openai"),
        ("/v1/embeddings", (BEARER,), "openai"),
        ("/v1/completions", (BEARER,), "openai"),
        ("/v1/moderations", (BEARER,), "openai"),
        ("/v1/models", (BEARER,), "openai"),
        ("/v1/models/gpt-x", (), "openai"),
        ("/v1/files/file-1/content", (BEARER,), "openai"),
        ("/v1/batches", (BEARER,), "openai"),
        ("/v1/models/x:generateContent", (("x-goog-api-key", "k"),), "gemini"),
        ("/v1beta/models", (("x-goog-api-key", "k"),), "gemini"),
        ("/v1/unheard-of", (BEARER,), "openai"),
        ("/v1/unheard-of/of/1?x=y", (("authorization", "bearer k"),), "openai"),
        ("/v1/unheard-of", (AZURE,), "openai"),
        ("/v1/unheard-of", (BEARER, KEY), "anthropic"),
        ("/v1/unheard-of", (BEARER, VERSION), "anthropic"),
        ("/v1/unheard-of", (BEARER, ("anthropic-beta", "new")), "anthropic"),
        ("/v1/unheard-of", (ANTHROPICS,), "anthropic"),
        ("/v1/models", (ANTHROPICS,), "anthropic"),
        ("/v1/files/file_1", (ANTHROPICS,), "anthropic"),
        ("/v1/complete", (BEARER,), "anthropic"),
        ("/v1/organizations/workspaces", (BEARER,), "anthropic"),
        ("/v1/messagesx", (BEARER,), "openai"),
        ("/chat/completions", (BEARER,), "openai"),
        ("/responses/resp_1", (BEARER,), "openai"),
        ("/models", (AZURE,), "openai"),
        ("/models", (ANTHROPICS,), "anthropic"),
        ("/chat/completions", (), None),
        ("/", (), None),
        ("/", (BEARER,), None),
        ("/v1/", (BEARER,), None),
        ("/v1/unheard-of", (), None),
        ("/v1/unheard-of", (("authorization", "Basic k"),), None),
        ("/v2/unheard-of", (BEARER,), None),
        ("/messages", (BEARER,), None),
    ],
)
def test_the_wire_tells_the_dialect(path: str, headers: Headers, expected: str | None) -> None:
    assert dialect_of_request(path, headers) == expected
    if expected in BOTH:
        assert choose(None, path, headers, BOTH).provider == expected
    else:
        with pytest.raises(NoProvider):
            choose(None, path, headers, BOTH)


def test_a_name_wins_over_the_wire() -> None:
    assert choose("openai", "/v1/messages", (VERSION,), BOTH).provider == "openai"


def test_a_wrong_name_is_told_the_right_ones() -> None:
    with pytest.raises(NoProvider, match="no provider 'opnai' here"):
        choose("opnai", "/v1/messages", (), BOTH)


def test_where_nothing_tells_the_client_learns_how_to() -> None:
    with pytest.raises(NoProvider, match="x-carpool-provider"):
        choose(None, "/", (), BOTH)


def test_a_dialect_that_nobody_speaks_is_named() -> None:
    with pytest.raises(NoProvider, match="uses the API gemini"):
        choose(None, "/v1beta/models", (("x-goog-api-key", "k"),), BOTH)


def test_the_only_provider_gets_everything() -> None:
    only = upstreams(somewhere="anthropic")
    assert choose(None, "/", (), only).provider == "somewhere"
    assert choose(None, "/v1/chat/completions", (BEARER,), only).provider == "somewhere"


def test_among_several_of_a_dialect_the_default_is_taken() -> None:
    several = upstreams(groq="openai", xai="openai", anthropic="anthropic")
    assert choose(None, "/v1/responses", (), several, {"xai"}).provider == "xai"
    assert choose(None, "/v1/messages", (), several, {"xai"}).provider == "anthropic"
    assert choose("groq", "/v1/responses", (), several, {"xai"}).provider == "groq"


def test_without_a_mark_the_namesake_of_the_dialect_is_the_default() -> None:
    assert choose(None, "/v1/responses", (), upstreams(groq="openai", openai="openai")).provider == "openai"


@pytest.mark.parametrize("marked", [(), ("groq", "xai")])
def test_without_one_default_the_client_must_choose(marked: tuple[str, ...]) -> None:
    with pytest.raises(NoProvider, match="Several providers have the API openai: groq, xai"):
        choose(None, "/v1/responses", (), upstreams(groq="openai", xai="openai"), marked)


# ---------------------------------------------------------------- over HTTP


def named(name: str) -> Script:
    async def script(peer: Peer) -> None:
        while True:
            message = await peer.request()
            body = json.dumps({"name": name, "line": message.first}).encode()
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    return script


@pytest.mark.parametrize(
    ("line", "headers", "expected"),
    [
        ("GET /v1/models", ("Anthropic-Version: 1",), ("a", "GET /v1/models HTTP/1.1")),
        ("GET /v1/models?limit=1", ("Authorization: Bearer k",), ("o", "GET /v1/models?limit=1 HTTP/1.1")),
        ("GET /@provider=o/v1/models", ("X-Api-Key: k",), ("o", "GET /v1/models HTTP/1.1")),
        ("GET /@provider=o/v1/x", ("X-Carpool-Provider: a",), ("a", "GET /v1/x HTTP/1.1")),
        ("GET /v1/batches", (), ("o", "GET /v1/batches HTTP/1.1")),
        ("GET /v1/new?x=1", ("Authorization: Bearer k",), ("o", "GET /v1/new?x=1 HTTP/1.1")),
        ("POST /v1/new/1/run", ("Authorization: Bearer k",), ("o", "POST /v1/new/1/run HTTP/1.1")),
        ("DELETE /v1/new/1", ("Authorization: Bearer k",), ("o", "DELETE /v1/new/1 HTTP/1.1")),
        ("GET /openai/v1/new", ("Authorization: Bearer k",), ("o", "GET /v1/new HTTP/1.1")),
        ("GET /v1/new", ("Authorization: Bearer k", "Anthropic-Version: 1"), ("a", "GET /v1/new HTTP/1.1")),
        ("GET /v1/new", ("Authorization: Bearer sk-ant-k",), ("a", "GET /v1/new HTTP/1.1")),
        ("GET /models", ("Authorization: Bearer k",), ("o", "GET /v1/models HTTP/1.1")),
    ],
)
async def test_requests_reach_their_provider_with_one_version_in_the_path(
    line: str, headers: tuple[str, ...], expected: tuple[str, str]
) -> None:
    async with provider(named("a")) as (first, _), provider(named("o")) as (second, _):
        bases = {"a": ("anthropic", first), "o": ("openai", second + "/v1")}
        async with proxied(bases) as house:
            answer = json.loads((await ask(house.url, request(line, *headers))).body)
    assert (answer["name"], answer["line"]) == expected


@pytest.mark.parametrize(
    ("line", "header", "shape"),
    [
        ("GET /v1/messages", "X-Carpool-Provider: nobody", "type"),
        ("GET /v1/responses", "X-Carpool-Provider: nobody", "error"),
        ("GET /", "Accept: */*", "type"),
        ("GET /@provider=nobody/v1/new", "Authorization: Bearer k", "error"),
        ("GET /@provider=nobody/v1/new", "Authorization: Bearer sk-ant-k", "type"),
    ],
)
async def test_without_a_provider_it_is_a_404_in_the_words_of_the_wire(line: str, header: str, shape: str) -> None:
    bases = {"a": ("anthropic", "http://127.0.0.1:9"), "o": ("openai", "http://127.0.0.1:9/v1")}
    async with proxied(bases) as house:
        answer = await ask(house.url, request(line, header))
    said = json.loads(answer.body)
    assert answer.status == 404
    assert next(iter(said)) == shape
    assert "provider" in said["error"]["message"].lower()


@pytest.mark.parametrize(("path", "status"), [("/v1/responses", 426), ("/v1/realtime", 501), ("/v1/messages", 501)])
async def test_a_websocket_is_refused(path: str, status: int) -> None:
    upgrade = ("Connection: Upgrade", "Upgrade: WebSocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
    bases = {"a": ("anthropic", "http://127.0.0.1:9"), "o": ("openai", "http://127.0.0.1:9/v1")}
    async with proxied(bases) as house:
        answer = await ask(house.url, request(f"GET {path}", "Authorization: Bearer k", *upgrade))
    assert answer.status == status
    assert "WebSocket" in json.loads(answer.body)["error"]["message"]
