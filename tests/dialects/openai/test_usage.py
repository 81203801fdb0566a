"""Tokens of OpenAI's answers, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.model import Lane, Usage
from carpool.core.ports import ResponseEnd
from carpool.core.prices import Price, PriceBook
from carpool.dialects import OPENAI

AT = 1_795_000_000.0  # in November 2026

CHAT_USAGE = {
    "prompt_tokens": 2000,
    "completion_tokens": 300,
    "total_tokens": 2300,
    "prompt_tokens_details": {"cached_tokens": 1024, "cache_write_tokens": 512, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 128, "audio_tokens": 0},
}
RESPONSES_USAGE = {
    "input_tokens": 2000,
    "input_tokens_details": {"cached_tokens": 1024, "cache_write_tokens": 512},
    "output_tokens": 300,
    "output_tokens_details": {"reasoning_tokens": 128},
    "total_tokens": 2300,
}
EXPECTED = Usage(464, 300, 1024, 512)


def chat(usage: Any = CHAT_USAGE, **more: Any) -> dict[str, Any]:
    return {"object": "chat.completion", "model": "m", "choices": [], "usage": usage, **more}


def response(usage: Any = RESPONSES_USAGE, **more: Any) -> dict[str, Any]:
    return {"object": "response", "model": "m", "output": [], "usage": usage, **more}


def used(answer: Any) -> Usage | None:
    return OPENAI.usage(json.dumps(answer).encode())


def tapped(*chunks: bytes) -> Usage | None:
    tap = OPENAI.usage_tap()
    for chunk in chunks:
        tap.feed(chunk)
    return tap.usage()


def event(value: Any, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.mark.parametrize("answer", [chat(), response(), response(CHAT_USAGE)], ids=["chat", "responses", "mixed"])
def test_what_was_cached_is_told_apart(answer: dict[str, Any]) -> None:
    assert used(answer) == EXPECTED


def test_embeddings_have_no_output() -> None:
    assert used({"object": "list", "data": [], "usage": {"prompt_tokens": 8, "total_tokens": 8}}) == Usage(8)


@pytest.mark.parametrize(
    ("tier", "speed"), [(None, None), ("default", None), ("auto", None), ("flex", "flex"), ("priority", "priority")]
)
def test_the_tier_that_served_is_kept(tier: str | None, speed: str | None) -> None:
    for answer in (chat(service_tier=tier), response(service_tier=tier)):
        found = used(answer)
        assert found is not None
        assert found.speed == speed


def test_searches_are_counted() -> None:
    searched = [{"type": "web_search_call"}, {"type": "message"}, {"type": "web_search_call"}]
    found = used(response(output=searched))
    assert found is not None
    assert found.web_searches == 2
    told = used(response(output=searched, tool_usage={"web_search": {"num_requests": 5}}))
    assert told is not None
    assert told.web_searches == 5


@pytest.mark.parametrize(
    "answer",
    [
        chat(None),
        chat({}),
        chat({"prompt_tokens": 3}),
        chat({"prompt_tokens": 3, "total_tokens": 9}),
        chat({"completion_tokens": 3}),
        chat({"prompt_tokens": -1, "completion_tokens": 1}),
        chat({"prompt_tokens": "3", "completion_tokens": 1}),
        chat({"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}),
        chat(CHAT_USAGE | {"completion_tokens_details": {"audio_tokens": 7}}),
        chat(CHAT_USAGE | {"prompt_tokens_details": {"audio_tokens": 7}}),
        response(output=[{"type": "code_interpreter_call"}]),
        response(output=[{"type": "file_search_call"}]),
        response(output=[{"type": "web_search_call"}], tools=[{"type": "web_search_preview_2025_03_11"}]),
        {"error": {"message": "No."}},
        [],
    ],
)
def test_what_is_not_said_is_unknown(answer: Any) -> None:
    assert used(answer) is None


# ---------------------------------------------------------------- streams


def chunks(usage: Any = CHAT_USAGE) -> list[bytes]:
    common = {"object": "chat.completion.chunk", "model": "m", "service_tier": "flex"}
    told = [event({**common, "choices": [{"delta": {"content": '"usage"'}}], "usage": None}) for _ in range(3)]
    return [*told, event({"object": "chat.completion.chunk", "choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def test_a_chat_stream_says_it_at_its_end() -> None:
    assert tapped(*chunks()) == Usage(464, 300, 1024, 512, speed="flex")


def test_a_chat_stream_without_usage_is_unknown() -> None:
    assert tapped(*chunks()[:3], b"data: [DONE]\n\n") is None


@pytest.mark.parametrize("final", ["response.completed", "response.incomplete", "response.failed"])
def test_a_responses_stream_says_it_at_its_end(final: str) -> None:
    begun = response(None, status="in_progress")
    stream = event({"type": "response.created", "response": begun}, "response.created")
    stream += b": still there\n\n" + event({"type": "response.output_text.delta", "delta": '"usage": {}'})
    assert tapped(stream) is None
    assert tapped(stream, event({"type": final, "response": response(service_tier="priority")}, final)) == Usage(
        464, 300, 1024, 512, speed="priority"
    )


def seen(*chunks: bytes, whole: bool = False) -> ResponseEnd:
    tap = OPENAI.usage_tap()
    for chunk in chunks:
        tap.feed(chunk)
    return tap.end(whole)


def test_done_ends_a_chat_stream_and_so_does_the_end_of_its_body() -> None:
    told = Usage(464, 300, 1024, 512, speed="flex")
    assert seen(*chunks()) == ResponseEnd(told, True, True)
    assert seen(b"".join(chunks()).rstrip()) == ResponseEnd(told, True, True)
    assert seen(*chunks()[:-1]) == ResponseEnd(told, False, False)
    assert seen(*chunks()[:-1], whole=True) == ResponseEnd(told, True, True)
    assert seen(*chunks()[:3], chunks()[-1]) == ResponseEnd(None, True, True)


@pytest.mark.parametrize("final", ["response.completed", "response.incomplete", "response.failed"])
def test_the_last_event_ends_a_responses_stream(final: str) -> None:
    begun = event({"type": "response.created", "response": {"id": "r"}})
    assert seen(begun) == ResponseEnd(None, False, False)
    assert seen(begun, event({"type": final, "response": response()})) == ResponseEnd(EXPECTED, True, True)
    assert seen(begun, event({"type": final, "response": {"id": "r"}})) == ResponseEnd(None, True, True)


@pytest.mark.parametrize("error", [{"error": {"message": "x"}}, {"type": "error", "code": "x", "message": "x"}])
@pytest.mark.parametrize("whole", [True, False])
def test_an_error_ends_a_stream_without_a_price(error: Any, whole: bool) -> None:
    told = Usage(464, 300, 1024, 512, speed="flex")
    assert seen(*chunks()[:-1], event(error), whole=whole) == ResponseEnd(told, True, False)


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8), crlf=st.booleans())
def test_chunks_may_be_cut_anywhere(cuts: list[int], crlf: bool) -> None:
    stream = b"".join(chunks())
    if crlf:
        stream = stream.replace(b"\n", b"\r\n")
    pieces, at = [], 0
    while at < len(stream):
        step = cuts[len(pieces) % len(cuts)]
        pieces.append(stream[at : at + step])
        at += step
    assert tapped(*pieces) == Usage(464, 300, 1024, 512, speed="flex")


def test_a_plain_answer_is_read_as_well() -> None:
    body = json.dumps(chat()).encode()
    assert tapped(body[:10], body[10:]) == EXPECTED


def test_embeddings_of_any_length_are_read() -> None:
    vector = json.dumps([0.125] * 3000).encode()
    end = b'],"model":"m","usage":{"prompt_tokens":8,"total_tokens":8}}'
    entry = b'{"object":"embedding","index":0,"embedding":' + vector + b"},"
    many = [entry] * (6 * 1024 * 1024 // len(entry))
    assert tapped(b'{"object":"list","data":[', *many, end) == Usage(8)
    assert tapped(b'{"object":"list","data":[', *many, b'],"usage":{"prompt_tokens":"8"}}') is None
    assert tapped(b'{"object":"list","data":[', *many) is None
    assert seen(b'{"object":"list","data":[', *many, end) == ResponseEnd(Usage(8), True, True)
    assert seen(b'{"object":"list","data":[', *many) == ResponseEnd(None, False, False)


# ---------------------------------------------------------------- money


def price(model: str, usage: Usage, lane: Lane = Lane.NOW, book: PriceBook | None = None) -> int | None:
    return (book or PriceBook()).price(OPENAI, model, usage, lane, AT)


def test_a_call_by_hand() -> None:
    # 464 x $0.10 + 300 x $0.50 + 1,024 x $0.01 + 512 x $0.125 per million
    assert price("gpt-6-luna", EXPECTED) == 46_400 + 150_000 + 10_240 + 64_000
    assert price("gpt-5-mini-2025-08-07", Usage(100, 10, 1000)) == 25_000 + 20_000 + 25_000
    assert price("text-embedding-3-small", Usage(1000)) == 20_000
    assert price("gpt-6-luna", Usage(web_searches=2)) == 20_000_000


def test_tiers_have_prices_of_their_own() -> None:
    assert price("gpt-6-luna", Usage(1000, 100, speed="flex")) == 75_000
    assert price("gpt-6-luna", Usage(1000, 100, speed="priority")) == 300_000
    assert price("gpt-5-mini", Usage(1000, speed="priority")) == 450_000


def test_a_tier_without_a_price_is_unknown() -> None:
    assert price("gpt-4.1", Usage(1000, speed="flex")) is None
    assert price("gpt-6-luna", Usage(1000, speed="ultrafast")) is None
    assert price("gpt-6-luna", Usage(1000, speed="scale")) is None
    book = PriceBook({"openai": {"mine": Price(input=1, output=1)}})
    assert price("mine", Usage(1000), book=book) == 1_000_000
    assert price("mine", Usage(1000, speed="flex"), book=book) is None


def test_embeddings_with_output_have_no_price() -> None:
    assert price("text-embedding-3-small", Usage(1000, 1)) is None


def test_a_cache_write_where_none_is_sold_is_unknown() -> None:
    assert price("gpt-5-mini", Usage(1000, 10, 0, 512)) is None


def test_a_moderation_is_free_and_nothing_else_that_counts_no_tokens() -> None:
    judged = b'{"id":"modr-1","model":"omni-moderation-latest","results":[{"flagged":true,"categories":{}}]}'
    assert OPENAI.usage(judged) == Usage(0, 0)
    for lane in (Lane.NOW, Lane.BATCH):
        assert PriceBook().price(OPENAI, "omni-moderation-latest", Usage(0, 0), lane, 1_794_000_000.0) == 0
    assert OPENAI.usage(judged.replace(b"omni-moderation-latest", b"another")) is None
    assert OPENAI.usage(b'{"model":"omni-moderation-latest"}') is None
