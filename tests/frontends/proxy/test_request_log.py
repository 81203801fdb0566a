"""Every request has one line in the log: also what is refused, what passes through, and what its client leaves."""

import asyncio
import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from carpool.config import ConnectionLimits
from carpool.core.keys import Profile
from carpool.core.model import Lane
from carpool.frontends.proxy.http.connection import Connection
from carpool.frontends.proxy.log import LogLine
from carpool.mock import Constant, MockConfig
from carpool.planners.policy import RoutingPolicy
from tests.support.hostile import body, post
from tests.support.key_holders import give, hosting
from tests.support.sockets import Peer, dialled, provider, proxied
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}
UNKNOWN = "cpk-" + "a" * 43
SLOW = MockConfig(batch_latency=Constant(60), sync_latency=Constant(60), first_token_share=0.9)


def said(line: LogLine) -> tuple[int, str, str]:
    return line.status, line.lane, line.request


# ------------------------------------------------------------ refused by carpool


@pytest.mark.parametrize(
    ("status", "headers", "why"),
    [
        (400, {"x-carpool-budget": "soon"}, "'soon' is not a budget"),
        (400, {"x-carpool-tags": "x"}, "is not a tag"),
        (401, {"x-api-key": UNKNOWN}, "carpool does not know this virtual key"),
        (404, {"x-carpool-provider": "nobody"}, "no provider 'nobody'"),
        (421, {"host": "elsewhere.example"}, "elsewhere.example"),
    ],
)
@pytest.mark.parametrize("way", [{}, BATCH])
async def test_a_refused_request_is_noted(status: int, headers: dict[str, str], why: str, way: dict[str, str]) -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append) as stage:
        answer = await stage.post(ask("whisper"), **way | headers, user_agent="mytool/1.0")
        assert answer.status_code == status
        await stage.until(lambda: lines)
        assert [said(one) for one in lines] == [(status, "", "POST /v1/messages")]
        [one] = lines
        assert why in one.error
        assert one.client == "other mytool"
        assert "whisper" not in repr(one)
        assert UNKNOWN not in repr(one)


async def test_what_a_key_may_not_do_is_noted() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append) as stage:
        key = await give(stage, "ci", Profile(lanes=frozenset({Lane.NOW})))
        await stage.post(ask(), **{"x-api-key": key, "x-carpool-lane": "batch"})
        await stage.until(lambda: lines)
        assert [(one.status, one.request) for one in lines] == [(403, "POST /v1/messages")]
        assert "The virtual key ci may not" in lines[0].error


async def test_a_body_that_is_too_large_is_noted() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append, max_body=1000) as stage:
        assert (await stage.post(ask("x" * 2000))).status_code == 413
        await stage.until(lambda: lines)
        assert [said(one) for one in lines] == [(413, "", "POST /v1/messages")]


async def test_calls_that_find_no_room_are_noted_with_what_is_known_of_them() -> None:
    lines: list[LogLine] = []
    policy = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, batch_rpm=100_000, max_waiting_calls=1)
    async with hosting(SLOW, policy, note=lines.append) as stage:
        first = asyncio.ensure_future(stage.post(ask("first"), **BATCH))
        await stage.until(lambda: len(stage.engine._context.waiters))
        assert (await stage.post(ask("second"), **BATCH)).status_code == 429
        await stage.until(lambda: lines)
        [one] = lines
        assert (one.status, one.lane, one.model) == (429, "batch", ask()["model"])
        assert one.error
        first.cancel()
        await stage.until(lambda: len(lines) == 2)
        assert lines[1].status == 499


async def test_two_calls_under_one_key_are_noted() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append) as stage:
        headers = BATCH | {"x-carpool-key": "one"}
        assert (await stage.post(ask("first"), **headers)).status_code == 200
        assert (await stage.post(ask("second"), **headers)).status_code == 409
        await stage.until(lambda: len(lines) == 2)
        assert [(one.status, one.lane) for one in lines] == [(200, "batch"), (409, "batch")]


async def test_the_admin_pages_tell_of_refusals_only() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append, admin_token="t" * 20) as stage:
        for path in ("healthz", "readyz", "stats", "calls/0123456789abc"):
            await stage.http.get(f"{stage.url}/carpool/{path}")
        await stage.until(lambda: len(lines) == 2)
        assert [said(one) for one in lines] == [
            (401, "", "GET /carpool/stats"),
            (404, "", "GET /carpool/calls/0123456789abc"),
        ]


# ------------------------------------------------------------ passed through


async def test_what_passes_through_is_noted() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append) as stage:
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        await stage.http.get(f"{stage.url}/@tags=team=ci/v1/models?secret=hush", headers=headers)
        await stage.http.get(f"{stage.url}/v1/nothing", headers=headers)
        await stage.http.post(f"{stage.url}/v1/messages", content=b"no json", headers=headers)
        await stage.until(lambda: len(lines) == 3)
        assert [said(one) for one in lines] == [
            (200, "pass", "GET /v1/models"),
            (404, "pass", "GET /v1/nothing"),
            (400, "pass", "POST /v1/messages"),
        ]
        assert {one.provider for one in lines} == {"anthropic"}
        assert "hush" not in repr(lines)


async def test_a_provider_that_is_not_there_is_noted_for_what_passes() -> None:
    lines: list[LogLine] = []

    async def hang_up(peer: Peer) -> None:
        await peer.request()

    async with provider(hang_up) as (direct, _), proxied(direct, note=lines.append) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: k\r\n\r\n")
            assert b" 502 " in await reader.readline()
        assert [(one.status, one.lane, one.request) for one in lines] == [(502, "pass", "GET /v1/models")]
        assert lines[0].error


# ------------------------------------------------------------ left by its client


async def hung_up(url: str, sent: bytes) -> None:
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(sent)
    await writer.drain()
    await asyncio.sleep(0.1)
    writer.close()


@pytest.mark.parametrize("head", ["", "x-carpool-budget: 30m\r\n"])
@pytest.mark.parametrize("missing", [0, 10])
async def test_a_client_that_leaves_is_noted_once(head: str, missing: int) -> None:
    lines: list[LogLine] = []
    async with hosting(SLOW, note=lines.append) as stage:
        whole = post(extra=head.encode())
        await hung_up(stage.url, whole[: len(whole) - missing])
        await stage.until(lambda: lines)
        await asyncio.sleep(0.05)
        assert [one.status for one in lines] == [499]
        assert bool(lines[0].request) == bool(missing)


async def test_a_client_that_leaves_amid_its_second_call_is_noted() -> None:
    lines: list[LogLine] = []
    async with hosting(note=lines.append) as stage, dialled(stage.url) as (reader, writer):
        writer.write(post())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        await reader.readexactly(int(re.findall(r"content-length: (\d+)", head)[0]))
        writer.write(post()[:-5])  # a head that was met before
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await stage.until(lambda: len(lines) == 2)
        assert [one.status for one in lines] == [200, 499]
        assert lines[1].request == "POST /v1/messages"


async def test_a_client_that_leaves_what_passes_is_noted() -> None:
    lines: list[LogLine] = []
    sent = b"POST /v1/elsewhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\nbegun"
    async with provider(plain) as (direct, _), proxied(direct, note=lines.append) as house:
        await hung_up(house.url, sent)
        async with asyncio.timeout(10):
            while not lines:  # noqa: ASYNC110  it happens on the other side of a connection
                await asyncio.sleep(0.01)
        assert [said(one) for one in lines] == [(499, "pass", "POST /v1/elsewhere")]


# ------------------------------------------------------------ refused by the server


def under(**limits: Any) -> type[Connection]:
    return Connection.within(ConnectionLimits(**limits))


async def plain(peer: Peer) -> None:
    await peer.request()


@pytest.mark.parametrize(
    ("sent", "status", "request_"),
    [
        (b"NONSENSE\r\n\r\n", 400, "?"),
        (post(extra=b"content-length: 5\r\n"), 400, "POST /v1/messages"),
        (post(extra=b"".join(b"x-%d: y\r\n" % number for number in range(300))), 431, "POST /v1/messages"),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414, None),
    ],
)
async def test_what_the_server_refuses_is_noted(sent: bytes, status: int, request_: str | None) -> None:
    lines: list[LogLine] = []
    async with provider(plain) as (direct, _), proxied(direct, note=lines.append) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(sent)
            await reader.read()
        assert [one.status for one in lines] == [status]
        assert lines[0].error
        assert len(lines[0].request) <= 110
        assert request_ is None or lines[0].request == request_


@pytest.mark.parametrize("extra", [b"", b"expect: 100-continue\r\n"])  # without and with a task of its own
async def test_a_client_that_is_too_slow_is_noted_once(extra: bytes) -> None:
    lines: list[LogLine] = []
    slow = under(slow_sender_s=0.2)
    async with provider(plain) as (direct, _), proxied(direct, slow, note=lines.append) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(post(extra=extra)[: -len(body()) // 2])
            await reader.read()
        assert [said(one) for one in lines] == [(408, "", "POST /v1/messages")]
        assert "too slowly" in lines[0].error


async def test_a_connection_too_many_is_noted() -> None:
    lines: list[LogLine] = []
    few = under(max_connections=1)
    async with provider(plain) as (direct, _), proxied(direct, few, note=lines.append) as house:
        async with dialled(house.url), dialled(house.url) as (reader, writer):
            writer.write(post())
            assert b" 429 " in await reader.readline()
        assert [said(one) for one in lines] == [(429, "", "POST /v1/messages")]
