"""Under which names carpool may be asked, who may speak for others, and what of that reaches the provider."""

from __future__ import annotations

import asyncio
import json

import pytest

import carpool.engine.batch.collect
from carpool.core.errors import BadCall, Misdirected
from carpool.frontends.proxy.log import LogLine
from carpool.planners.access.providers import Hosts
from tests.support.sockets import Message, Peer, Script, ask, provider, proxied, request

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
PATHS = ("/v1/messages", "/v1/models", "/", "/carpool/healthz", "/carpool/stats", "/@budget=10m/v1/messages")


def welcome(hosts: Hosts, name: str, *more: tuple[str, str], trusted: bool = False) -> bool:
    try:
        hosts.check((("host", name), *more), trusted=trusted)
    except Misdirected:
        return False
    return True


LOCAL = Hosts()
NAMED = Hosts(local=False, allowed=["carpool.example.com", "*.corp.example", "10.1.2.3", "2001:db8::1"])


@pytest.mark.parametrize(
    "name",
    [
        *("127.0.0.1", "127.0.0.1:8787", "127.8.9.1:1", "localhost", "LocalHost:8787", "localhost.", "localhost:"),
        *("[::1]", "[::1]:8787", "[0:0:0:0:0:0:0:1]:1", "[::ffff:127.0.0.1]:8787"),
    ],
)
def test_local_names_are_known(name: str) -> None:
    assert welcome(LOCAL, name)


FOREIGN = (
    *("evil.example", "evil.example:8787", "127.0.0.1.evil.example", "localhost.evil.example", "evil.localhost"),
    *("localhost:evil", "localhost@evil.example", "evil.example@localhost", "localhost, evil.example", "[::1].evil"),
    *("", " ", ":8787", "[::1", "::1]", "[::2]", "10.0.0.1", "0.0.0.0", "0", "2130706433", "0x7f.1", "127.0.0.1 evil"),
    *(
        "localhost/evil",
        "localhost\\evil",
        "http://localhost",
        "[localhost]",
        "127.0.0.1:8787:8787",
        "xn--lcalhost-8of",
    ),
)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_names_are_not(name: str) -> None:
    assert not welcome(LOCAL, name)


def test_names_that_are_added() -> None:
    for name in ("carpool.example.com", "CARPOOL.example.com.:443", "a.corp.example", "a.b.corp.example:1", "10.1.2.3"):
        assert welcome(NAMED, name)
    assert welcome(NAMED, "[2001:DB8:0::1]:8787")
    for name in ("corp.example", ".corp.example", "evilcorp.example", "localhost", "127.0.0.1", "10.1.2.30"):
        assert not welcome(NAMED, name)
    assert welcome(Hosts(allowed=["carpool.example.com"]), "localhost")  # beside the local names
    assert not welcome(Hosts(allowed=["carpool.example.com"]), "evil.example")


def test_off_loopback_any_name_will_do_unless_some_are_named() -> None:
    anywhere = Hosts(local=False)
    assert welcome(anywhere, "evil.example")
    anywhere.check((), trusted=False)
    with pytest.raises(BadCall, match="several hosts"):
        anywhere.check((("host", "a"), ("host", "a")), trusted=False)


@pytest.mark.parametrize("headers", [(), (("host", "localhost"), ("host", "localhost"))])
def test_exactly_one_host_is_named(headers: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(BadCall, match="host"):
        LOCAL.check(headers, trusted=False)


# ---------------------------------------------------------------- who speaks for others

FRONT = Hosts(local=False, allowed=["carpool.example.com"], trusted=["10.0.0.0/8", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.9", [], "192.0.2.9"),
        ("192.0.2.9", ["198.51.100.1"], "192.0.2.9"),  # anybody can say so
        ("10.1.1.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.1.1.1", ["6.6.6.6, 198.51.100.1"], "198.51.100.1"),  # only the last hop is ours to believe
        ("10.1.1.1", ["6.6.6.6", "198.51.100.1, 10.2.2.2"], "198.51.100.1"),
        ("10.1.1.1", ["nonsense"], "10.1.1.1"),
        ("10.1.1.1", [""], "10.1.1.1"),
        ("::ffff:10.1.1.1", ["2001:db8::7"], "2001:db8::7"),
        ("fd00::1", ["198.51.100.1"], "198.51.100.1"),
        ("127.0.0.1", ["198.51.100.1"], ""),
        (None, [], ""),
    ],
)
def test_whose_request_it_is(peer: str | None, forwarded: list[str], address: str) -> None:
    headers = [(b"x-forwarded-for", one.encode()) for one in forwarded]
    assert FRONT.client(None if peer is None else (peer, 5), headers) == address


def test_only_a_trusted_server_says_the_name() -> None:
    said = ("x-forwarded-host", "carpool.example.com")
    assert welcome(FRONT, "10.0.0.5:8787", said, trusted=True)
    assert not welcome(FRONT, "10.0.0.5:8787", said, trusted=False)
    assert not welcome(FRONT, "carpool.example.com", ("x-forwarded-host", "evil.example"), trusted=True)
    assert not welcome(FRONT, "x", ("x-forwarded-host", "carpool.example.com, evil.example"), trusted=True)
    assert FRONT.trusts(("10.2.3.4", 1))
    assert not FRONT.trusts(("11.2.3.4", 1))
    assert not FRONT.trusts(None)
    assert not LOCAL.trusts(("10.2.3.4", 1))


# ---------------------------------------------------------------- on the wire


def answering(answer: bytes = OK) -> Script:
    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.say(answer)

    return script


def told(message: Message) -> str:
    return str(json.loads(message.body)["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_is_answered_under_a_foreign_name(path: str) -> None:
    async with provider(answering()) as (url, heard), proxied(url) as house:
        foreign = f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nx-api-key: k\r\n\r\n".encode()
        answer = await ask(house.url, foreign)
        assert answer.status == 421
        assert "does not answer to the name 'evil.example'" in told(answer)
        assert (await ask(house.url, request(f"GET {path}", "x-api-key: k"))).status != 421
        assert all(message.header("host") == [url.removeprefix("http://")] for message in heard)


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://evil.example/v1/models", "127.0.0.1", 421),  # the target's name holds (RFC 9112, 3.2.2)
        ("http://evil.example:80/v1/models", "127.0.0.1", 421),
        ("https://evil.example/v1/models", "127.0.0.1", 421),
        ("http://user@evil.example/v1/models", "127.0.0.1", 421),
        ("http://127.0.0.1/v1/models", "evil.example", 200),
        ("http://localhost:8787/v1/models", "", 200),
        ("http://[::1]:8787/v1/models", "evil.example", 200),
        ("http://evil.example", "127.0.0.1", 400),
        ("//evil.example/v1/models", "127.0.0.1", 200),  # a path like any other, at the provider
        ("*", "127.0.0.1", 400),
    ],
)
async def test_targets_that_name_a_host(target: str, host: str, status: int) -> None:
    async with provider(answering()) as (url, heard), proxied(url) as house:
        answer = await ask(house.url, f"OPTIONS {target} HTTP/1.1\r\nHost: {host}\r\nx-api-key: k\r\n\r\n".encode())
        assert answer.status == status
        assert len(heard) == (status == 200)


async def test_a_tunnel_is_not_made() -> None:
    async with provider(answering()) as (url, heard), proxied(url) as house:
        place = url.removeprefix("http://")
        answer = await ask(house.url, f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
        assert answer.status == 400
        assert heard == []


async def test_a_request_without_a_host_is_refused() -> None:
    async with provider(answering()) as (url, heard), proxied(url) as house:
        for sent in (
            b"GET /v1/models HTTP/1.1\r\nx-api-key: k\r\n\r\n",
            b"GET /v1/models HTTP/1.0\r\nx-api-key: k\r\n\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nx-api-key: k\r\n\r\n",
        ):
            assert (await ask(house.url, sent)).status == 400
        assert heard == []


FORWARDED = ("X-Forwarded-For: 198.51.100.7", "X-Forwarded-Proto: https", "Forwarded: for=198.51.100.7", "X-Real-Ip: 1")
CALL = json.dumps({"model": "claude-haiku-4-5", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]})


async def forwarded(hosts: Hosts, *headers: str) -> tuple[Message, list[LogLine]]:
    """What the provider heard of a call with these headers, and what the log says."""
    lines: list[LogLine] = []
    async with provider(answering()) as (url, heard), proxied(url, hosts=hosts, note=lines.append) as house:
        sent = request("POST /v1/messages", "x-api-key: k", "anthropic-version: 1", *headers, body=CALL.encode())
        assert (await ask(house.url, sent)).status == 200
        return heard[0], lines


async def test_what_a_client_says_of_its_way_passes_and_is_not_believed() -> None:
    heard, lines = await forwarded(LOCAL, *FORWARDED)
    assert heard.header("x-forwarded-for") == ["198.51.100.7"]
    assert heard.header("forwarded") == ["for=198.51.100.7"]
    assert [line.address for line in lines] == [""]


async def test_what_a_trusted_server_says_is_for_carpool_only() -> None:
    hosts = Hosts(allowed=["carpool.example.com"], trusted=["127.0.0.0/8"])
    heard, lines = await forwarded(hosts, *FORWARDED, "X-Forwarded-Host: carpool.example.com", "traceparent: t")
    names = {name for name, _ in heard.headers}
    assert not names & {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "x-real-ip"}
    assert heard.header("traceparent") == ["t"]
    assert heard.header("x-api-key") == ["k"]
    assert [line.address for line in lines] == ["198.51.100.7"]


async def test_a_trusted_server_can_not_be_asked_under_a_foreign_name() -> None:
    hosts = Hosts(allowed=["carpool.example.com"], trusted=["127.0.0.0/8"])
    async with provider(answering()) as (url, heard), proxied(url, hosts=hosts) as house:
        sent = request("GET /v1/models", "x-api-key: k", "X-Forwarded-Host: evil.example")
        assert (await ask(house.url, sent)).status == 421
        assert heard == []


# ---------------------------------------------------------------- upstreams are those of the config, and no others


@pytest.mark.parametrize(
    "status", ["301 Moved Permanently", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
)
@pytest.mark.parametrize("kind", ["call", "passing"])
async def test_a_redirect_is_the_clients_to_follow(status: str, kind: str) -> None:
    async with provider(answering()) as (elsewhere, strangers):
        moved = f"HTTP/1.1 {status}\r\nlocation: {elsewhere}/v1/messages\r\ncontent-length: 0\r\n\r\n".encode()
        async with provider(answering(moved)) as (url, heard), proxied(url) as house:
            line = "POST /v1/messages" if kind == "call" else "GET /v1/models"
            body = CALL.encode() if kind == "call" else b""
            answer = await ask(house.url, request(line, "x-api-key: k", "anthropic-version: 1", body=body))
            assert (answer.status, answer.header("location")) == (int(status[:3]), [f"{elsewhere}/v1/messages"])
            assert (len(heard), strangers) == (1, [])


@pytest.mark.parametrize(
    "more",
    [
        ("GET /@provider=ELSEWHERE/v1/models", ()),
        ("GET /@provider=http:%2f%2fELSEWHERE/v1/models", ()),
        ("GET /v1/models", ("x-carpool-provider: ELSEWHERE",)),
        ("GET /v1/models", ("x-carpool-base-url: http://ELSEWHERE",)),
        ("GET http://ELSEWHERE/v1/models", ()),
        ("GET //ELSEWHERE/v1/models", ()),
        ("GET /@ELSEWHERE/v1/models", ()),
        ("GET /\\ELSEWHERE/v1/models", ()),
        ("GET /..//ELSEWHERE/v1/models", ()),
        ("GET /v1/models?url=http://ELSEWHERE", ()),
        ("GET /v1/models#@ELSEWHERE", ()),
        ("GET /v1/models", ("x-forwarded-host: ELSEWHERE", "x-original-url: http://ELSEWHERE")),
        ("GET /v1/models", ("Proxy-Connection: keep-alive", "Forwarded: host=ELSEWHERE")),
    ],
)
async def test_nobody_is_asked_who_is_not_in_the_config(more: tuple[str, tuple[str, ...]]) -> None:
    async with provider(answering()) as (elsewhere, strangers), provider(answering()) as (url, heard):
        place = elsewhere.removeprefix("http://")
        line, headers = more
        async with proxied({"anthropic": ("anthropic", url), "openai": ("openai", url + "/v1")}) as house:
            said = [one.replace("ELSEWHERE", place) for one in headers]
            answer = await ask(house.url, request(line.replace("ELSEWHERE", place), "x-api-key: k", *said))
            assert answer.status in (200, 400, 404, 421)
        assert strangers == []
        assert all(message.header("host") == [url.removeprefix("http://")] for message in heard)


async def test_a_batch_is_collected_where_it_was_bought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a redirect nor the address in the provider's answer leads the key elsewhere."""
    monkeypatch.setattr(carpool.engine.batch.collect, "RETRY_S", 0.02)
    async with provider(answering()) as (elsewhere, strangers):

        async def script(peer: Peer) -> None:
            while True:
                asked = await peer.request()
                if asked.first.startswith("GET /v1/messages/batches/msgbatch_1/results"):
                    moved = f"HTTP/1.1 307 Moved\r\nlocation: {elsewhere}/steal\r\ncontent-length: 0\r\n\r\n"
                    await peer.say(moved.encode())
                else:
                    batch = ended(f"{elsewhere}/steal", asked)
                    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(batch)}\r\n\r\n"
                    await peer.say(head.encode(), batch)

        async with provider(script) as (url, heard), proxied(url) as house:
            headers = (
                "x-api-key: k",
                "anthropic-version: 2023-06-01",
                "x-carpool-budget: 30m",
                "prefer: respond-async",
            )
            sent = request("POST /v1/messages", *headers, body=CALL.encode())
            assert (await ask(house.url, sent)).status == 202
            async with asyncio.timeout(20):
                while sum("/results" in message.first for message in heard) < 2:  # noqa: ASYNC110  tried again by now
                    await asyncio.sleep(0.02)
        assert strangers == []


def ended(results_url: str, asked: Message) -> bytes:
    """One ended batch, as the answer to a create or as the only one of a list."""
    batch = {
        "id": "msgbatch_1",
        "type": "message_batch",
        "processing_status": "ended",
        "request_counts": {"processing": 0, "succeeded": 1, "errored": 0, "canceled": 0, "expired": 0},
        "created_at": "2026-11-16T04:00:00Z",
        "expires_at": "2036-11-17T04:00:00Z",
        "ended_at": "2026-11-16T04:00:01Z",
        "archived_at": None,
        "cancel_initiated_at": None,
        "results_url": results_url,
    }
    listed = {"data": [batch], "has_more": False, "first_id": "msgbatch_1", "last_id": "msgbatch_1"}
    of_one = asked.first.startswith("POST") or "/msgbatch_1" in asked.first
    return json.dumps(batch if of_one else listed).encode()
