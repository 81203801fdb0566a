"""What may be asked of the proxy, how much of it and how fast; and that nothing ambiguous reaches the provider."""

import asyncio
import gzip
import json
import random
from typing import Any, ClassVar

import pytest

from carpool.config import ConnectionLimits
from carpool.frontends.intake import latin
from carpool.frontends.proxy.http.connection import Connection
from carpool.planners.policy import RoutingPolicy
from tests.support.hostile import body, get, post
from tests.support.sockets import PATIENCE, Message, Peer, ask, dialled, provider, proxied, read_message

ANSWER = b'{"id":"msg_1","type":"message","model":"m","content":[],"usage":{"input_tokens":1,"output_tokens":2}}'
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n" % (len(body()), body())


async def plain(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER), ANSWER)


def said(message: Message) -> str:
    return str(json.loads(message.body)["error"]["message"])


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What is still said before the connection ends; it has to."""
    async with asyncio.timeout(PATIENCE):
        return await reader.read()


def under(**limits: Any) -> type[Connection]:
    return Connection.within(ConnectionLimits(**limits))


# ---------------------------------------------------------------- framing

AMBIGUOUS = {
    "length and coding": post(extra=CHUNKED),
    "coding and length": post(b"0\r\n\r\n" + get(b"/v1/smuggled"), CHUNKED),
    "two lengths": post(extra=b"content-length: 5\r\n"),
    "the same length twice": post(extra=b"content-length: %d\r\n" % len(body())),
    "a list of lengths": post(extra=b"content-length: 5, 5\r\n", length=False),
    "a signed length": post(extra=b"content-length: +5\r\n", length=False),
    "a length with a space before its colon": post(extra=b"content-length : 5\r\n", length=False),
    "a folded length": post(extra=b"x: y\r\n content-length: 5\r\n"),
    "a folded coding": post(b"0\r\n\r\n", b"transfer-encoding:\r\n chunked\r\n", length=False),
    "another coding inside": post(CHUNKS + b"0\r\n\r\n", b"transfer-encoding: gzip, chunked\r\n", length=False),
    "another coding outside": post(CHUNKS + b"0\r\n\r\n", b"transfer-encoding: chunked, gzip\r\n", length=False),
    "two codings": post(CHUNKS + b"0\r\n\r\n", CHUNKED * 2, length=False),
    "no such coding": post(CHUNKS + b"0\r\n\r\n", b"transfer-encoding: xchunked\r\n", length=False),
    "an old client's coding": post(CHUNKS + b"0\r\n\r\n", CHUNKED, length=False, version=b"HTTP/1.0"),
    "another version": post(version=b"HTTP/2.0"),
    "bare line feeds": post().replace(b"\r\n", b"\n"),
    "a bare line feed": post(extra=b"x: y\nz: content-length: 0\r\n"),
    "a bare carriage return": post(extra=b"x: y\rz: a\r\n"),
    "a zero byte": post(extra=b"x: a\0b\r\n"),
    "no name": post(extra=b": x\r\n"),
    "a bad chunk size": post(b"5 \r\nhello\r\n0\r\n\r\n", CHUNKED, length=False),
    "a signed chunk size": post(b"+5\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False),
    "a chunk size of too many bits": post(b"10000000000000005\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False),
    "a chunk that is longer than it says": post(b"3\r\nhello\r\n0\r\n\r\n", CHUNKED, length=False),
    "a line feed after a chunk size": post(b"5\nhello\r\n0\r\n\r\n", CHUNKED, length=False),
    "a trailer that is a length": post(CHUNKS + b"0\r\ncontent-length: 5\r\n\r\n", CHUNKED, length=False),
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
async def test_what_can_be_read_in_two_ways_is_read_in_none(sent: bytes) -> None:
    async with provider(plain) as (direct, heard), proxied(direct) as house, dialled(house.url) as (reader, writer):
        writer.write(sent)
        answer = await read_message(reader)
        assert (answer.status, answer.header("connection")) == (400, ["close"])
        assert "nothing of it was passed on" in said(answer)
        assert await ends(reader) == b""  # what stands behind it is not read
    assert heard == []


@pytest.mark.parametrize("wrong", [b"BAD\r\n\r\n", post(extra=b"x: \0\r\n"), AMBIGUOUS["length and coding"]])
async def test_what_was_asked_before_is_answered_first(wrong: bytes) -> None:
    """Or the refusal would be taken for the answer to what was asked before."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await go.wait()
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER), ANSWER)

    async with provider(script) as (direct, heard), proxied(direct) as house, dialled(house.url) as (reader, writer):
        writer.write(post() + post() + wrong + post())
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        go.set()
        answers = [await read_message(reader) for _ in range(3)]
        assert [answer.status for answer in answers] == [200, 200, 400]
        assert await ends(reader) == b""
    assert len(heard) == 2


async def test_a_body_that_goes_wrong_on_its_way_is_never_whole_at_the_provider() -> None:
    begun, broken = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"5\r\nfirst\r\n")
        begun.set()
        assert await peer.reader.read() == b""  # no last chunk
        broken.set()

    async with provider(script) as (direct, _), proxied(direct) as house, dialled(house.url) as (reader, writer):
        writer.write(post(b"5\r\nfirst\r\n", CHUNKED, length=False, target=b"/v1/files"))
        await begun.wait()
        writer.write(b"nonsense\r\n")
        assert (await read_message(reader)).status == 400
        await broken.wait()


@pytest.mark.parametrize("trailer", [b"x-carpool-lane: nonsense", b"x-api-key: another", b"x-more: 1", b"host: evil"])
async def test_trailers_are_nobodys_headers(trailer: bytes) -> None:
    sent = post(CHUNKS + b"0\r\n" + trailer + b"\r\n\r\n", CHUNKED, length=False)
    async with provider(plain) as (direct, heard), proxied(direct) as house:
        assert (await ask(house.url, sent)).status == 200
        assert (await ask(house.url, post())).status == 200
    name = trailer.split(b":")[0].decode()
    assert heard[0].header(name) == heard[1].header(name)
    assert heard[0].body == body()


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket", b"TLS/1.2"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_that_nobody_takes_up_costs_no_body(upgrade: bytes, chunked: bool) -> None:
    """Some clients ask for HTTP/2 with every first request, and mean the request as it stands."""
    extra = b"connection: upgrade\r\nupgrade: %b\r\n" % upgrade
    sent = post(CHUNKS + b"0\r\n\r\n", extra + CHUNKED, length=False) if chunked else post(extra=extra)
    async with provider(plain) as (direct, heard), proxied(direct) as house, dialled(house.url) as (reader, writer):
        for piece in (sent[:60], sent[60:-40], sent[-40:] + post()):
            writer.write(piece)
            await asyncio.sleep(0.01)
        assert [(await read_message(reader)).status for _ in range(2)] == [200, 200]
    assert [one.body for one in heard] == [body(), body()]
    assert heard[0].header("upgrade") == []


ODD_ANSWERS = {
    "status": b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n",
    "no status": b"HTTP/1.1 099 What\r\ncontent-length: 0\r\n\r\n",
    "length and coding": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "a fold": b"HTTP/1.1 200 OK\r\nx: y\r\n z\r\ncontent-length: 0\r\n\r\n",
    "bare line feeds": b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
    "a long head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
    "never an answer": b"HTTP/1.1 103 Early\r\n\r\n" * 20_000,
}


@pytest.mark.parametrize("target", [b"/v1/messages", b"/v1/unknown"])
@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_an_answer_that_can_be_read_in_two_ways_is_a_502(answer: bytes, target: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(answer)
        await peer.gone()

    sent = post(target=target, version=b"HTTP/1.0")  # who gets no 1xx
    async with provider(script) as (direct, _), proxied(direct) as house:
        through = await ask(house.url, sent)
    assert through.status == 502
    assert said(through)


@pytest.mark.parametrize("text", ["a\r\nx: y", "a\0b", "\x1b[31m", "é\u2028\ud800", "a\x7f\x85"])
def test_what_others_said_is_one_line_in_a_header(text: str) -> None:
    value = latin(text).encode("latin-1")
    assert not any(byte < 32 or byte == 127 for byte in value)


# ---------------------------------------------------------------- sizes


TOO_MUCH = {
    "headers": (post(extra=b"".join(b"x-%d: y\r\n" % number for number in range(300))), 431, "more than 256 headers"),
    "a header": (post(extra=b"x: %b\r\n" % (b"y" * 70_000)), 431, "more than 64 KB"),
    "a header without end": (post()[:-200] + b"x: " + b"y" * 400_000, 431, "more than 64 KB"),
    "a name": (post(extra=b"%b: y\r\n" % (b"x" * 300)), 431, "more than 256 characters"),
    "an address": (post(target=b"/v1/messages?" + b"x" * 70_000), 414, "more than 64 KB"),
    "trailers": (post(CHUNKS + b"0\r\n" + b"x: y\r\n" * 20_000 + b"\r\n", CHUNKED, length=False), 431, "trailers"),
    "framing": (post(b"1;%b\r\nx\r\n" % (b"y" * 300) * 5000, CHUNKED, length=False), 400, "nearly all framing"),
}


@pytest.mark.parametrize(("sent", "status", "sentence"), TOO_MUCH.values(), ids=TOO_MUCH)
async def test_too_much_is_refused_in_a_sentence(sent: bytes, status: int, sentence: str) -> None:
    async with provider(plain) as (direct, heard), proxied(direct) as house, dialled(house.url) as (reader, writer):
        writer.write(sent)
        answer = await read_message(reader)
        assert (answer.status, answer.header("connection")) == (status, ["close"])
        assert sentence in said(answer)
        assert await ends(reader) == b""
        assert (await ask(house.url, post())).status == 200
    assert len(heard) == 1


async def test_an_openai_client_is_refused_in_its_own_words() -> None:
    sent = post(target=b"/v1/chat/completions", extra=b"x: \0\r\n").replace(b"anthropic-version: 2023-06-01\r\n", b"")
    async with provider(plain) as (direct, _), proxied(direct) as house:
        refused = json.loads((await ask(house.url, sent)).body)
    assert "type" not in refused
    assert refused["error"]["type"] == "invalid_request_error"


def text(size: int) -> bytes:
    """Text that packs to a half, as no bomb does."""
    return body(messages=[{"role": "user", "content": random.Random(size).randbytes(size // 2).hex()}])


async def test_who_bounds_a_body_is_told() -> None:
    async with provider(plain) as (direct, heard), proxied(direct, max_body=200_000) as house:
        refused = await ask(house.url, post(text(300_000)))
        assert refused.status == 413
        assert "over 0.2 MB, the most that carpool takes by limits.max_body_mb of its config." in said(refused)
        assert heard == []


@pytest.mark.parametrize("extra", [b"", b"x-carpool-budget: 1h\r\n"])
async def test_the_bound_of_a_body_holds_for_what_it_unpacks_to(extra: bytes) -> None:
    extra += b"content-encoding: gzip\r\n"
    async with provider(plain) as (direct, heard), proxied(direct, max_body=200_000) as house:
        large = await ask(house.url, post(gzip.compress(text(300_000)), extra))
        assert (large.status, large.header("connection")) == (413, [])
        assert "0.2 MB" in said(large)
        assert heard == []
        assert (await ask(house.url, post(gzip.compress(text(100_000)), b"content-encoding: gzip\r\n"))).status == 200


async def test_a_tag_a_key_or_a_model_is_no_place_for_a_novel() -> None:
    long = b"x" * 2000
    async with provider(plain) as (direct, heard), proxied(direct) as house:
        for option in (b"tags: a=" + long, b"tags: %b=a" % long, b"key: " + long, b"lane: " + long, b"budget: " + long):
            refused = await ask(house.url, post(extra=b"x-carpool-%b\r\n" % option))
            assert refused.status == 400
            assert len(said(refused)) < 400
        many = b",".join(b"t%d=1" % number for number in range(60))
        assert "60 tags" in said(await ask(house.url, post(extra=b"x-carpool-tags: %b\r\n" % many)))
        assert "control character" in said(await ask(house.url, post(target=b"/@tags.a=b%0Ac/v1/messages")))
        model = body(model="m" * 300)
        assert "300 characters" in said(await ask(house.url, post(model, b"x-carpool-budget: 1h\r\n")))
        assert heard == []
        assert (await ask(house.url, post(model))).status == 200  # unread and untouched: the provider's to judge
    assert heard[0].body == model


@pytest.mark.parametrize("deep", [100, *range(900, 1000, 3), 20_000])
async def test_a_body_of_any_depth_is_understood_or_passed_on(deep: int) -> None:
    nested = b'{"model":"m","max_tokens":1,"messages":[],"x":' + b"[" * deep + b"]" * deep + b"}"
    waits = b"x-carpool-budget: 1h\r\nprefer: respond-async\r\n"
    async with provider(plain) as (direct, heard), proxied(direct) as house:
        assert (await ask(house.url, post(nested))).status == 200
        assert heard[0].body == nested
        asked = await ask(house.url, post(nested, waits))
        assert asked.status == 202 if deep < 900 else asked.status in (202, 400)
        assert deep < 20_000 or "nested too deeply" in said(asked)


# ---------------------------------------------------------------- too many


async def test_there_is_room_for_so_many_connections() -> None:
    async with provider(plain) as (direct, _), proxied(direct, under(max_connections=2)) as house:
        async with dialled(house.url) as (reader, writer), dialled(house.url) as (second, its_writer):
            for source, sink in ((reader, writer), (second, its_writer)):
                sink.write(post())
                assert (await read_message(source)).status == 200
            queue_full = await ask(house.url, post())
            assert (queue_full.status, queue_full.header("retry-after")) == (429, ["1"])
            writer.write(post())  # who is in stays in
            assert (await read_message(reader)).status == 200
        async with asyncio.timeout(PATIENCE):
            while (await ask(house.url, post())).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_nobody_takes_all_the_room_there_is() -> None:
    """Calls that wait for a batch, of one key and of another."""
    waits, other = b"x-carpool-budget: 1h\r\n", post(extra=b"x-carpool-budget: 1h\r\n").replace(b"-key: k", b"-key: o")
    policy = RoutingPolicy(max_waiting_calls_per_credential=2, linger_ms=60_000)

    async def waiting(house: Any, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while house.engine.stats.batched_calls < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async with (
        asyncio.timeout(PATIENCE),
        provider(plain) as (direct, _),
        proxied(direct, policy=policy) as house,
        dialled(house.url) as (_, one),
        dialled(house.url) as (_, two),
        dialled(house.url) as (_, three),
        dialled(house.url) as (_, again),
    ):
        one.write(post(extra=waits))
        two.write(post(extra=waits))
        await waiting(house, 2)
        refused = await ask(house.url, post(extra=waits))
        assert (refused.status, refused.header("retry-after")) == (429, ["1"])
        assert json.loads(refused.body)["error"]["type"] == "rate_limit_error"
        assert (await ask(house.url, post())).status == 200  # what goes at once waits for nobody
        three.write(other)
        await waiting(house, 3)
        one.close()
        while len(house.engine._context.waiters) != 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        again.write(post(body(n=1), waits))
        await waiting(house, 4)


# ---------------------------------------------------------------- too slow

HALVES = {"head": post()[:50], "body": post()[:-20], "upload": post(target=b"/v1/files")[:-20]}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
async def test_who_sends_nothing_more_is_told_and_cut(half: bytes) -> None:
    async with provider(plain) as (direct, heard), proxied(direct, under(slow_sender_s=0.2)) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(half)
            answer = await asyncio.wait_for(read_message(reader), PATIENCE)
            assert answer.status == 408
            assert "too slowly" in said(answer)
            assert await ends(reader) == b""
        assert heard == []
        assert not house.proxy._open


async def test_who_says_nothing_at_all_is_cut_without_a_word() -> None:
    async with (
        provider(plain) as (direct, _),
        proxied(direct, under(slow_sender_s=0.2)) as house,
        dialled(house.url) as (reader, _),
    ):
        try:
            rest = await ends(reader)
        except ConnectionResetError:
            rest = b""
        assert rest == b""


class Watched(Connection):
    """Looked at by hand: the time that tests take proves nothing."""

    made: ClassVar[list[Connection]] = []

    def connection_made(self, transport: Any) -> None:
        self.made.append(self)
        super().connection_made(transport)


async def test_who_sends_a_little_now_and_then_may_go_on() -> None:
    Watched.made.clear()
    async with (
        asyncio.timeout(PATIENCE),
        provider(plain) as (direct, heard),
        proxied(direct, Watched) as house,
        dialled(house.url) as (reader, writer),
    ):
        content = text(30_000)
        writer.write(post(content)[: -len(content)])
        for start in range(0, len(content), 2000):
            writer.write(content[start : start + 2000])
            while not Watched.made or (Watched.made[0]._body < start and not heard):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            Watched.made[0].check_timeouts(2, 2)
        assert (await read_message(reader)).status == 200
        for _ in range(9):  # an idle connection is not slow
            Watched.made[0].check_timeouts(2, 2)
        writer.write(post())
        assert (await read_message(reader)).status == 200


async def test_who_waits_for_an_answer_is_not_slow() -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await go.wait()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER), ANSWER)

    Watched.made.clear()
    async with (
        provider(script) as (direct, heard),
        proxied(direct, Watched) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(post())
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for _ in range(9):
            Watched.made[0].check_timeouts(2, 2)
        go.set()
        assert (await read_message(reader)).status == 200


@pytest.mark.parametrize("target", [b"/v1/messages", b"/v1/unknown"])
async def test_who_reads_nothing_is_cut_and_its_provider_let_go(target: bytes) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        try:
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 500000000\r\n\r\n")
            while True:
                await peer.say(b"x" * 2**20)
        finally:
            gone.set()

    async with (
        asyncio.timeout(PATIENCE),
        provider(script) as (direct, _),
        proxied(direct, under(slow_reader_s=0.4)) as house,
        dialled(house.url) as (_, writer),
    ):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(target=target))
        await gone.wait()
        while house.proxy._open or house.proxy._guard.busy:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_was_answered_early_and_sends_on_is_not_listened_to_for_ever() -> None:
    async def send_on(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with (
        asyncio.timeout(PATIENCE),
        provider(plain) as (direct, _),
        proxied(direct, under(slow_sender_s=0.3), max_body=1000) as house,
        dialled(house.url) as (reader, writer),
    ):
        writer.write(post(text(400_000))[:-1000])
        assert (await read_message(reader)).status == 413
        with pytest.raises(ConnectionError):
            await send_on(writer)
