"""Tokens of finished and of passing answers; refusals and limits."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import Usage
from carpool.core.ports import ResponseEnd
from carpool.dialects import ANTHROPIC

FULL = {
    "input_tokens": 1,
    "output_tokens": 2,
    "cache_read_input_tokens": 3,
    "cache_creation_input_tokens": 9,
    "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 5},
    "server_tool_use": {"web_search_requests": 6, "web_fetch_requests": 7},
    "inference_geo": "us",
    "speed": "standard",
    "service_tier": "batch",
}


def usage(**fields: Any) -> Usage | None:
    return ANTHROPIC.usage(json.dumps({"type": "message", "usage": fields}).encode())


def test_every_kind_of_token() -> None:
    assert usage(**FULL) == Usage(1, 2, 3, 4, 5, 6, "us", "standard")


def test_what_is_not_said_is_nothing() -> None:
    assert usage(input_tokens=1, output_tokens=2, cache_creation=None, server_tool_use=None) == Usage(1, 2)


def test_cache_writes_without_a_full_breakdown_count_as_short() -> None:
    assert usage(input_tokens=1, output_tokens=2, cache_creation_input_tokens=9) == Usage(1, 2, 0, 9)
    hour = {"cache_creation_input_tokens": 9, "cache_creation": {"ephemeral_1h_input_tokens": 2}}
    assert usage(input_tokens=1, output_tokens=2, **hour) == Usage(1, 2, 0, 7, 2)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"usage":null}',
        b'{"usage":{}}',
        b'{"usage":{"input_tokens":1}}',
        b'{"usage":{"input_tokens":-1,"output_tokens":1}}',
        b'{"usage":{"input_tokens":1.5,"output_tokens":1}}',
    ],
)
def test_unknown_is_not_guessed(body: bytes) -> None:
    assert ANTHROPIC.usage(body) is None


# ---------------------------------------------------------------- streams

START = {"type": "message_start", "message": {"usage": FULL | {"output_tokens": 1}}}
TEXT = {"type": "content_block_delta", "delta": {"type": "text_delta", "text": 'the "message_delta" of \n\ndata: x'}}
DELTA = {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 50, "input_tokens": None}}
LATER = {"type": "message_delta", "usage": {"output_tokens": 80, "cache_read_input_tokens": 30}}
EVENTS = (START, {"type": "ping"}, TEXT, DELTA, LATER, {"type": "message_stop"})
TOLD = Usage(1, 80, 30, 4, 5, 6, "us", "standard")


def stream(newline: str = "\n", indent: int | None = None) -> bytes:
    """The events as they may stand on the wire, with data over several lines where there is an indent."""
    told = [": a comment", ""]
    for event in EVENTS:
        told.append(f"event: {event['type']}")
        told += [f"data:{line}" for line in json.dumps(event, indent=indent).split("\n")]
        told.append("")
    return (newline.join(told) + newline).encode()


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("indent", [None, 1])
@given(cuts=st.lists(st.integers(0, 1500), max_size=30))
def test_a_stream_cut_anywhere(newline: str, indent: int | None, cuts: list[int]) -> None:
    body = stream(newline, indent)
    tap = ANTHROPIC.usage_tap()
    edges = [0, *sorted(cuts), len(body)]
    for start, end in pairwise(edges):
        tap.feed(body[start:end])
    assert tap.usage() == TOLD


def test_byte_by_byte() -> None:
    tap = ANTHROPIC.usage_tap()
    for at in range(len(stream("\r\n"))):
        tap.feed(stream("\r\n")[at : at + 1])
    assert tap.usage() == TOLD


def test_usage_is_known_while_the_stream_runs() -> None:
    tap = ANTHROPIC.usage_tap()
    assert tap.usage() is None
    tap.feed(b"data: " + json.dumps(START).encode() + b"\n\n")
    assert tap.usage() == Usage(1, 1, 3, 4, 5, 6, "us", "standard")


@pytest.mark.parametrize(
    ("events", "whole", "answered", "final"),
    [
        (EVENTS, False, True, True),
        (EVENTS, True, True, True),
        (EVENTS[:-1], False, False, False),
        (EVENTS[:-1], True, True, False),  # a message that is whole says so
        ((*EVENTS[:-1], {"type": "error", "error": {"type": "overloaded_error"}}), False, True, False),
        ((*EVENTS[:-1], TEXT | {"delta": {"text": 'a "message_stop" or an "error"'}}), False, False, False),
    ],
)
@pytest.mark.parametrize("missing", [0, 1, 2])  # bytes at the end: line breaks
def test_what_was_seen_of_a_stream(events: Any, whole: bool, answered: bool, final: bool, missing: int) -> None:
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    tap = ANTHROPIC.usage_tap()
    tap.feed(body[: len(body) - missing])
    assert tap.end(whole) == ResponseEnd(TOLD, answered, final)


@pytest.mark.parametrize(
    ("missing", "seen"), [(0, ResponseEnd(Usage(3, 4), True, True)), (1, ResponseEnd(None, False, False))]
)
def test_what_was_seen_of_json(missing: int, seen: ResponseEnd) -> None:
    body = b'{"content":[],"usage":{"input_tokens":3,"output_tokens":4}}'
    tap = ANTHROPIC.usage_tap()
    tap.feed(body[: len(body) - missing])
    assert tap.end(whole=False) == seen


def test_json_that_says_nothing_of_usage_may_be_whole() -> None:
    tap = ANTHROPIC.usage_tap()
    tap.feed(b'{"content":')
    tap.feed(b"[]}\n")
    assert tap.end(whole=False) == ResponseEnd(None, True, True)


def test_a_huge_event_is_let_pass() -> None:
    tap = ANTHROPIC.usage_tap()
    tap.feed(b"data: " + json.dumps(START).encode() + b"\n\ndata: {")
    for _ in range(80):
        tap.feed(b'"message_delta"' * 5000)
    tap.feed(b"}\n\ndata: " + json.dumps(LATER).encode() + b"\n\n")
    assert tap.usage() == TOLD


def test_an_answer_that_is_no_stream() -> None:
    tap = ANTHROPIC.usage_tap()
    for piece in (b"  \n", b'\n{"content":[],\n\n"usage":', b'{"input_tokens":3,"output_tokens":4}}'):
        assert tap.usage() is None
        tap.feed(piece)
    assert tap.usage() == Usage(3, 4)


@given(st.lists(st.binary(max_size=30)))
def test_noise_is_borne(chunks: list[bytes]) -> None:
    tap = ANTHROPIC.usage_tap()
    for chunk in chunks:
        tap.feed(chunk)
    assert tap.usage() is None
    assert tap.end(whole=False).usage is None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("status", "retryable"),
    [
        (400, False),
        (402, False),
        (408, True),
        (409, True),
        (413, False),
        (429, True),
        (500, True),
        (504, True),
        (529, True),
    ],
)
def test_which_refusals_pass(status: int, retryable: bool) -> None:
    assert ANTHROPIC.refusal(status, (), b"").retryable is retryable


def test_a_spent_limit_and_the_providers_own_word() -> None:
    spent = {"type": "rate_limit_error", "message": "Spent.", "details": {"error_code": "enforced_spend_limit_reached"}}
    refusal = ANTHROPIC.refusal(
        429, (("x-should-retry", "true"),), json.dumps({"type": "error", "error": spent}).encode()
    )
    assert (refusal.retryable, refusal.message) == (False, "Spent.")
    assert not ANTHROPIC.refusal(500, (("x-should-retry", "false"),), b"").retryable
    assert ANTHROPIC.refusal(400, (("x-should-retry", "true"),), b"").retryable


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ((), None),
        ((("retry-after", "7"),), 7.0),
        ((("retry-after", "7"), ("retry-after-ms", "1500")), 1.5),
        ((("retry-after", "7"), ("retry-after-ms", "soon")), 7.0),
        ((("retry-after", "Wed, 21 Oct 2026 07:28:00 GMT"),), None),
        ((("retry-after", "-1"),), None),
        ((("retry-after", "nan"),), None),
        ((("retry-after", "inf"),), None),
    ],
)
def test_when_to_come_back(headers: tuple[tuple[str, str], ...], seconds: float | None) -> None:
    assert ANTHROPIC.refusal(429, headers, b"").retry_after == seconds


@pytest.mark.parametrize(("text", "limit"), [("4000", 4000), ("0", None), ("many", None), ("-5", None), ("", None)])
def test_the_accounts_limit(text: str, limit: int | None) -> None:
    assert ANTHROPIC.requests_per_minute((("anthropic-ratelimit-requests-limit", text),)) == limit
    assert ANTHROPIC.requests_per_minute(()) is None


def test_our_own_errors_have_the_providers_shape() -> None:
    assert json.loads(ANTHROPIC.error(413, "request_too_large", "Too large.")) == {
        "type": "error",
        "error": {"type": "request_too_large", "message": "Too large."},
    }
    assert json.loads(ANTHROPIC.error(429, "", "x"))["error"]["type"] == "rate_limit_error"
    assert json.loads(ANTHROPIC.error(502, "", "x"))["error"]["type"] == "api_error"
    assert json.loads(ANTHROPIC.error(418, "", "x"))["error"]["type"] == "invalid_request_error"
