"""The record of calls is written behind them, and bounded whatever the store does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.errors import StoreAway
from carpool.core.model import CachingMode, Call, CallShape
from carpool.core.ports import RawRequest
from carpool.core.upstream import Upstream
from carpool.dialects import OPENAI, Dialect
from carpool.engine import recording
from carpool.engine.context import EngineContext, Keyring
from carpool.engine.recording import ANY_CALL, GROUP, MOST_PER_S, CallRecorder, Sample
from carpool.planners.access.options import Options
from carpool.planners.access.rules import call_of
from carpool.planners.policy import RoutingPolicy
from tests.support.engine_context import PLACE, AlikeClient, engine_context

UPSTREAM = Upstream("openai", PLACE, OPENAI, AlikeClient())
BODY = b'{"model":"m","messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
PARSED = OPENAI.parse(RawRequest("POST", "/v1/chat/completions", "", (("authorization", "Bearer k"),), BODY))


def scene(**changes: Any) -> tuple[EngineContext, CallRecorder]:
    context, _ = engine_context(**changes)
    return context, CallRecorder(context)


def shape(recorder: CallRecorder, credential: str = "c", ticket: int = 1) -> CallShape:
    found = recorder.described(OPENAI, PARSED, call(ticket, credential), "curl").shape
    assert found is not None
    return found


def call(ticket: int = 1, credential: str = "c") -> Call:
    return call_of(UPSTREAM, PARSED, Options(), 1000.0, ticket=ticket, credential=credential)


# ---------------------------------------------------------------- hashes


def test_hashes_are_keyed_with_the_secret_and_the_credential() -> None:
    first, again = scene()[1], scene()[1]
    other = scene(keyring=Keyring(b"q" * 32))[1]
    assert shape(first) == shape(again)
    for one in (shape(other), shape(first, credential="another")):
        mine = shape(first).prefixes
        assert mine is not None
        assert one.prefixes is not None
        assert {one.prefixes.root, one.prefixes.parent, one.prefixes.end}.isdisjoint({mine.root, mine.parent, mine.end})
        assert one.prefixes.end_bytes == mine.end_bytes


def test_no_hash_is_the_checksum_itself() -> None:
    chain, prefixes = OPENAI.prompt_chain(PARSED), shape(scene()[1]).prefixes
    assert chain is not None
    assert prefixes is not None
    told = {number for position in chain.positions for number in (position, position & 0xFFFFFFFF)}
    assert {prefixes.root, prefixes.parent, prefixes.end}.isdisjoint(told)
    assert all(0 <= number < 2**63 for number in (prefixes.root, prefixes.end))


def test_a_dialect_that_can_not_tell() -> None:
    class Silent(type(OPENAI)):  # type: ignore[misc]
        prompt_chain = Dialect.prompt_chain

    found = scene()[1].described(Silent(), PARSED, call(), "curl").shape
    assert found is not None
    assert found.prefixes is None


# ---------------------------------------------------------------- which prompts are followed


@pytest.mark.parametrize(
    ("mode", "records", "followed", "recorded"),
    [
        ("off", True, False, True),
        ("off", False, False, False),
        ("observe", False, True, False),
        ("plan", True, True, True),
    ],
)
def test_the_mode_decides_whether_a_prompt_is_followed(
    mode: Any, records: bool, followed: bool, recorded: bool
) -> None:
    made = scene(policy=RoutingPolicy(caching=mode, record_calls=records))[1].described(OPENAI, PARSED, call(), "curl")
    assert (made.prompt is not None, made.shape is not None) == (followed, recorded)


def test_the_option_of_a_call_is_stronger_than_the_policy() -> None:
    off = replace(call(), caching=CachingMode.OFF)
    assert scene()[1].described(OPENAI, PARSED, off, "curl").prompt is None


def test_under_load_only_a_sample_is_followed_unless_it_is_planned_or_can_wait() -> None:
    recorder = scene()[1]
    recorder._sample.weight(1000.0, 1, MOST_PER_S * 100)
    recorder._sample.weight(1001.0, 1, 1)
    now = [recorder.described(OPENAI, PARSED, replace(call(number), arrived=1001.0), "curl") for number in range(64)]
    assert 0 < sum(one.prompt is not None for one in now) < 64
    late, planned = replace(call(1), deadline=2000.0), replace(call(1), caching=CachingMode.PLAN)
    assert all(recorder.described(OPENAI, PARSED, one, "curl").prompt is not None for one in (late, planned))


# ---------------------------------------------------------------- writing


def test_off_means_off() -> None:
    context, recorder = scene(policy=RoutingPolicy(record_calls=False))
    assert recorder.described(OPENAI, PARSED, call(), "curl").shape is None
    recorder.admitted(None)
    assert not context.background.busy


async def test_what_comes_is_written_together_later() -> None:
    context, recorder = scene()
    shapes = [shape(recorder, ticket=number) for number in (1, 2)]
    for one in shapes:
        recorder.admitted(one)
    context.store.record_shapes.assert_not_called()  # type: ignore[attr-defined]
    await context.background.finish(5)
    context.store.record_shapes.assert_called_once_with(shapes)  # type: ignore[attr-defined]
    assert not context.background.busy
    recorder.admitted(shapes[0])  # and again after the first ones
    await context.background.finish(5)
    assert context.store.record_shapes.call_count == 2  # type: ignore[attr-defined]


async def test_many_are_written_sooner() -> None:
    context, recorder = scene()
    context.clock.sleep = lambda seconds: asyncio.sleep(3600)  # type: ignore[method-assign]
    one = shape(recorder)
    for _ in range(GROUP + 1):
        recorder.admitted(one)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    [written] = context.store.record_shapes.call_args.args  # type: ignore[attr-defined]
    assert len(written) == GROUP + 1
    context.background.abort()


async def test_what_the_store_does_not_take_is_tried_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_WAITING", 3)
    context, recorder = scene()
    context.store.record_shapes.side_effect = [StoreAway("gone"), StoreAway("gone"), None]  # type: ignore[attr-defined]
    for number in range(5):
        recorder.admitted(shape(recorder, ticket=number))
    await context.background.finish(5)
    [written] = context.store.record_shapes.call_args.args  # type: ignore[attr-defined]
    assert [one.ticket for one in written] == [0, 1, 2]
    assert context.background.failures == 0


# ---------------------------------------------------------------- samples


def second(sample: Sample, start: float, calls: int, size: int = 0) -> list[int]:
    """The weights of calls that arrive evenly within a second."""
    return [sample.weight(start + number / calls, number, size) for number in range(calls)]


FEW = MOST_PER_S // ANY_CALL


def test_everything_is_recorded_while_little_comes() -> None:
    sample = Sample()
    for start in range(1000, 1005):
        assert second(sample, start, FEW) == [1] * FEW


@pytest.mark.parametrize("times", [2, 3, 16, 100])
def test_much_is_recorded_as_a_sample_that_stands_for_all(times: int) -> None:
    sample = Sample()
    for start in range(1000, 1004):
        weights = second(sample, start, FEW * times)
    taken = [weight for weight in weights if weight]
    assert len(taken) <= FEW * 1.01
    assert sum(weights) == pytest.approx(FEW * times, rel=0.01)


def test_a_burst_is_bounded_in_its_first_second() -> None:
    weights = second(Sample(), 1000.0, FEW * 100)
    assert len([weight for weight in weights if weight]) < FEW * 3
    assert weights[:FEW] == [1] * FEW


def test_large_bodies_count_more() -> None:
    sample = Sample()
    second(sample, 1000.0, 10, MOST_PER_S)
    assert sum(map(bool, second(sample, 1001.0, 16, 0))) == 1


def test_a_lull_ends_the_sample_and_a_clock_that_jumps_does_no_harm() -> None:
    sample = Sample()
    second(sample, 1000.0, FEW * 4)
    assert max(second(sample, 1001.0, 8)) == 4
    assert second(sample, 1002.0, 8) == [1] * 8
    assert second(sample, 10.0, 8) == [1] * 8


def test_a_conversation_is_recorded_whole_or_not_at_all() -> None:
    sample = Sample()
    second(sample, 1000.0, FEW * 8)
    numbers = [sample.weight(1001.0, conversation, 0) for conversation in range(64) for _ in range(3)]
    assert all(len(set(numbers[start : start + 3])) == 1 for start in range(0, len(numbers), 3))
    smaller = Sample()
    second(smaller, 1000.0, FEW * 2)
    for conversation in range(64):
        assert not sample.weight(1001.5, conversation, 0) or smaller.weight(1001.5, conversation, 0)


async def test_close_does_not_wait_until_the_record_is_due() -> None:
    context, recorder = scene()
    recorder.admitted(shape(recorder))
    await asyncio.sleep(0)
    await recorder.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not context.background.busy
