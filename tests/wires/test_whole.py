"""Answers that are read at one go are read as the parser would read them, or left to it."""

import random
from typing import Any

import httptools
import pytest

from carpool.wires.whole import whole

BODY = b'{"a": 1}'
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nX-A: b\r\n\r\n" + BODY


class Parsed:
    """What the parser makes of some bytes; None where it finds fault, or something is missing or left over."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[str, str]] = []
        self.body = b""
        self.complete = 0
        self.begun = 0
        self.parser = httptools.HttpResponseParser(self)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.complete = -1

    def on_message_begin(self) -> None:
        self.begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete += 1

    def answer(self) -> Any:
        if self.complete != 1 or self.begun != 1:
            return None
        return self.parser.get_status_code(), tuple(self.headers), self.body


def test_a_plain_answer_is_read() -> None:
    assert whole(PLAIN, "POST") == (200, (("content-length", "8"), ("x-a", "b")), BODY)
    assert Parsed(PLAIN).answer() == whole(PLAIN, "POST")


def test_headers_may_come_twice_but_not_those_that_tell_the_end() -> None:
    twice = PLAIN.replace(b"X-A: b", b"Set-Cookie: a\r\nSet-Cookie: b\xfc")
    assert whole(twice, "POST") == Parsed(twice).answer() is not None
    for pair in (b"Content-Length: 8", b"Connection: keep-alive\r\nConnection: keep-alive"):
        assert whole(PLAIN.replace(b"X-A: b", pair), "POST") is None


@pytest.mark.parametrize(
    "answer",
    [
        PLAIN[:-1],
        PLAIN + b"x",
        PLAIN + PLAIN,
        PLAIN.replace(b"1.1", b"1.0"),
        PLAIN.replace(b"200 OK", b"200"),
        PLAIN.replace(b"200", b"101"),
        PLAIN.replace(b"200", b"600"),
        b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN,
        b"HTTP/1.1 200 OK\r\n\r\n",
        *(
            PLAIN.replace(b"X-A: b", line)
            for line in (
                *(b"Connection: close", b"Connection: keep-alive, X-A", b"Transfer-Encoding: chunked", b"Upgrade: x"),
                *(b"X-A:b", b"X-A: b ", b"X-A: b\t", b"X-A:  b", b"X-A : b", b" X-A: b", b"X-A", b"X-A: "),
                *(b"X-A: b\r\n c", b"X-A: \0", b"X-A: \x7f", b"X-A: b\nX-C: d", b"X-A: b\rX-C: d", b"X\xfc: b", b": b"),
            )
        ),
        *(PLAIN.replace(b": 8", b": " + length) for length in (b"08", b"+8", b"8,8", b"8 8", b"-8", b"\xb2", b"0x8")),
    ],
)
def test_whatever_is_not_plain_is_for_the_parser(answer: bytes) -> None:
    assert whole(answer, "POST") is None


def test_what_a_head_request_is_answered_has_no_body() -> None:
    assert whole(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "HEAD") is None


PIECES = (
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b": ", b"8", b"0", b"x", b"\0", b"\xff", b"HTTP/1.1 ", b"200 ", BODY),
    *(b"Content-Length: 8\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"X-A: b\r\n"),
    b"\r\n\r\n",
)


def test_what_is_read_at_one_go_is_what_the_parser_reads() -> None:
    """Random changes to a plain answer; the seed says which."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, read = random.Random(seed), 0
    for _ in range(20_000):
        data = PLAIN
        for _ in range(dice.randrange(1, 4)):
            start = dice.randrange(len(data) + 1)
            data = data[:start] + dice.choice(PIECES) + data[min(len(data), start + dice.choice((0, 0, 1, 2, 9))) :]
        found = whole(data, "POST")
        if found is not None:
            read += 1
            assert found == Parsed(data).answer(), data
    assert read
