"""A seeded stream of requests that nobody should send: malformed, oversized, ambiguous, badly encoded, half sent.

Each kind is a function that draws one attack. `good` requests are mixed in and mutated, so that what is wrong may stand
anywhere. Nothing here knows how carpool is built; what must hold for every answer stands in `test_hostile.py`.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import brotli
import zstandard

MODEL = b"claude-haiku-4-5"
BUDGET = b"x-carpool-budget: 1h\r\n"
ASYNC = b"prefer: respond-async\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
BOMB = b" " * 40_000_000
BOMBS = {
    b"gzip": gzip.compress(BOMB),
    b"deflate": zlib.compress(BOMB),
    b"br": brotli.compress(BOMB, quality=5),
    b"zstd": zstandard.compress(BOMB),
    b"gzip, gzip": gzip.compress(gzip.compress(BOMB)),
}


@dataclass
class Attack:
    kind: str
    data: bytes
    half: bool = False  # its end never comes: who sends it holds the line until it is cut
    good: bool = False
    odd: bool = False  # the answer is the odd provider's, or says that it can't be understood


Draw = Callable[[random.Random], Attack]
KINDS: dict[str, tuple[int, Draw]] = {}


def kind(weight: int = 10) -> Callable[[Callable[[random.Random], bytes | Attack]], None]:
    def register(draw: Callable[[random.Random], bytes | Attack]) -> None:
        name = draw.__name__

        def drawn(dice: random.Random) -> Attack:
            made = draw(dice)
            return made if isinstance(made, Attack) else Attack(name, made)

        KINDS[name] = (weight, drawn)

    return register


def attacks(seed: int, count: int) -> Iterator[Attack]:
    dice = random.Random(seed)
    names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
    for _ in range(count):
        (name,) = dice.choices(names, weights)
        yield KINDS[name][1](dice)


# ---------------------------------------------------------------- parts


def body(**more: object) -> bytes:
    call = {"model": MODEL.decode(), "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps({**call, **more}).encode()


def post(
    content: bytes | None = None,
    extra: bytes = b"",
    *,
    target: bytes = b"/v1/messages",
    length: bool = True,
    host: bytes = b"host: 127.0.0.1\r\n",
    method: bytes = b"POST",
    version: bytes = b"HTTP/1.1",
) -> bytes:
    content = body() if content is None else content
    head = b"%b %b %b\r\n" % (method, target, version) + host
    head += b"x-api-key: k\r\nanthropic-version: 2023-06-01\r\ncontent-type: application/json\r\n" + extra
    return head + (b"content-length: %d\r\n" % len(content) if length else b"") + b"\r\n" + content


def get(target: bytes, extra: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: k\r\n%b\r\n" % (target, extra)


def noise(dice: random.Random, most: int = 200) -> bytes:
    return dice.randbytes(dice.randint(1, most))


def word(dice: random.Random, most: int = 40) -> bytes:
    return bytes(dice.choice(b"abcdefghijklmnopqrstuvwxyz0123456789-_") for _ in range(dice.randint(1, most)))


def lane(dice: random.Random) -> bytes:
    return dice.choice([b"", b"", BUDGET, BUDGET + ASYNC, b"x-carpool-lane: now\r\n"])


# ---------------------------------------------------------------- good ones, and good ones gone wrong


@kind(30)
def fine(dice: random.Random) -> Attack:
    return Attack("fine", post(body(temperature=dice.random()), lane(dice).replace(BUDGET, b"")), good=True)


@kind(120)
def mutated(dice: random.Random) -> bytes:
    """A good request with bytes changed, left out, doubled or put in, in its head most of the time."""
    data = bytearray(post(body(n=dice.randint(0, 9)), lane(dice)))
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) if dice.random() < 0.4 else data.find(b"\r\n\r\n") + 4 or 1)
        how = dice.randrange(5)
        if how == 0:
            data[at] = dice.randrange(256)
        elif how == 1:
            del data[at : at + dice.randint(1, 30)]
        elif how == 2:
            data[at:at] = dice.choice([b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\t", b"\xff", b"%", b"0"])
        elif how == 3:
            data[at:at] = data[at : at + dice.randint(1, 60)]
        else:
            data[at:at] = noise(dice, 20)
    return bytes(data)


@kind(30)
def garbage(dice: random.Random) -> bytes:
    return noise(dice, 2000)


@kind(10)
def another_protocol(dice: random.Random) -> bytes:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise(dice)
    return dice.choice(
        [hello, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-OpenSSH_9.9\r\n", b"\x05\x01\x00", b"GET /\r\n\r\n"]
    )


# ---------------------------------------------------------------- framing


LENGTHS = [
    b"+5", b"-5", b"0x10", b"5, 5", b"5,6", b"5 5", b"", b" ", b"\x0b5", b"5\x00", b"9" * 30, b"18446744073709551616",
    b"1e3", b"\xb2",
]  # fmt: skip


@kind()
def odd_length(dice: random.Random) -> bytes:
    return post(extra=b"content-length: %b\r\n" % dice.choice(LENGTHS), length=dice.random() < 0.5)


@kind()
def two_lengths(dice: random.Random) -> bytes:
    return post(extra=b"content-length: %d\r\n" % dice.choice([0, 5, len(body())]))


CODINGS = [
    b"chunked", b"xchunked", b"gzip, chunked", b"chunked, gzip", b"identity", b"chunked, chunked", b"\x0bchunked",
    b"chunked\x0b", b"CHUNKED", b"chunked;q=1", b'"chunked"', b"cow", b" ", b",chunked",
]  # fmt: skip


@kind(20)
def length_and_coding(dice: random.Random) -> bytes:
    pairs = [b"content-length: %d\r\n" % len(body()), b"transfer-encoding: %b\r\n" % dice.choice(CODINGS)]
    dice.shuffle(pairs)
    smuggled = b"0\r\n\r\n" + get(b"/carpool/stats")
    return post(dice.choice([body(), smuggled]), b"".join(pairs), length=False)


@kind(20)
def odd_coding(dice: random.Random) -> bytes:
    version = dice.choice([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"])
    coding = b"transfer-encoding: %b\r\n" % dice.choice(CODINGS)
    return post(
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(body()), body()), coding * dice.randint(1, 2), length=False, version=version
    )


SIZES = [
    b"zz", b"-5", b"+5", b"0x5", b"5 ", b" 5", b"5\t", b"ffffffffffffffffff", b"", b"5;" + b"a" * 100_000, b"5;a=\n",
    b"5;\x00", b"5\n", b"5\r",
]  # fmt: skip


@kind(20)
def odd_chunks(dice: random.Random) -> bytes:
    size = dice.choice(SIZES)
    end = dice.choice([b"\r\n", b"\n", b"", b"\r\r\n"])
    return post(size + b"\r\nhello" + end + b"0\r\n\r\n", CHUNKED + lane(dice), length=False)


@kind()
def tiny_chunks(dice: random.Random) -> bytes:
    pieces = b"".join(b"1;%b\r\n%c\r\n" % (b"x" * dice.randint(0, 400), byte) for byte in body() * 20)
    return post(pieces + b"0\r\n\r\n", CHUNKED, length=False)


TRAILERS = [
    b"x-carpool-budget: 1h\r\n", b"host: evil\r\n", b"x-api-key: other\r\n", b"content-length: 5\r\n",
    b"transfer-encoding: chunked\r\n", b"x-t: a\r\n" * 20_000,
]  # fmt: skip


@kind()
def trailers(dice: random.Random) -> bytes:
    return post(b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body()), body(), dice.choice(TRAILERS)), CHUNKED, length=False)


LINES = [
    b"x-a: b\r\n c\r\n", b"x-a: b\r\n\tcontent-length: 0\r\n", b"x-a: b\nx-c: d\r\n", b"x-a: b\rx-c: d\r\n",
    b"x-a: b\0c\r\n", b"x-\0a: b\r\n", b"x a: b\r\n", b"x-a : b\r\n", b"xa\r\n", b": x\r\n", b"x-a: a\x01b\r\n",
    b"x-a: a\x7fb\r\n", b" x-a: b\r\n", b"x-a: \xe9\xff\r\n", b"x-\xe9: a\r\n", b"\r\r\n", b"(x): y\r\n",
    b"content-length : 5\r\n", b"transfer-encoding : chunked\r\n",
]  # fmt: skip


@kind(20)
def odd_lines(dice: random.Random) -> bytes:
    return post(extra=dice.choice(LINES) + lane(dice))


@kind()
def wrong_line_ends(dice: random.Random) -> bytes:
    return post().replace(b"\r\n", dice.choice([b"\n", b"\r", b"\n\r", b"\r\r\n"]), dice.choice([-1, 1, 3]))


@kind()
def pipelined(dice: random.Random) -> bytes:
    rest = [
        post(), get(b"/carpool/healthz"), noise(dice), post(extra=dice.choice(LINES)), b"\r\n\r\n",
        get(b"/v1/models"),
    ]  # fmt: skip
    return b"".join([post(), *dice.choices(rest, k=dice.randint(1, 8))])


@kind()
def upgrades(dice: random.Random) -> bytes:
    upgrade = dice.choice([b"h2c", b"websocket", b"TLS/1.0", noise(dice, 10).replace(b"\r", b"").replace(b"\n", b"")])
    extra = b"connection: upgrade\r\nupgrade: %b\r\n" % upgrade
    return post(extra=extra) if dice.random() < 0.6 else get(b"/v1/responses", extra) + noise(dice)


# ---------------------------------------------------------------- targets, hosts, methods

TARGETS = [
    b"*", b"", b"http://evil.example/v1/messages", b"http://127.0.0.1/v1/messages", b"http://", b"http:///",
    b"//evil.example/v1", b"evil:80", b"/@evil.example/v1/messages", b"/@budget=10m%2Fv1/v1/messages",
    b"/@tags.a=b%0d%0aX:y/v1/messages", b"/@key=%00/v1/messages", b"/@key=%ED%A0%80/v1/messages", b"/@budget=1h",
    b"/@", b"/@/", b"/@=/v1/messages", b"/@,,/v1/messages", b"/@lane=%F0%9F%9A%97/v1/messages",
    b"/@budget=1h,budget=2h/v1/messages", b"/@provider=nobody/v1/messages", b"/@%62udget=1h/v1/messages",
    b"/%40budget=1h/v1/messages", b"/v1/../../etc/passwd", b"/v1/%2e%2e/%2e%2e", b"/v1/messages#frag", b"/v1/\xe9",
    b"/v1/mess ages", b"/v1/%00messages", b"/v1/messages%0d%0ax:y", b"/v1;a=b/messages", b"/v1/messages?a=%zz&&&==",
    b"/v1/messages?" + b"a=1&" * 3000, b"/v1/messages?" + b"x" * 200_000, b"/" + b"a/" * 20_000, b"/v1/messages\\..",
    b"/v1/messages?x=\x7f", b"/carpool/../v1/messages", b"/carpool", b"/carpool/", b"/carpool//stats",
    b"/carpool/calls/../stats",
]  # fmt: skip


@kind(30)
def odd_targets(dice: random.Random) -> bytes:
    return post(
        target=dice.choice(TARGETS),
        extra=lane(dice),
        method=dice.choice([b"POST", b"POST", b"GET", b"OPTIONS", b"HEAD"]),
    )


@kind()
def odd_hosts(dice: random.Random) -> bytes:
    hosts = [
        b"",
        b"host: \r\n",
        b"host: evil.example\r\n",
        b"host: a@127.0.0.1\r\n",
        b"host: 127.0.0.1\r\nhost: evil\r\n",
    ]
    hosts += [
        b"host: 127.0.0.1:99999999\r\n",
        b"host: [::1\r\n",
        b"host: " + b"a" * 60_000 + b"\r\n",
        b"host: \xff\r\n",
    ]
    return post(host=dice.choice(hosts))


@kind()
def odd_methods(dice: random.Random) -> bytes:
    methods = [
        b"CONNECT", b"TRACE", b"PURGE", b"post", b"FOO", b"GET", b"DELETE", b"M-SEARCH", b"", b"P\0ST", b"A" * 5000,
    ]  # fmt: skip
    return post(
        method=dice.choice(methods),
        version=dice.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTP/1.1", b""]),
    )


PAGES = [
    b"/carpool/calls/" + b"a" * 50_000, b"/carpool/calls/%00%ff", b"/carpool/calls/",
    b"/carpool/calls/036p4z1k2m3n5?wait=%FF", b"/carpool/calls?limit=-1",
    b"/carpool/calls?limit=99999999999999999999", b"/carpool/calls?before=%00",
    b"/carpool/calls?before=zzzzzzzzzzzzz", b"/carpool/calls?state=" + b"x" * 9000,
    b"/carpool/batches?before=999999999999999999", b"/carpool/calls?" + b"&".join([b"a=b"] * 5000),
    b"/carpool/calls?limit=%D9%A1", b"/carpool/nothing", b"/carpool/calls/036p4z1k2m3n5/cancel/again",
    b"/carpool/stats?x=%", b"/carpool/readyz?" + b"?" * 500,
]  # fmt: skip


@kind()
def odd_pages(dice: random.Random) -> bytes:
    return get(dice.choice(PAGES)).replace(b"GET", dice.choice([b"GET", b"GET", b"POST", b"DELETE"]), 1)


# ---------------------------------------------------------------- too much


@kind(5)
def many_headers(dice: random.Random) -> bytes:
    return post(extra=b"".join(b"x-h%d: v\r\n" % number for number in range(dice.choice([250, 300, 3000]))))


@kind(5)
def long_headers(dice: random.Random) -> bytes:
    name, size = (
        dice.choice([b"x-h", b"authorization", b"cookie", b"user-agent", b"anthropic-beta", b"content-type"]),
        dice.choice([40_000, 70_000, 600_000]),
    )
    return post(extra=b"%b: %b\r\n" % (name, b"v" * size))


@kind(5)
def long_names(dice: random.Random) -> bytes:
    return post(extra=b"%b: v\r\n" % (word(dice) * dice.choice([5, 100, 1000])))


@kind(5)
def changing_heads(dice: random.Random) -> bytes:
    """Nothing of what comes only once may be remembered forever."""
    return post(
        extra=b"x-%b: %b\r\nuser-agent: %b\r\n" % (word(dice), word(dice) * 20, word(dice)),
        target=b"/v1/messages?%b" % word(dice),
    )


@kind(2)
def too_large(dice: random.Random) -> bytes:
    return post(body(pad="x" * 1_100_000), lane(dice))


@kind(2)
def bombs(dice: random.Random) -> bytes:
    encoding = dice.choice(list(BOMBS))
    return post(BOMBS[encoding], b"content-encoding: %b\r\n" % encoding + lane(dice))


@kind()
def odd_packing(dice: random.Random) -> bytes:
    encodings = [
        b"gzip", b"br", b"zstd", b"deflate", b"nope", b"gzip, " * 50 + b"gzip", b",,,", b"identity, gzip", b"\xff",
    ]  # fmt: skip
    packed = dice.choice(
        [
            body(),
            gzip.compress(body()),
            gzip.compress(body())[:-9],
            brotli.compress(body())[:-3],
            zstandard.compress(body())[:-4],
            noise(dice),
            gzip.compress(b"") * 3000,
        ]
    )
    return post(packed, b"content-encoding: %b\r\n" % dice.choice(encodings) + lane(dice))


# ---------------------------------------------------------------- bodies


def nested(dice: random.Random) -> bytes:
    deep = dice.choice([100, 800, *range(930, 1000, 7), 5000, 100_000])
    opened, closed = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return b'{"model":"%b","max_tokens":1,"messages":[],"x":%b1%b}' % (MODEL, opened * deep, closed * deep)


NUMBERS = [
    b"9" * 5000, b"-9" + b"0" * 400, b"1e999", b"1e-999", b"NaN", b"Infinity", b"-Infinity", b"0" * 50,
    b"1." + b"3" * 5000, b"0x10", b"1e" + b"9" * 400, b"-0", b"18446744073709551616", b"9223372036854775808",
]  # fmt: skip


@kind(20)
def deep_bodies(dice: random.Random) -> bytes:
    return post(nested(dice), lane(dice))


@kind(20)
def odd_numbers(dice: random.Random) -> bytes:
    number = dice.choice(NUMBERS)
    where = dice.choice(
        [b'"max_tokens":%b,"x":1', b'"max_tokens":5,"temperature":%b', b'"max_tokens":5,"x":[{"y":%b}]']
    )
    return post(b'{"model":"%b",%b,"messages":[{"role":"user","content":"n"}]}' % (MODEL, where % number), lane(dice))


@kind(20)
def odd_text(dice: random.Random) -> bytes:
    texts = [
        b"\xff\xfe", b"\\ud800", b"\\udc00\\ud800", b"\xed\xa0\x80", b"\\u0000", b"a\\r\\nX: y", b"\xc0\xaf", b"\x00",
        b"\n", b"\\x41", b"\\", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\\u202e", b"a" * 3000,
    ]  # fmt: skip
    place = dice.choice([b"hi", MODEL, b"user", b"model", b"max_tokens"])
    return post(body().replace(place, dice.choice(texts), 1), lane(dice))


@kind()
def odd_encodings(dice: random.Random) -> bytes:
    text = body().decode()
    return post(
        dice.choice(
            [
                b"\xef\xbb\xbf" + body(),
                text.encode("utf-16"),
                text.encode("utf-32-le"),
                text.encode("utf-7"),
                b"",
                b" ",
                b"null",
                b"[]",
                b'"x"',
                b"{",
                b"{}",
                body() * 2,
                body() + b"\0",
            ]
        ),
        lane(dice),
    )


@kind(20)
def odd_fields(dice: random.Random) -> bytes:
    values = [
        None, True, [], {}, "x", -1, 0, 2**70, 1.5, [[]], [{}], {"a": {"b": []}}, [None], ["x"], [1],
    ]  # fmt: skip
    names = [
        "model", "max_tokens", "messages", "stream", "tools", "system", "metadata", "thinking", "stop_sequences",
        "service_tier",
    ]  # fmt: skip
    made = body(**{dice.choice(names): dice.choice(values) for _ in range(dice.randint(1, 3))})
    return post(made, lane(dice), target=dice.choice([b"/v1/messages", b"/v1/messages", b"/v1/messages?beta=true"]))


@kind()
def doubled_names(dice: random.Random) -> bytes:
    more = dice.choice(
        [
            b'"model":"x"',
            b'"\\u006dodel":"x"',
            b'"messages":[]',
            b'"metadata":{"a":1,"a":2}',
            b'"x":{"k":1,"\\u006b":2}',
        ]
    )
    return post(body()[:-1] + b"," + more + b"}", lane(dice))


# ---------------------------------------------------------------- options


@kind(20)
def odd_options(dice: random.Random) -> bytes:
    values = [
        b"", b" ", b"\xb2\xb3s", b"9" * 5000 + b"h", b"-1s", b"nan", b"1e9h", b"\xe9\xff", b"a=b" * 3000,
        b",".join(b"a%d=1" % n for n in range(3000)), b"=,=,", b"a=%0d%0ab", b"anthropic%00", b"k" * 256,
        b"k" * 60_000, b"now,batch", b"\t1h\t", b"1h; rm", word(dice),
    ]  # fmt: skip
    names = [
        b"budget", b"lane", b"tags", b"key", b"provider", b"on-disconnect", b"nope", b"", b"-", b"tags.a", b"key\xff",
        b"ticket", b"admin",
    ]  # fmt: skip
    return post(extra=b"x-carpool-%b: %b\r\n" % (dice.choice(names), dice.choice(values)) + lane(dice))


@kind()
def odd_wishes(dice: random.Random) -> bytes:
    values = [
        b"respond-async, wait=" + b"9" * 400, b"respond-async, wait=\xb2", b"wait=-1, respond-async",
        b"respond-async;;;=,=", b"," * 5000, b'respond-async, wait="0"',
    ]  # fmt: skip
    return post(
        extra=b"prefer: %b\r\n" % dice.choice(values)
        + dice.choice([BUDGET, b"", b"expect: 100-continue\r\n", b"expect: nonsense\r\n"])
    )


@kind()
def odd_keys(dice: random.Random) -> bytes:
    keys = [
        b"", b"\xe9\xff\x80", b"k" * 50_000, b"a b", b"Bearer", b"\xc2\xa0", b"cpk-" + b"A" * 43, b"cpk-",
    ]  # fmt: skip
    named = dice.choice([b"x-api-key: %b", b"authorization: Bearer %b", b"authorization: %b"]) % dice.choice(keys)
    extra = dice.choice([b"", b"x-api-key: other\r\n", b"connection: x-api-key, anthropic-version\r\n"])
    return post(extra=extra + lane(dice)).replace(b"x-api-key: k", named, 1)


# ---------------------------------------------------------------- half of something


@kind(8)
def half_sent(dice: random.Random) -> Attack:
    whole = dice.choice(
        [post(extra=lane(dice)), post(b"5\r\nhello\r\n", CHUNKED, length=False), post(target=b"/v1/files")]
    )
    return Attack("half_sent", whole[: dice.randint(0, len(whole) - 1)], half=True)


# ---------------------------------------------------------------- a provider that is no better


@kind(30)
def odd_answers(dice: random.Random) -> Attack:
    target = b"/v1/messages" if dice.random() < 0.6 else b"/v1/odd"
    extra = b"x-carpool-provider: odd\r\nx-seed: %d\r\n" % dice.randrange(10**9)
    return Attack("odd_answers", post(body(stream=dice.random() < 0.5), extra, target=target), odd=True)


_PACKED = b"HTTP/1.1 200 OK\r\ncontent-encoding: %b\r\ncontent-length: %d\r\n\r\n%b"
ANSWERS = [
    b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 099 What\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000 + b"\r\n",
    b"HTTP/1.1 103 Early\r\n\r\n" * 200 + b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", b"nonsense\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nxx",
    b"HTTP/1.1 204 No\r\ncontent-length: 5\r\n\r\nhello", b"HTTP/1.1 304 No\r\ncontent-length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nset-cookie: \xe9\xff\r\nx-carpool-lane: mine\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + b"data: " + b"[" * 100_000 + b"\n\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n\xff\xfe\ndata: \x00\n\n",
    b'HTTP/1.1 200 OK\r\ncontent-length: 47\r\n\r\n{"model":"\\ud800","usage":{"input_tokens":1e999}}'[:-1],
    *(_PACKED % (name, len(data), data) for name, data in BOMBS.items()),
]  # fmt: skip


def answer(seed: int) -> bytes:
    """What the odd provider says to the request with this seed."""
    dice = random.Random(seed)
    if dice.random() < 0.8:
        return dice.choice(ANSWERS)
    data = bytearray(dice.choice(ANSWERS[:-5]))
    for _ in range(dice.randint(1, 3)):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)
