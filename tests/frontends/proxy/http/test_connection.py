"""Calls whose head was met before: read without the parser, and otherwise as any other."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

from carpool.config import ConnectionLimits
from carpool.core.keys import revoked
from carpool.core.ports import RawRequest
from carpool.frontends.proxy.http.connection import LARGEST, MAX_AT_ONCE, MOST, Connection, KnownHeads
from carpool.frontends.proxy.log import LogLine
from carpool.planners.access.read_rules import read_rules
from carpool.planners.access.rules import MAX_KINDS, RuleBook
from tests.frontends.proxy.test_pass_through import ANSWER, call, said
from tests.support.key_holders import give, hosting
from tests.support.sockets import PATIENCE, House, Message, Peer, dialled, provider, proxied, read_message

from .test_bounds import under

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def numbered(number: int, size: int = 0, **more: Any) -> bytes:
    content = {"role": "user", "content": "x" * size}
    return json.dumps({"model": "claude-haiku-4-5", "max_tokens": number, "messages": [content], **more}).encode()


def number_of(message: Message) -> int:
    found: int = json.loads(message.body)["max_tokens"]
    return found


class ResponseEnd(Connection):
    """Counts what went through the parser."""

    made: ClassVar[list["ResponseEnd"]] = []
    parsed = 0

    def connection_made(self, transport: Any) -> None:
        self.made.append(self)
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        self.parsed += 1
        super().on_message_begin()


@asynccontextmanager
async def talking(
    http: type[ResponseEnd] = ResponseEnd, **more: Any
) -> AsyncIterator[tuple[House, list[Message], Streams]]:
    """A connection to a proxy, on which one call was answered."""
    ResponseEnd.made.clear()
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(ANSWER)) as (direct, heard),
        proxied(direct, http, **more) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(call(body=numbered(1)))
        assert (await read_message(reader)).body == ANSWER
        yield house, heard, (reader, writer)


def is_known() -> bool:
    return ResponseEnd.made[0]._known is not None


# ---------------------------------------------------------------- the head itself


HEAD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nX-Api-Key: k\r\n\r\n"


def test_a_head_is_known_again_whatever_its_length() -> None:
    known = KnownHeads().learn(HEAD + b"body", "met")
    assert known is not None
    for length in (0, 5, 123456789):
        again = HEAD.replace(b"12", b"%d" % length)
        assert known.body(again) == (len(again), length)
        assert known.body(again + b"more") == (len(again), length)


@pytest.mark.parametrize(
    "length", [b"", b"-1", b"+1", b"1 2", b"1,1", b"0x1", b"1_0", b"1234567890", b"\xb2", b"1\r\n"]
)
def test_what_is_no_plain_length_is_for_the_parser(length: bytes) -> None:
    known = KnownHeads().learn(HEAD, "met")
    assert known is not None
    assert known.body(HEAD.replace(b"12", length)) is None


def test_another_head_is_another_head() -> None:
    """Random ones; the seed says which."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, known = random.Random(seed), KnownHeads().learn(HEAD, "met")
    assert known is not None
    digits = range(HEAD.index(b"12"), HEAD.index(b"12") + 2)
    for _ in range(2000):
        place, changed = dice.choice([at for at in range(len(HEAD)) if at not in digits]), dice.randrange(256)
        other = HEAD[:place] + bytes([changed]) + HEAD[place + 1 :]
        assert (known.body(other) is None) == (other != HEAD), (place, changed)
        assert known.body(HEAD[: dice.randrange(len(HEAD))]) is None


@pytest.mark.parametrize(
    "head",
    [
        HEAD[:-2],
        HEAD.replace(b"Content-Length: 12", b"Transfer-Encoding: chunked"),
        HEAD.replace(b"Host: x", b"Host: " + b"x" * LARGEST),
    ],
)
def test_what_is_not_whole_or_has_no_length_or_is_long_is_not_remembered(head: bytes) -> None:
    assert KnownHeads().learn(head, "met") is None


def test_connections_share_what_they_remember_as_long_as_it_means_the_same() -> None:
    heads = KnownHeads()
    assert heads.learn(HEAD, "met") is heads.learn(HEAD, "met")
    assert heads.learn(HEAD, "other") is not heads.learn(HEAD, "met")
    for number in range(3 * MOST):
        heads.learn(HEAD.replace(b"Host: x", b"Host: %d" % number), "met")
    assert len(heads._known) == MOST


# ---------------------------------------------------------------- on the wire


async def test_the_next_calls_of_a_connection_need_no_parser() -> None:
    async with talking() as (house, heard, (reader, writer)):
        for number in range(2, 30):
            writer.write(call(body=numbered(number, size=7**number % 5000)))
            assert (await read_message(reader)).body == ANSWER
        assert [number_of(message) for message in heard] == list(range(1, 30))
        assert ResponseEnd.made[0].parsed == 1
        assert [message.header("content-length") for message in heard] == [[str(len(one.body))] for one in heard]
        assert house.engine.stats.sync_calls == 29


async def test_a_body_may_come_after_its_head_and_in_any_pieces() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    async with talking() as (_, heard, (reader, writer)):
        for number in range(2, 12):
            body = numbered(number, size=dice.choice([0, 50, 5000, 100_000]))
            sent, at = call(body=body), len(call(body=body)) - len(body)
            cuts = sorted({at, *(dice.randrange(at, len(sent)) for _ in range(3)), len(sent)})
            for start, end in zip([0, *cuts], cuts, strict=False):
                writer.write(sent[start:end])
                await writer.drain()
                await asyncio.sleep(0.002)
            assert (await read_message(reader)).body == ANSWER
            assert heard[-1].body == body
        assert ResponseEnd.made[0].parsed == 1


@pytest.mark.parametrize("extra", [("X-New: 1",), ("Connection: close",), ("Expect: 100-continue",)])
async def test_another_head_on_the_same_connection_is_parsed(extra: tuple[str, ...]) -> None:
    async with talking() as (_, heard, (reader, writer)):
        writer.write(call(*extra, body=numbered(2)))
        answer = await read_message(reader)
        assert (answer.status, answer.body) == (200, ANSWER)
        assert ResponseEnd.made[0].parsed == 2
        assert number_of(heard[-1]) == 2
        if "Connection: close" in extra:
            assert answer.header("connection") == ["close"]
            assert await reader.read() == b""


async def test_a_chunked_call_between_known_ones() -> None:
    async with talking() as (_, heard, (reader, writer)):
        for number in range(2, 8):
            body = numbered(number)
            if number % 2:
                plain = call(body=body).replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
                writer.write(plain.removesuffix(body) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            else:
                writer.write(call(body=body))
            assert (await read_message(reader)).body == ANSWER
        assert [number_of(message) for message in heard] == list(range(1, 8))


async def test_known_calls_that_are_sent_together_are_answered_in_their_order() -> None:
    async def script(peer: Peer) -> None:
        while True:
            body = json.dumps({"said": number_of(await peer.request())}).encode()
            await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body)

    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct) as house,
        dialled(house.url) as (reader, writer),
    ):
        for together in (1, 1, 3, 1, 2):
            writer.write(b"".join(call(body=numbered(number)) for number in range(together)))
            for number in range(together):
                assert json.loads((await read_message(reader)).body) == {"said": number}


async def test_a_known_call_may_be_longer_than_what_is_gathered() -> None:
    async with talking() as (_, heard, (reader, writer)):
        body = numbered(2, size=MAX_AT_ONCE + 1)
        writer.write(call(body=body))
        assert (await read_message(reader)).body == ANSWER
        assert heard[-1].body == body


async def test_what_is_no_call_under_a_known_head_passes_and_needs_no_parser() -> None:
    async with talking() as (house, heard, (reader, writer)):
        for body in (b"no JSON", numbered(3), b"no JSON", b"no JSON"):
            writer.write(call(body=body))
            assert (await read_message(reader)).body == ANSWER
            assert heard[-1].body == body
        assert house.engine.stats.sync_calls == 2
        assert is_known()
        assert ResponseEnd.made[0].parsed == 1


async def test_a_call_that_comes_while_a_known_one_has_a_task_is_answered_after_it() -> None:
    async with talking() as (_, heard, (reader, writer)):
        for number in range(2, 5):
            writer.write(call(body=b"no JSON"))
            await asyncio.sleep(0)
            writer.write(call(body=numbered(number)))
            for _ in range(2):
                assert (await read_message(reader)).body == ANSWER
            assert [message.body for message in heard[-2:]] == [b"no JSON", numbered(number)]


async def test_what_goes_wrong_with_a_known_call_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []

    def fails(parsed_head: Any, raw: RawRequest, connection: Connection, *, keep_alive: bool) -> None:
        tried.append(raw.body)
        raise ZeroDivisionError

    async with talking() as (house, heard, (reader, writer)):
        monkeypatch.setattr(house.proxy._calls, "relay", fails)
        writer.write(call(body=numbered(2)))
        assert (await read_message(reader)).status == 500
        assert await reader.read() == b""
        assert tried == [numbered(2)]
        assert len(heard) == 1


async def test_nonsense_after_known_calls_is_refused() -> None:
    async with talking() as (_, heard, (reader, writer)):
        writer.write(call(body=numbered(2)))
        assert (await read_message(reader)).status == 200
        writer.write(call(body=numbered(3)).replace(b"Content-Length: ", b"Content-Length: +"))
        assert (await read_message(reader)).status == 400
        assert await reader.read() == b""
        assert len(heard) == 2


async def test_a_known_call_that_comes_too_slowly_is_refused_in_words() -> None:
    slow = type("Slow", (ResponseEnd,), {"limits": ConnectionLimits(slow_sender_s=0.2)})
    async with talking(slow) as (house, heard, (reader, writer)):
        writer.write(call(body=numbered(2))[:-5])
        answer = await read_message(reader)
        assert (answer.status, answer.header("connection")) == (408, ["close"])
        assert len(heard) == 1
        assert not house.proxy._guard.busy


async def test_a_client_that_leaves_amid_a_known_call_asks_nobody() -> None:
    async with talking() as (house, heard, (_, writer)):
        writer.write(call(body=numbered(2, size=1000))[:-10])
        while ResponseEnd.made[0]._came is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        writer.close()
        while not ResponseEnd.made[0].transport.is_closing() or ResponseEnd.made[0]._came is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(heard) == 1
        assert not house.proxy._guard.busy


async def test_a_known_call_that_has_begun_to_come_is_answered_before_the_connection_ends() -> None:
    async with talking() as (_, heard, (reader, writer)):
        sent = call(body=numbered(2))
        writer.write(sent[:-5])
        while ResponseEnd.made[0]._came is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        ResponseEnd.made[0].shutdown()
        writer.write(sent[-5:])
        answer = await read_message(reader)
        assert (answer.body, answer.header("connection")) == (ANSWER, ["close"])
        assert await reader.read() == b""
        assert number_of(heard[-1]) == 2


async def test_where_there_is_no_room_a_known_call_is_told_so() -> None:
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(ANSWER)) as (direct, heard),
        proxied(direct, under(max_connections=1)) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(call())
        assert (await read_message(reader)).status == 200
        async with dialled(house.url) as (late, other):
            other.write(call())
            assert (await read_message(late)).status == 429
        writer.write(call())
        assert (await read_message(reader)).status == 200
        assert len(heard) == 2


async def test_a_virtual_key_that_was_revoked_is_refused_under_a_known_head() -> None:
    async with asyncio.timeout(PATIENCE), hosting() as stage, dialled(stage.url) as (reader, writer):
        store, now = stage.engine._context.store, stage.engine._context.now()
        mine = await give(stage, "mine")
        sent = call(body=numbered(1)).replace(b"X-Api-Key: k", b"X-Api-Key: " + mine.encode())
        for _ in range(3):
            writer.write(sent)
            assert (await read_message(reader)).status == 200
        guest = stage.engine.virtual_key_cache.find(mine)
        guest.used = False
        writer.write(sent)
        assert (await read_message(reader)).status == 200
        assert guest.used
        found = await store.keys(None)
        assert found is not None
        await store.write_keys(revoked(list(found[1]), "mine", now))
        await stage.engine.virtual_key_cache._read()
        writer.write(sent)
        answer = await read_message(reader)
        assert answer.status == 401
        assert b"was revoked" in answer.body


async def test_a_virtual_key_that_is_revoked_while_its_call_arrives_is_refused() -> None:
    async with asyncio.timeout(PATIENCE), hosting() as stage, dialled(stage.url) as (reader, writer):
        store, virtual_key_cache = stage.engine._context.store, stage.engine.virtual_key_cache
        mine = await give(stage, "mine")
        sent = call(body=numbered(1)).replace(b"X-Api-Key: k", b"X-Api-Key: " + mine.encode())
        writer.write(sent[:-5])
        await stage.until(lambda: virtual_key_cache.find(mine).used)
        found = await store.keys(None)
        assert found is not None
        await store.write_keys(revoked(list(found[1]), "mine", stage.engine._context.now()))
        await virtual_key_cache._read()
        writer.write(sent[-5:])
        assert (await read_message(reader)).status == 401


# ---------------------------------------------------------------- rules under a known head


def rules(*said_: dict[str, Any]) -> RuleBook:
    return RuleBook(read_rules(list(said_), "routing.rules"))


async def tags_of(book: RuleBook, bodies: list[bytes]) -> list[dict[str, str]]:
    """What the rules of a house give to these calls, one after the other on one connection."""
    lines: list[LogLine] = []
    async with (
        asyncio.timeout(PATIENCE),
        provider(said(ANSWER)) as (direct, _),
        proxied(direct, book=book, note=lines.append) as house,
        dialled(house.url) as (reader, writer),
    ):
        for body in bodies:
            writer.write(call(body=body))
            assert (await read_message(reader)).status == 200
    return [dict(line.tags) for line in lines]


async def test_rules_see_each_call_for_itself() -> None:
    book = rules(
        {"match": {"model": "*opus*", "streaming": True}, "tags": {"by": "both"}},
        {"match": {"model": "*opus*"}, "tags": {"by": "model"}},
        {"match": {"streaming": True}, "tags": {"by": "stream"}},
        {"match": {"tool_turn": True}, "tags": {"by": "tools"}},
    )
    results = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]
    kinds = [
        ({"model": "claude-opus-4-8", "stream": True}, {"by": "both"}),
        ({"model": "claude-opus-4-8"}, {"by": "model"}),
        ({"stream": True}, {"by": "stream"}),
        ({"messages": results}, {"by": "tools"}),
        ({}, {}),
    ] * 3
    assert await tags_of(book, [numbered(9, **more) for more, _ in kinds]) == [tags for _, tags in kinds]


@pytest.mark.parametrize("match", [{"size": ">2kb"}, {"header.content-length": "3*"}])
async def test_a_rule_about_the_length_looks_at_every_call(match: dict[str, Any]) -> None:
    found = await tags_of(
        rules({"match": match, "tags": {"is": "long"}}), [numbered(9, size) for size in (0, 3000) * 3]
    )
    assert found == [{}, {"is": "long"}] * 3


async def test_no_more_kinds_are_remembered_than_there_is_room_for() -> None:
    book = rules({"match": {"model": "m-7*"}, "tags": {"by": "seven"}})
    models = [f"m-{number}" for number in range(2 * MAX_KINDS)]
    found = await tags_of(book, [numbered(9, model=model) for model in models])
    assert found == [{"by": "seven"} if model.startswith("m-7") else {} for model in models]


# ---------------------------------------------------------------- connections at rest


async def test_a_connection_that_rests_too_long_is_closed_and_one_that_is_used_is_not() -> None:
    async with talking() as (_, heard, (reader, writer)):
        seen = ResponseEnd.made[0]
        assert seen.timeout_keep_alive_task is not None
        for number in range(2, 6):
            alarm, rests = seen.timeout_keep_alive_task, seen._rests
            writer.write(call(body=numbered(number)))
            assert (await read_message(reader)).status == 200
            assert seen.timeout_keep_alive_task is alarm  # not set anew
            seen.timeout_keep_alive_handler(rests)  # it rings: there was a call since it was set
            assert not seen.transport.is_closing()
            alarm.cancel()
        assert len(heard) == 5
        seen.timeout_keep_alive_handler(seen._rests)
        assert await reader.read() == b""


async def test_the_alarm_of_a_connection_at_rest_lets_a_call_be_answered() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER), ANSWER)
        await peer.request()
        asked.set()
        await go.wait()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER), ANSWER)
        await peer.gone()

    ResponseEnd.made.clear()
    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct, ResponseEnd) as house,
        dialled(house.url) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(call())
            if ResponseEnd.made and ResponseEnd.made[0]._rests:
                await asked.wait()
                ResponseEnd.made[0].timeout_keep_alive_handler(ResponseEnd.made[0]._rests)
                assert ResponseEnd.made[0].timeout_keep_alive_task is None
                go.set()
            assert (await read_message(reader)).body == ANSWER
        assert ResponseEnd.made[0].timeout_keep_alive_task is not None
