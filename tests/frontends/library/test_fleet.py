"""The library door: what is promised of `FleetDispatcher`, against the mock provider through the real SDK."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, AsyncStream
from anthropic.types import Message
from anthropic.types.beta import BetaMessage

from carpool import (
    BadCall,
    BatchCollected,
    BatchEnded,
    BatchRefused,
    BatchSubmitted,
    CallAdmitted,
    CallExpired,
    CallRescued,
    CallSettled,
    CallTooLarge,
    FailureRateHigh,
    FleetDispatcher,
    KeyConflict,
    Lane,
    RoutingPolicy,
)
from carpool.mock import CATALOGUE, Constant, MockAnthropic, MockConfig, expected_text, serve
from tests.support.fleets import (
    HASTY,
    KEY,
    MODEL,
    QUICK,
    SOON,
    ask,
    dispatching,
    faulty,
    provided,
    riding,
    small_times,
    soon,
    text_of,
    until,
)

# ---------------------------------------------------------------- the promise, verbatim


async def test_the_example_runs_unchanged() -> None:
    essays = [f"essay {i}" for i in range(12)]
    async with provided() as (server, log), AsyncAnthropic(base_url=server.url, api_key=KEY) as client:
        policy = RoutingPolicy(sync_max_latency_ms=5_000, batch_window_ms=30_000, batch_min_size=10, batch_max_size=100)
        async with FleetDispatcher(client, policy=policy) as fleet:
            chat = await fleet.submit(
                latency_budget_ms=2_000,
                model="claude-sonnet-5",
                max_tokens=200,
                messages=[{"role": "user", "content": "hi"}],
            )
            graded = await soon(
                asyncio.gather(
                    *[
                        fleet.submit(
                            latency_budget_ms=600_000,
                            model="claude-sonnet-5",
                            max_tokens=200,
                            messages=[{"role": "user", "content": f"Grade: {essay}"}],
                        )
                        for essay in essays
                    ]
                )
            )
            assert (fleet.stats.sync_calls, fleet.stats.batched_calls, fleet.stats.batches_submitted) == (1, 12, 1)
            assert [type(one) for one in (chat, *graded)] == [Message] * 13
            kwargs = ask("by hand")
            await fleet.submit_sync(**kwargs)
            assert fleet.stats.sync_calls == 2
        assert [batch.size for batch in server.provider.batches] == [12]
        assert len(log.messages) == 2


TEMPLATE = """
routing: {sync_latency_cap_ms: 5000, batch_window_ms: 30000, min_batch_size: 10, max_batch_size: 100, poll_interval_s: 1.0}
token_budgets: {max_input_tokens_per_request: 40000, enforce_pre_queue_validation: true}
observability: {metrics_prefix: "llm.fleet", track_sync_batch_split: true, alert_on_batch_failure_rate: 0.05}
"""  # noqa: E501


async def test_the_yaml_template_is_taken_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "carpool.yaml"
    file.write_text(TEMPLATE)
    policy = RoutingPolicy.from_yaml(file)
    assert policy == RoutingPolicy(
        sync_max_latency_ms=5000,
        batch_window_ms=30000,
        batch_min_size=10,
        batch_max_size=100,
        poll_interval_s=1.0,
        max_input_tokens=40000,
        enforce_pre_queue_validation=True,
        metrics_prefix="llm.fleet",
        track_sync_batch_split=True,
        alert_on_batch_failure_rate=0.05,
    )
    async with riding(policy=policy) as scene:
        await soon(scene.fleet.submit(**ask(), latency_budget_ms=5_000))
        assert scene.fleet.metrics()["llm.fleet.sync_calls"] == 1
        with pytest.raises(CallTooLarge, match="40,000"):
            await soon(scene.fleet.submit(**ask("word " * 60_000), latency_budget_ms=5_000))


# ---------------------------------------------------------------- lanes and verbs


async def test_every_verb_takes_its_lane() -> None:
    async with riding() as scene:
        fleet = scene.fleet
        await soon(fleet.submit_sync(**ask("1")))
        await soon(fleet.submit(**ask("2"), force_sync=True))
        await soon(fleet.submit(**ask("3"), lane="now"))
        await soon(fleet.submit(**ask("4"), lane=Lane.NOW, budget="10m"))
        assert (fleet.stats.sync_calls, fleet.stats.batched_calls) == (4, 0)
        await soon(
            asyncio.gather(
                fleet.submit_batch(**ask("5")), fleet.submit(**ask("6")), fleet.submit(**ask("7"), lane="batch")
            )
        )
        assert (fleet.stats.sync_calls, fleet.stats.batched_calls) == (4, 3)
        assert sorted(text for create in scene.log.creates for text in create.texts) == ["5", "6", "7"]


async def test_force_sync_wins_over_a_lane() -> None:
    async with riding() as scene:
        await soon(scene.fleet.submit(**ask("at once"), force_sync=True, lane="batch"))
        assert (scene.fleet.stats.sync_calls, scene.fleet.stats.batched_calls) == (1, 0)


async def test_a_tight_budget_goes_now_and_a_loose_one_rides() -> None:
    async with riding(policy=replace(QUICK, sync_max_latency_ms=5_000)) as scene:
        await soon(scene.fleet.submit(**ask("tight"), latency_budget_ms=5_000))
        assert (scene.fleet.stats.sync_calls, scene.fleet.stats.batched_calls) == (1, 0)
        await soon(scene.fleet.submit(**ask("loose"), budget="10m"))
        assert (scene.fleet.stats.sync_calls, scene.fleet.stats.batched_calls) == (1, 1)


@pytest.mark.parametrize(
    ("how", "lane"),
    [
        ({"latency_budget_ms": 2_000}, Lane.NOW),
        ({"latency_budget_ms": 600_000.0}, Lane.BATCH),
        ({"budget": "2s"}, Lane.NOW),
        ({"budget": "500ms"}, Lane.NOW),
        ({"budget": "10m"}, Lane.BATCH),
        ({"budget": "1.5h"}, Lane.BATCH),
        ({"budget": 600}, Lane.BATCH),
        ({"deadline": timedelta(seconds=2)}, Lane.NOW),
        ({"deadline": timedelta(hours=1)}, Lane.BATCH),
        ({"deadline": timedelta(seconds=-5)}, Lane.NOW),
        ({"task": "essay", "task_budget": "3h"}, Lane.BATCH),
        ({"task": "essay", "task_budget": 30}, Lane.NOW),
        ({"task_deadline": timedelta(seconds=2)}, Lane.NOW),
        ({"task": "essay"}, Lane.BATCH),
        ({}, Lane.BATCH),
    ],
)
async def test_budgets_are_understood(how: dict[str, Any], lane: Lane) -> None:
    for name in how.keys() & {"deadline", "task_deadline"}:
        how = {name: datetime.now(UTC) + how[name]}
    async with riding() as scene:
        await soon(scene.fleet.submit(**ask(), **how))
        stats = scene.fleet.stats
        assert (stats.sync_calls, stats.batched_calls) == ((1, 0) if lane is Lane.NOW else (0, 1))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"latency_budget_ms": 5_000, "budget": "10m"}, "only once"),
        ({"budget": "10m", "deadline": datetime.now(UTC)}, "only once"),
        ({"latency_budget_ms": 0}, "more than 0"),
        ({"latency_budget_ms": -5}, "is not a budget"),
        ({"latency_budget_ms": float("nan")}, "is not a budget"),
        ({"budget": "soon"}, "write a number and a unit"),
        ({"budget": "31d"}, "write a number and a unit"),
        ({"budget": "721h"}, "at most 30 days"),
        ({"deadline": datetime(2030, 1, 1)}, "with a time zone"),
        ({"deadline": 12345}, "with a time zone"),
        ({"task_deadline": datetime(2030, 1, 1)}, "with a time zone"),
        ({"task_budget": "3h", "task_deadline": datetime.now(UTC)}, "only once"),
        ({"task_budget": "soon"}, "write a number and a unit"),
        ({"task": ""}, "A task's name has 1 to 200"),
        ({"lane": "slow"}, "The lanes are now, flex and batch."),
        ({"lane": "merge"}, "'merge' is not a lane. The lanes are now, flex and batch."),
        ({"lane": "flex"}, "There is no lane flex for it"),
        ({"lane": 5}, "The lanes are"),
        ({"key": ""}, "A key has 1 to 255"),
        ({"key": "k" * 256}, "A key has 1 to 255"),
        ({"key": 5}, "A key has 1 to 255"),
        ({"tags": ["team"]}, "Tags are"),
    ],
)
async def test_options_that_make_no_sense_are_refused(how: dict[str, Any], said: str) -> None:
    async with riding() as scene:
        with pytest.raises(BadCall, match=said):
            await soon(scene.fleet.submit(**ask(), **how), 2)
        assert scene.log.requests == []


async def test_betas_and_extra_headers_travel() -> None:
    async with riding() as scene:
        more: dict[str, Any] = {"betas": ["files-api-2025-04-14"], "extra_headers": {"x-trace": "t-1"}}
        by_batch = await soon(scene.fleet.submit(**ask(), **more))
        by_now = await soon(scene.fleet.submit_sync(**ask(), **more))
        assert type(by_batch) is type(by_now) is BetaMessage
        for request in (scene.log.creates[0], scene.log.messages[0]):
            assert request.headers["anthropic-beta"] == "files-api-2025-04-14"
            assert request.headers["x-trace"] == "t-1"
            assert not [name for name in request.headers if name.startswith("x-carpool")]


async def test_streams_travel_on_now_and_are_the_sdks() -> None:
    async with riding() as scene:
        stream = await soon(scene.fleet.submit(**ask("flow"), stream=True))
        assert isinstance(stream, AsyncStream)
        texts = [event.delta.text async for event in stream if event.type == "content_block_delta"]
        assert "".join(texts) == expected_text(ask("flow"))
        assert scene.log.messages[0].json()["stream"] is True
        assert scene.fleet.stats.sync_calls == 1
        await until(lambda: scene.fleet.stats.paid)
        assert scene.fleet.stats.paid == scene.provider.bill.total()


async def test_a_stream_that_is_left_is_ended() -> None:
    async with riding(replace(SOON, sync_latency=Constant(60.0), first_token_share=0.0)) as scene:
        stream = await soon(scene.fleet.submit(**ask("flow"), stream=True))
        async for _ in stream:
            break
        await soon(stream.close(), 2)
        await until(lambda: scene.fleet.stats.unknown_purchases == 1)


async def test_a_stream_under_a_key_is_replayed() -> None:
    async with riding() as scene:
        for _ in range(2):
            stream = await soon(scene.fleet.submit(**ask("flow"), stream=True, key="s-1"))
            texts = [event.delta.text async for event in stream if event.type == "content_block_delta"]
            assert "".join(texts) == expected_text(ask("flow"))
        assert len(scene.charges()) == 1


# ---------------------------------------------------------------- failures


async def test_failures_on_now_are_the_sdks() -> None:
    async with riding(max_retries=0) as scene:
        with pytest.raises(anthropic.BadRequestError):
            await soon(scene.fleet.submit_sync(**ask("[error:invalid_request_error]")))
        scene.provider.script("sync_429")
        with pytest.raises(anthropic.RateLimitError):
            await soon(scene.fleet.submit_sync(**ask()))
        scene.provider.script("sync_cut")
        with pytest.raises(anthropic.APIConnectionError):
            await soon(scene.fleet.submit_sync(**ask()))


async def test_now_without_a_budget_is_retried_by_the_sdk_as_configured() -> None:
    async with riding(faulty(retry_after_s=0), max_retries=2) as scene:
        scene.provider.script("sync_429", 2)
        assert text_of(await soon(scene.fleet.submit_sync(**ask("again")))) == expected_text(ask("again"))
        assert len(scene.log.messages) == 3
        assert len(scene.charges()) == 1


async def test_now_with_a_budget_is_retried_inside_it() -> None:
    async with riding(faulty(retry_after_s=0), max_retries=0) as scene:
        scene.provider.script("sync_500", 1)
        assert text_of(await soon(scene.fleet.submit(**ask("again"), budget="4s"))) == expected_text(ask("again"))
        assert len(scene.log.messages) == 2


async def test_a_cut_connection_on_now_is_not_bought_again_in_silence() -> None:
    async with riding(max_retries=0) as scene:
        scene.provider.script("sync_accepted_cut")
        with pytest.raises(anthropic.APIConnectionError):
            await soon(scene.fleet.submit(**ask(), budget="4s"))
        assert len(scene.charges()) == 1


async def test_carpools_own_refusal_is_not_retried_by_the_sdk() -> None:
    async with riding(policy=replace(QUICK, max_input_tokens=10), max_retries=2) as scene:
        began = asyncio.get_running_loop().time()
        with pytest.raises(CallTooLarge) as caught:
            await soon(scene.fleet.submit_sync(**ask("word " * 100)))
        assert asyncio.get_running_loop().time() - began < 0.4
        assert caught.value.__cause__ is not caught.value


async def test_errors_do_not_cause_themselves() -> None:
    async with riding() as scene:
        await soon(scene.fleet.submit(**ask("one"), key="k"))
        with pytest.raises(KeyConflict) as caught:
            await soon(scene.fleet.submit(**ask("two"), key="k"))
        assert list(_causes(caught.value)) == [caught.value]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None:
        assert id(error) not in seen, "a cycle of causes"
        seen.add(id(error))
        yield error
        error = error.__cause__


async def test_retryable_lines_are_tried_again() -> None:
    async with riding() as scene:
        scene.provider.script("line_overloaded")
        assert text_of(await soon(scene.fleet.submit(**ask("again")))) == expected_text(ask("again"))
        scene.provider.script("line_expired")
        assert text_of(await soon(scene.fleet.submit(**ask("and again")))) == expected_text(ask("and again"))
        assert [batch.size for batch in scene.provider.batches] == [1] * 4
        assert scene.fleet.stats.requeued_calls == 2
        assert len(scene.charges()) == 2


async def test_retries_end_with_max_attempts() -> None:
    async with riding(faulty(line_expired=1.0), replace(QUICK, max_attempts=2)) as scene:
        with pytest.raises(CallExpired):
            await soon(scene.fleet.submit(**ask()))
        assert len(scene.provider.batches) == 2


async def test_a_key_without_the_batch_road_goes_now_and_that_is_remembered(tmp_path: Path) -> None:
    config = replace(SOON, keys_without_batch=frozenset({KEY}))
    async with riding(config, store=tmp_path / "s.db") as scene:
        assert text_of(await soon(scene.fleet.submit(**ask("a")))) == expected_text(ask("a"))
        assert [event.status for event in scene.events[BatchRefused]] == [403]
        assert text_of(await soon(scene.fleet.submit(**ask("b")))) == expected_text(ask("b"))
        assert len(scene.log.creates) == 1
        await scene.fleet.close()
        async with dispatching(scene.server.url, store=tmp_path / "s.db") as again:
            await soon(again.submit(**ask("c")))
        assert len(scene.log.creates) == 1


# ---------------------------------------------------------------- deadlines


async def test_a_stuck_batch_is_cancelled_and_its_calls_are_resent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All must be rescued: cancel first, then resend what came back cancelled. Nothing is charged twice."""
    small_times(monkeypatch)
    async with riding(faulty(batch_stuck=1.0), HASTY) as scene:
        loop = asyncio.get_running_loop()
        began = loop.time()
        answers = await soon(asyncio.gather(*[scene.fleet.submit(**ask(f"{i}"), budget="2.5s") for i in range(5)]))
        assert loop.time() - began < 2.5
        assert [text_of(one) for one in answers] == [expected_text(ask(f"{i}")) for i in range(5)]
        assert len(scene.log.cancels) == len(scene.provider.batches) == 1
        assert scene.charges("batch") == []
        assert len(scene.charges("sync")) == 5
        await until(lambda: scene.fleet.stats.rescued_calls == 5)
        assert len(scene.events[CallRescued]) == 5
        assert scene.fleet.stats.paid == scene.provider.bill.total()


async def test_some_calls_of_a_batch_are_resent_blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some must be rescued: the batch goes on for the others, and what it brings late is a duplicate."""
    small_times(monkeypatch)
    async with riding(faulty(batch_stuck=1.0), replace(HASTY, linger_ms=200)) as scene:
        pressed = scene.start("pressed", budget="2.5s")
        others = [scene.start(f"patient {i}", budget="59s") for i in range(3)]  # of the same class of deadlines
        [bought] = await scene.bought()
        assert bought.count == 4
        assert text_of(await soon(pressed, 4)) == expected_text(ask("pressed"))
        assert scene.log.cancels == []
        scene.provider.end_batch(bought.provider_id)
        assert [text_of(one) for one in await soon(asyncio.gather(*others))] == [
            expected_text(ask(f"patient {i}")) for i in range(3)
        ]
        await scene.collected()
        assert (len(scene.charges("batch")), len(scene.charges("sync"))) == (4, 1)
        assert scene.fleet.stats.paid == scene.provider.bill.total()
        assert scene.fleet.stats.duplicates == 1
        assert scene.fleet.stats.would_have_paid == 2 * sum(c.nano_usd for c in scene.charges("batch"))


async def test_a_cancel_that_takes_too_long_does_not_hold_the_rescue_up(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    async with riding(replace(faulty(batch_stuck=1.0), cancel_latency=Constant(60.0)), HASTY) as scene:
        began = asyncio.get_running_loop().time()
        assert text_of(await soon(scene.fleet.submit(**ask("now!"), budget="2s"))) == expected_text(ask("now!"))
        assert asyncio.get_running_loop().time() - began < 2.0
        assert len(scene.log.cancels) == 1


async def test_a_failing_cancel_is_not_hammered(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    async with riding(faulty(batch_stuck=1.0, cancel_500=1.0), HASTY) as scene:
        assert text_of(await soon(scene.fleet.submit(**ask("now!"), budget="2s"))) == expected_text(ask("now!"))
        assert len(scene.log.cancels) <= 5


async def test_a_call_that_still_waits_is_rescued_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a minimum size, a paused road or an empty bucket: every queued call has its rescue timer."""
    small_times(monkeypatch)
    policy = replace(HASTY, batch_min_size=1000, batch_window_ms=60_000)
    async with riding(SOON, policy) as scene:
        assert text_of(await soon(scene.fleet.submit(**ask("alone"), budget="1.5s"))) == expected_text(ask("alone"))
        assert scene.log.creates == []
        assert len(scene.charges()) == 1


async def test_a_rescue_that_fails_misses_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    config = replace(faulty(sync_500=1.0), batch_rpm=None)
    policy = replace(HASTY, batch_min_size=1000, batch_window_ms=60_000)
    async with riding(config, policy) as scene:
        with pytest.raises(anthropic.InternalServerError):  # the provider's own last word
            await soon(scene.fleet.submit(**ask(), budget="1.5s"), 5)


async def test_a_batch_in_time_is_not_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    async with riding(SOON, HASTY) as scene:
        await soon(scene.fleet.submit(**ask(), budget="3s"))
        assert scene.log.messages == []
        assert scene.fleet.stats.rescued_calls == 0


# ---------------------------------------------------------------- keys


async def test_a_key_is_one_call() -> None:
    async with riding(faulty(batch_stuck=1.0)) as scene:
        first, second = scene.start("keyed", key="k-1"), scene.start("keyed", key="k-1")
        await scene.admitted(2)
        [bought] = await scene.bought()
        third = scene.start("keyed", key="k-1")
        await scene.admitted(3)
        scene.provider.end_batch(bought.provider_id)
        answers = await soon(asyncio.gather(first, second, third))
        assert len({answer.id for answer in answers}) == 1
        after = await soon(scene.fleet.submit(**ask("keyed"), key="k-1"))
        assert after == answers[0]
        assert len(scene.lines) == 1
        assert scene.fleet.stats.returned_calls == 3


async def test_one_of_two_under_a_key_may_leave() -> None:
    async with riding(faulty(batch_stuck=1.0)) as scene:
        leaves, stays = scene.start("keyed", key="k-1"), scene.start("keyed", key="k-1")
        await scene.admitted(2)
        [bought] = await scene.bought()
        leaves.cancel()
        scene.provider.end_batch(bought.provider_id)
        assert text_of(await soon(stays)) == expected_text(ask("keyed"))


async def test_one_who_comes_back_under_a_key_keeps_its_rescue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving and coming back cross each other; the call must still count as awaited."""
    small_times(monkeypatch)
    async with riding(faulty(batch_stuck=1.0), HASTY) as scene:
        for i in range(3):
            leaves = scene.start(f"keyed {i}", key=f"k-{i}", budget="1.5s")
            await scene.admitted(2 * i + 1)
            leaves.cancel()
            stays = scene.start(f"keyed {i}", key=f"k-{i}", budget="1.5s")
            assert text_of(await soon(stays, 3)) == expected_text(ask(f"keyed {i}"))


async def test_a_key_outlives_the_process(tmp_path: Path) -> None:
    async with provided() as (server, log):
        async with dispatching(server.url, store=tmp_path / "s.db") as fleet:
            first = await soon(fleet.submit(**ask("keyed"), key="k-1"))
            on_now = await soon(fleet.submit_sync(**ask("now"), key="k-2"))
        async with dispatching(server.url, store=f"sqlite:///{tmp_path}/s.db") as fleet:
            assert await soon(fleet.submit(**ask("keyed"), key="k-1")) == first
            assert await soon(fleet.submit_sync(**ask("now"), key="k-2")) == on_now
            with pytest.raises(KeyConflict, match="Use a new key"):
                await soon(fleet.submit(**ask("another"), key="k-1"))
        assert (len(log.creates), len(log.messages)) == (1, 1)


async def test_a_key_belongs_to_its_credential() -> None:
    async with riding() as scene:
        mine = await soon(scene.fleet.submit(**ask("mine"), key="k-1"))
        theirs = await soon(scene.fleet.submit(**ask("theirs"), key="k-1", extra_headers={"x-api-key": "sk-other"}))
        assert text_of(mine) != text_of(theirs)


# ---------------------------------------------------------------- stats, hooks, money


async def test_stats_agree_with_the_bill() -> None:
    async with riding() as scene:
        await soon(asyncio.gather(*[scene.fleet.submit(**ask(f"{i}")) for i in range(7)]))
        await soon(scene.fleet.submit_sync(**ask("now")))
        await scene.collected()
        stats, bill = scene.fleet.stats, scene.provider.bill
        assert stats.paid == bill.total()
        assert stats.would_have_paid == 2 * bill.total(kind="batch") + bill.total(kind="sync")
        assert stats.saved == bill.total(kind="batch")
        assert stats.paid_usd == pytest.approx(bill.total() / 1e9)
        assert stats.batches_submitted == stats.batches_collected == 1
        assert stats.settled_calls == 7


async def test_an_unknown_price_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider sells a model that the price table does not know: the purchase is unknown, never free."""
    model = "claude-unheard-of-9"
    monkeypatch.setitem(CATALOGUE, model, replace(CATALOGUE[MODEL], id=model))
    async with riding() as scene:
        await soon(scene.fleet.submit(**{**ask("by batch"), "model": model}))
        await soon(scene.fleet.submit_sync(**{**ask("now"), "model": model}))
        stats = scene.fleet.stats
        assert scene.provider.bill.total() > 0
        assert (stats.unknown_purchases, stats.paid, stats.would_have_paid) == (2, 0, 0)


async def test_events_tell_the_story() -> None:
    async with riding() as scene:
        await soon(scene.fleet.submit(**ask()))
        await scene.collected()
        kinds = [type(event) for event in scene.events.all]
        assert kinds == [CallAdmitted, BatchSubmitted, BatchEnded, CallSettled, BatchCollected]
        admitted, bought, ended, settled, collected = scene.events.all
        assert admitted.ticket == settled.ticket  # type: ignore[attr-defined]
        assert bought.provider_id == ended.provider_id == collected.provider_id == scene.provider.batches[0].id  # type: ignore[attr-defined]
        assert collected.results == {"succeeded": 1}  # type: ignore[attr-defined]
        assert [event.at for event in scene.events.all] == sorted(event.at for event in scene.events.all)


async def test_a_hook_that_raises_does_no_harm() -> None:
    def broken(event: Any) -> None:
        raise RuntimeError("the hook is broken")

    async with riding(hooks=(broken,)) as scene:
        assert text_of(await soon(scene.fleet.submit(**ask()))) == expected_text(ask())
        await scene.collected()
        assert len(scene.events.all) == 5


async def test_a_high_rate_of_failures_is_told() -> None:
    policy = replace(QUICK, alert_on_batch_failure_rate=0.05, linger_ms=150)
    async with riding(SOON, policy) as scene:
        texts = ["fine", "[error:invalid_request_error]"]
        await soon(asyncio.gather(*[scene.fleet.submit(**ask(text)) for text in texts], return_exceptions=True))
        [alarm] = await scene.events.wait(FailureRateHigh)
        assert (alarm.rate, alarm.limit, alarm.calls) == (0.5, 0.05, 2)


async def test_metrics_carry_the_prefix_and_may_hide_the_split() -> None:
    async with riding(policy=replace(QUICK, metrics_prefix="llm.fleet")) as scene:
        await soon(scene.fleet.submit_sync(**ask()))
        metrics = scene.fleet.metrics()
        assert all(re.fullmatch(r"llm\.fleet\.\w+", name) for name in metrics)
        assert (metrics["llm.fleet.sync_calls"], metrics["llm.fleet.batched_calls"]) == (1, 0)
    async with riding(policy=replace(QUICK, track_sync_batch_split=False)) as scene:
        await soon(scene.fleet.submit_sync(**ask()))
        metrics = scene.fleet.metrics()
        assert metrics["carpool.calls"] == 1
        assert "carpool.sync_calls" not in metrics


async def test_calls_that_are_too_long_are_refused_before_they_queue() -> None:
    policy = replace(QUICK, max_input_tokens=1000)
    async with riding(SOON, policy) as scene:
        for how in ({}, {"latency_budget_ms": 1000}, {"force_sync": True}, {"key": "k"}):
            with pytest.raises(CallTooLarge, match=r"about .* input tokens, over the limit of 1,000"):
                await soon(scene.fleet.submit(**ask("word " * 5000), **how))
        assert scene.log.requests == []
        await soon(scene.fleet.submit_sync(**ask("short")))
    async with riding(SOON, replace(policy, enforce_pre_queue_validation=False)) as scene:
        await soon(scene.fleet.submit_sync(**ask("word " * 5000)))


async def test_the_base_url_of_the_client_holds() -> None:
    """A gateway in front of the provider, below a path of its own."""
    async with provided() as (server, log):
        inner = server.provider.app

        async def below(scope: Any, receive: Any, send: Any) -> None:
            assert scope["path"].startswith("/gateway/v1/")
            await inner({**scope, "path": scope["path"].removeprefix("/gateway")}, receive, send)

        gateway = MockAnthropic(MockConfig())
        gateway.app = below  # type: ignore[assignment]
        async with serve(provider=gateway) as front, dispatching(f"{front.url}/gateway") as fleet:
            assert text_of(await soon(fleet.submit(**ask("a")))) == expected_text(ask("a"))
            assert text_of(await soon(fleet.submit_sync(**ask("b")))) == expected_text(ask("b"))
        assert len(log.creates) == 1


async def test_a_bearer_token_pools_like_a_key() -> None:
    async with provided() as (server, log):
        client = AsyncAnthropic(base_url=server.url, auth_token="token-1")
        async with client, FleetDispatcher(client, policy=QUICK, close_timeout=0.5) as fleet:
            assert text_of(await soon(fleet.submit(**ask("a")))) == expected_text(ask("a"))
        assert {request.headers["authorization"] for request in log.requests} == {"Bearer token-1"}
