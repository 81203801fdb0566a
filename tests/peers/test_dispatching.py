"""Bugs of dispatching that others had, 1 to 10, 14 and 15: none of them may ever be ours."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

import carpool.engine.batch.collect
import carpool.engine.batch.follow
from carpool import (
    BatchCollected,
    CallCancelled,
    CallExpired,
    CallLost,
    Closed,
    FleetDispatcher,
    NotStarted,
    Trouble,
)
from carpool.core.model import Lane, Outcome, OutcomeKind
from carpool.engine.context import Reply, Waiters
from carpool.mock import Constant, expected_text
from carpool.stores import SqliteStore
from tests.support.fleets import QUICK, SOON, ask, dispatching, faulty, riding, soon, text_of, until

# ---------------------------------------------------------------- 1, 2, 3: what comes back


async def test_01_results_are_awaited_and_answers_arrive() -> None:
    """Guard: results are really fetched over HTTP through the real SDK client, and each caller gets its own."""
    async with riding() as scene:
        texts = [f"essay {i}" for i in range(20)]
        answers = await soon(asyncio.gather(*[scene.fleet.submit(**ask(text)) for text in texts]))
        assert [text_of(answer) for answer in answers] == [expected_text(ask(text)) for text in texts]
        assert len(scene.charges("batch")) == 20
        assert scene.provider.requests_seen.count("results") == 1
        assert scene.fleet.stats.failed_calls == 0


async def test_02_every_lane_returns_the_same_type() -> None:
    """Guard: the batch lane's answer is parsed by the SDK itself, so it is the `Message` that `now` returns."""
    async with riding() as scene:
        by_batch = await soon(scene.fleet.submit(**ask("same")))
        by_now = await soon(scene.fleet.submit_sync(**ask("same")))
        plain = await soon(scene.client.messages.create(**ask("same")))
        assert type(by_batch) is type(by_now) is type(plain) is Message
        assert by_batch.content == by_now.content == plain.content
        assert by_batch.usage.output_tokens == plain.usage.output_tokens
        assert by_batch.model_fields_set == plain.model_fields_set


ONCE = replace(QUICK, max_attempts=1)


async def test_03_an_errored_line_is_the_providers_error() -> None:
    """Guard: an errored line raises the SDK's exception with the provider's status and words, never a message."""
    async with riding(SOON, ONCE) as scene:
        for kind, status, error in (
            ("invalid_request_error", 400, anthropic.BadRequestError),
            ("permission_error", 403, anthropic.PermissionDeniedError),
            ("not_found_error", 404, anthropic.NotFoundError),
            ("api_error", 500, anthropic.InternalServerError),
        ):
            with pytest.raises(error) as caught:
                await soon(scene.fleet.submit(**ask(f"[error:{kind}]")))
            assert caught.value.status_code == status
            assert f"You asked for {kind}." in str(caught.value)
        assert scene.fleet.stats.failed_calls == 4


async def test_03_an_expired_line_raises() -> None:
    """Guard: an expired line is `CallExpired`, never a success."""
    async with riding(SOON, ONCE) as scene:
        scene.provider.script("line_expired")
        with pytest.raises(CallExpired, match="provider's window") as caught:
            await soon(scene.fleet.submit(**ask()))
        assert len(caught.value.ticket) == 13
        assert scene.charges() == []


async def test_03_a_cancelled_line_raises() -> None:
    """Guard: a line that somebody cancelled at the provider is `CallCancelled`, never a success."""
    async with riding(faulty(batch_stuck=1.0), ONCE) as scene:
        call = scene.start()
        [bought] = await scene.bought()
        await scene.client.messages.batches.cancel(bought.provider_id)
        with pytest.raises(CallCancelled, match="was cancelled"):
            await soon(call)


# ---------------------------------------------------------------- 4, 5: many batches, wide batches


async def test_04_a_stuck_batch_blocks_nobody() -> None:
    """Guard: many batches are in flight at once; one that never ends holds no later one up."""
    async with riding(SOON, replace(QUICK, batch_max_size=2)) as scene:
        scene.provider.script("batch_stuck")
        stuck = [scene.start(f"stuck {i}") for i in range(2)]
        await scene.bought()
        later = await soon(asyncio.gather(*[scene.fleet.submit(**ask(f"later {i}")) for i in range(8)]))
        assert [text_of(one) for one in later] == [expected_text(ask(f"later {i}")) for i in range(8)]
        assert not any(call.done() for call in stuck)
        assert scene.fleet.stats.batches_submitted == 5
        scene.provider.release_batch(scene.provider.batches[0].id)
        assert [text_of(one) for one in await soon(asyncio.gather(*stuck))] == [
            expected_text(ask(f"stuck {i}")) for i in range(2)
        ]


async def test_04_batches_are_created_while_others_are_open() -> None:
    """Guard: a create does not wait for the end of the batch before it."""
    async with riding(faulty(batch_stuck=1.0), replace(QUICK, batch_max_size=1)) as scene:
        calls = [scene.start(f"call {i}") for i in range(6)]
        await scene.bought(6)
        assert [batch.status for batch in scene.provider.batches] == ["in_progress"] * 6
        for batch in scene.provider.batches:
            scene.provider.end_batch(batch.id)
        assert len(await soon(asyncio.gather(*calls))) == 6


async def _statements(count: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """SQL steps and transactions between the end of a batch of so many calls and its collection."""
    opened: list[SqliteStore] = []
    original = SqliteStore.open

    async def opening(*arguments: Any, **options: Any) -> Any:
        opened.append(await original(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(SqliteStore, "open", opening)
    async with riding(faulty(batch_stuck=1.0), replace(QUICK, linger_ms=300)) as scene:
        calls = [scene.start(f"{i}") for i in range(count)]
        await scene.admitted(count)
        await scene.bought()
        assert len(scene.provider.batches) == 1
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        [store] = opened
        commits = store.writer._groups.commits
        store._session.connection.set_progress_handler(step, 100)  # every 100 instructions of SQLite's machine
        scene.provider.end_batch(scene.provider.batches[0].id)
        await soon(asyncio.gather(*calls), 60)
        await scene.collected()
        store._session.connection.set_progress_handler(None, 0)
        return steps, store.writer._groups.commits - commits


async def test_05_collecting_is_linear_in_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: a result finds its caller by ticket. Ten times the lines cost ten times the work, not a hundred times."""
    small, few = await _statements(80, monkeypatch)
    large, more = await _statements(800, monkeypatch)
    assert large / small < 15
    assert more / few < 15


async def test_05_waiters_are_found_without_a_scan() -> None:
    """Guard: waking one caller looks at that caller only, however many others wait."""
    compared = 0

    class Ticket(int):
        def __hash__(self) -> int:
            return int.__hash__(self)

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int.__eq__(self, other)  # type: ignore[no-any-return]

    waiters, count = Waiters(), 2_000
    futures = [waiters.add(Ticket(i)) for i in range(count)]
    compared = 0
    outcome = Outcome(OutcomeKind.SUCCEEDED, 200, b"{}", 0.0, Lane.BATCH)
    for i in reversed(range(count)):
        waiters.resolve(Reply(Ticket(i), outcome))
    assert all(future.done() for future in futures)
    assert compared <= 4 * count


# ---------------------------------------------------------------- 6: when a batch is sealed


async def test_06_a_burst_travels_together() -> None:
    """Guard: the linger starts with the first call and is waited out, so a burst is one batch and not 1 + rest."""
    async with riding(SOON, replace(QUICK, linger_ms=700)) as scene:
        first = scene.start("first")
        await scene.admitted()
        await asyncio.sleep(0.25)  # well after the engine has looked at it
        rest = [scene.start(f"rest {i}") for i in range(29)]
        await soon(asyncio.gather(first, *rest))
        assert [batch.size for batch in scene.provider.batches] == [30]


async def test_06_the_linger_does_not_start_before_the_first_call() -> None:
    """Guard: a fleet that was idle for longer than its window still gives a burst its whole linger."""
    async with riding(SOON, replace(QUICK, linger_ms=500)) as scene:
        await asyncio.sleep(0.6)  # idle, so that a window that began at the start would be over
        first = scene.start("first")
        await scene.admitted()
        await asyncio.sleep(0.2)
        rest = [scene.start(f"rest {i}") for i in range(9)]
        await soon(asyncio.gather(first, *rest))
        assert [batch.size for batch in scene.provider.batches] == [10]


async def test_06_min_size_is_obeyed() -> None:
    """Guard: `batch_min_size` is read: fewer wait for company until the window ends, enough go at once."""
    policy = replace(QUICK, batch_min_size=5, batch_window_ms=60_000)
    async with riding(SOON, policy) as scene:
        calls = [scene.start(f"early {i}") for i in range(4)]
        await scene.admitted(4)
        await asyncio.sleep(0.4)  # eight lingers
        assert scene.log.creates == []
        calls.append(scene.start("the fifth"))
        await soon(asyncio.gather(*calls))
        assert [batch.size for batch in scene.provider.batches] == [5]


async def test_06_the_window_ends_the_wait_for_min_size() -> None:
    """Guard: `batch_window_ms` bounds the wait for `batch_min_size`."""
    async with riding(SOON, replace(QUICK, batch_min_size=50, batch_window_ms=300)) as scene:
        await soon(asyncio.gather(*[scene.fleet.submit(**ask(f"call {i}")) for i in range(3)]))
        assert [batch.size for batch in scene.provider.batches] == [3]


async def test_06_max_size_is_obeyed() -> None:
    """Guard: `batch_max_size` splits what is more."""
    async with riding(SOON, replace(QUICK, batch_max_size=4)) as scene:
        await soon(asyncio.gather(*[scene.fleet.submit(**ask(f"call {i}")) for i in range(12)]))
        assert max(batch.size for batch in scene.provider.batches) == 4
        assert sum(batch.size for batch in scene.provider.batches) == 12


# ---------------------------------------------------------------- 7, 8: odd lines, failed looks


async def test_07_a_missing_line_ends_its_callers_wait() -> None:
    """Guard: at the end of a batch every call without a line is dealt with: here, after one attempt, as lost."""
    async with riding(SOON, replace(ONCE, linger_ms=200)) as scene:
        scene.provider.script("line_missing")
        calls = [scene.start(f"call {i}") for i in range(5)]
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        assert Counter(type(one) for one in results) == {Message: 4, CallLost: 1}
        await scene.collected()
        assert scene.fleet.stats.missing_lines == 1
        assert scene.fleet.stats.unknown_purchases == 1


async def test_07_a_missing_line_is_asked_again_while_attempts_are_left() -> None:
    """Guard: with attempts left, a call without a line goes into another batch, and is answered."""
    async with riding() as scene:
        scene.provider.script("line_missing")
        answer = await soon(scene.fleet.submit(**ask("twice")))
        assert text_of(answer) == expected_text(ask("twice"))
        assert [batch.size for batch in scene.provider.batches] == [1, 1]


async def test_07_unknown_duplicate_and_malformed_lines_kill_nobody() -> None:
    """Guard: lines that name no call of the batch, or name one twice, are counted and left."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        for fault, times in (("line_unknown", 3), ("line_duplicate", 3), ("line_malformed", 1)):
            scene.provider.script(fault, times)
        texts = [f"call {i}" for i in range(8)]
        calls = [scene.start(text) for text in texts]
        answers = await soon(asyncio.gather(*calls))
        assert [text_of(answer) for answer in answers] == [expected_text(ask(text)) for text in texts]
        await scene.collected()
        assert scene.fleet.stats.stray_lines >= 4  # three unknown, and the malformed one
        assert scene.fleet._engine is not None
        assert scene.fleet._engine.failures == 0
        assert text_of(await soon(scene.fleet.submit(**ask("after")))) == expected_text(ask("after"))


@pytest.mark.parametrize("fault", ["poll_500", "poll_529", "poll_cut", "poll_garbage", "poll_429"])
async def test_08_failed_polls_fail_nobody(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: any number of failed looks is survived, and the calls are answered when a look succeeds."""
    monkeypatch.setattr(carpool.engine.batch.follow, "FAILED_POLL_S", 0.1)
    async with riding(faulty(retry_after_s=0)) as scene:
        scene.provider.script(fault, 4)
        answer = await soon(scene.fleet.submit(**ask("patience")))
        assert text_of(answer) == expected_text(ask("patience"))
        assert scene.provider.faults_struck == {fault: 4}
        assert len(scene.events.of(Trouble)) == 4


async def test_08_failed_polls_are_spaced_out() -> None:
    """Guard: a provider in trouble is not hammered: after a failed look the next one waits."""
    async with riding(faulty(poll_500=1.0)) as scene:
        call = scene.start()
        await scene.events.wait(Trouble)
        await asyncio.sleep(1.0)
        assert len(scene.log.polls) <= 4
        call.cancel()


@pytest.mark.parametrize("fault", ["results_500", "results_cut", "results_cut_midway"])
async def test_08_failed_fetches_of_results_fail_nobody(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: results that break off are fetched again, and nobody is answered twice or billed twice."""
    monkeypatch.setattr(carpool.engine.batch.collect, "RETRY_S", 0.02)
    async with riding(SOON, replace(QUICK, linger_ms=150)) as scene:
        scene.provider.script(fault, 2)
        calls = [scene.start(f"call {i}") for i in range(10)]
        answers = await soon(asyncio.gather(*calls))
        assert [text_of(one) for one in answers] == [expected_text(ask(f"call {i}")) for i in range(10)]
        await scene.collected()
        assert scene.fleet.stats.paid == sum(charge.nano_usd for charge in scene.charges())


async def test_08_one_bad_line_fails_its_own_caller_only() -> None:
    """Guard: a 400 in one line is that caller's error; its neighbours get their answers from the same batch."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        texts = ["fine 1", "[error:invalid_request_error]", "fine 2"]
        calls = [scene.start(text) for text in texts]
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        assert [text_of(results[i]) for i in (0, 2)] == [expected_text(ask(texts[i])) for i in (0, 2)]
        assert isinstance(results[1], anthropic.BadRequestError)
        assert [batch.size for batch in scene.provider.batches] == [3]


# ---------------------------------------------------------------- 9: callers that leave


async def test_09_a_caller_cancelled_before_the_flush_is_not_sent() -> None:
    """Guard: cancelling a call that still waits takes it out of the pool: it is never sent and never paid."""
    async with riding(SOON, replace(QUICK, linger_ms=400)) as scene:
        calls = [scene.start(f"call {i}") for i in range(4)]
        await scene.admitted(4)
        calls[1].cancel()
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        assert isinstance(results[1], asyncio.CancelledError)
        sent = [line["params"]["messages"][0]["content"] for line in scene.lines]
        assert sorted(sent) == ["call 0", "call 2", "call 3"]
        assert len(scene.charges()) == 3


async def test_09_a_caller_cancelled_at_the_door_is_not_sent() -> None:
    """Guard: a caller that leaves while its call is being written down leaves nothing to send."""
    async with riding(SOON, replace(QUICK, linger_ms=200)) as scene:
        leaving = scene.start("leaving")
        staying = scene.start("staying")
        await asyncio.sleep(0)
        leaving.cancel()
        await soon(staying)
        await scene.collected()
        assert [line["params"]["messages"][0]["content"] for line in scene.lines] == ["staying"]


async def test_09_a_caller_cancelled_after_the_flush_harms_nobody() -> None:
    """Guard: the answer of a caller that left does not stop those of its neighbours, nor the engine."""
    async with riding(faulty(batch_stuck=1.0), replace(QUICK, linger_ms=200)) as scene:
        calls = [scene.start(f"call {i}") for i in range(5)]
        [bought] = await scene.bought()
        calls[0].cancel()
        calls[3].cancel()
        scene.provider.end_batch(bought.provider_id)
        results = await soon(asyncio.gather(*calls, return_exceptions=True))
        for i in (1, 2, 4):
            assert text_of(results[i]) == expected_text(ask(f"call {i}"))
        await scene.collected()
        assert scene.events[BatchCollected][0].results == {"succeeded": 5}
        assert scene.fleet._engine is not None
        assert scene.fleet._engine.failures == 0
        scene.provider.script("batch_stuck", 0)


async def test_09_a_cancel_never_hits_the_one_who_comes_back() -> None:
    """Guard: leaving and coming back at once with the same body never cancels the newcomer's call, nor hangs it."""
    async with riding(SOON, replace(QUICK, linger_ms=300)) as scene:
        for round_ in range(5):
            leaving = scene.start("the same")
            await scene.admitted(round_ * 2 + 1)
            leaving.cancel()
            assert text_of(await soon(scene.fleet.submit(**ask("the same")))) == expected_text(ask("the same"))
        assert len(scene.charges()) == 5


# ---------------------------------------------------------------- 10: what may not ride


async def test_10_streaming_is_never_passed_into_a_batch() -> None:
    """Guard: `stream` is cut out of the body of a call that rides, and the answer is replayed as a stream."""
    async with riding() as scene:
        stream = await soon(scene.fleet.submit(**ask("flow"), stream=True, lane="batch"))
        kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        [line] = scene.lines
        assert line["params"] == ask("flow")


@pytest.mark.parametrize(
    "field",
    [{"speed": "fast"}, {"extra_body": {"store": True}}, {"extra_body": {"cache_hint": {"x": 1}}}, {"max_tokens": 0}],
)
async def test_10_calls_with_forbidden_fields_go_now(field: dict[str, Any]) -> None:
    """Guard: a body that the batch road refuses travels on `now`, and insisting on the batch is an error."""
    async with riding() as scene:
        answer = await soon(scene.fleet.submit(**{**ask("quick"), **field}))
        assert type(answer) is Message
        assert scene.log.creates == []
        assert scene.fleet.stats.sync_calls == 1
        with pytest.raises(carpool.BadCall, match="A batch may not carry"):
            await soon(scene.fleet.submit_batch(**{**ask("quick"), **field}))


# ---------------------------------------------------------------- 14, 15: locks, closing, being outside


async def test_14_nobody_waits_for_somebody_elses_retry_after() -> None:
    """Guard: while a create waits out its `retry-after`, calls on `now` and other credentials' batches go on."""
    async with riding(faulty(retry_after_s=30)) as scene:
        scene.provider.script("create_429")
        waiting = scene.start("waits")
        await until(lambda: scene.log.creates)
        answer = await soon(scene.fleet.submit_sync(**ask("now")), 3)
        assert text_of(answer) == expected_text(ask("now"))
        other = scene.fleet.submit(**ask("other"), extra_headers={"x-api-key": "sk-another-key"})
        assert text_of(await soon(other, 3)) == expected_text(ask("other"))
        await until(lambda: scene.fleet.stats.batches_refused)
        assert not waiting.done()
        assert len(scene.log.creates) == 2
        waiting.cancel()


async def test_14_retry_after_is_obeyed() -> None:
    """Guard: a 429 pauses the credential for as long as it says, and the calls are then bought once."""
    async with riding(faulty(retry_after_s=1)) as scene:
        scene.provider.script("create_429")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await soon(scene.fleet.submit(**ask("later")))
        assert loop.time() - began >= 1
        assert len(scene.log.creates) == 2
        assert len(scene.charges()) == 1


async def test_14_close_does_not_wait_for_the_remote_batch(tmp_path: Any) -> None:
    """Guard: close is bounded although a batch is open at the provider, and the call is there after a restart."""
    store = tmp_path / "fleet.db"
    async with riding(faulty(batch_stuck=1.0), store=store, close_timeout=0.1) as scene:
        call = scene.start("kept")
        [bought] = await scene.bought()
        await soon(scene.fleet.close(), 3)
        with pytest.raises(Closed, match="kept in the store"):
            await soon(call)
        async with FleetDispatcher(scene.client, policy=QUICK, store=store, close_timeout=0.1) as again:
            call = asyncio.create_task(again.submit(**ask("kept")))
            await until(lambda: again.stats.returned_calls)
            scene.provider.end_batch(bought.provider_id)
            assert text_of(await soon(call)) == expected_text(ask("kept"))
        assert len(scene.log.creates) == 1
        assert len(scene.charges()) == 1


async def test_14_close_loses_nothing_of_the_queue(tmp_path: Any) -> None:
    """Guard: calls that still wait in their pool at close are in the file, and are answered after a restart."""
    store = tmp_path / "fleet.db"
    async with riding(faulty(retry_after_s=60), store=store, close_timeout=0.1) as scene:
        scene.provider.script("create_429")
        calls = [scene.start(f"call {i}") for i in range(10)]
        await until(lambda: scene.fleet.stats.batches_refused)
        await soon(scene.fleet.close(), 3)
        assert {type(one) for one in await soon(asyncio.gather(*calls, return_exceptions=True))} == {Closed}
        async with dispatching(scene.server.url, store=store) as again:
            answers = await soon(asyncio.gather(*[again.submit(**ask(f"call {i}")) for i in range(10)]))
            assert [text_of(one) for one in answers] == [expected_text(ask(f"call {i}")) for i in range(10)]
            assert again.stats.returned_calls == 10
        assert len(scene.charges()) == 10


async def test_14_close_is_quick_when_nothing_is_open() -> None:
    """Guard: closing a fleet at rest takes no time, whatever its timeout is."""
    async with riding(close_timeout=60.0) as scene:
        await soon(scene.fleet.submit(**ask()))
        await scene.collected()
        await asyncio.sleep(0.2)  # until the engine sleeps: being woken and stopped at once must not cross
        await soon(scene.fleet.close(), 1.5)


async def test_14_close_waits_for_calls_on_now() -> None:
    """Guard: a call on `now` is one of the open ones that close gives its time to."""
    async with riding(replace(SOON, sync_latency=Constant(0.4)), close_timeout=5.0) as scene:
        call = asyncio.create_task(scene.fleet.submit_sync(**ask("under way")))
        await until(lambda: scene.log.messages)
        await soon(scene.fleet.close())
        assert call.done()
        assert text_of(await call) == expected_text(ask("under way"))


async def test_15_submit_outside_the_context_raises() -> None:
    """Guard: before `async with` a submit raises at once, and says what to write; after it likewise."""
    async with riding() as scene:
        lone = FleetDispatcher(scene.client)
        for verb in (lone.submit, lone.submit_sync, lone.submit_batch):
            with pytest.raises(NotStarted, match="async with"):
                await soon(verb(**ask()), 1)
        assert lone.stats.sync_calls == 0
    with pytest.raises(Closed, match="Make a new one"):
        await soon(scene.fleet.submit(**ask()), 1)


async def test_15_submit_on_another_loop_raises() -> None:
    """Guard: a dispatcher used from another event loop raises instead of waiting for ever."""
    async with riding() as scene:

        def elsewhere() -> None:
            asyncio.run(scene.fleet.submit(**ask()))

        with pytest.raises(NotStarted, match="another event loop"):
            await soon(asyncio.to_thread(elsewhere), 3)
