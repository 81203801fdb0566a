"""What holds at every OpenAI-compatible provider, over real HTTP: the same promises, whatever its habits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from carpool.core.errors import BadCall
from carpool.core.model import Lane
from carpool.dialects import COMPATIBLE_PROVIDERS
from carpool.mock import Constant, Faults, MockConfig, OpenAIConfig, expected_openai_text, serve
from carpool.mock.openai.providers import TABLE
from tests.support.openai_providers import ROWS, Row, engine_at, scene, until

TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(params=sorted(ROWS))
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def said(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["message"]["content"])


def test_every_relative_is_under_contract() -> None:
    assert set(ROWS) == set(COMPATIBLE_PROVIDERS) == set(TABLE)


# ---------------------------------------------------------------- the way there and back


async def test_calls_ride_together_and_come_back_each_to_its_own(row: Row) -> None:
    async with scene(row) as on:
        bodies = [on.body(f"number {number}") for number in range(5)]
        replies = await asyncio.gather(*(on.ask(body) for body in bodies))
        assert [said(reply.outcome.body) for reply in replies] == [expected_openai_text(body) for body in bodies]
        assert {reply.outcome.lane for reply in replies} == {Lane.BATCH}
        assert [batch.size for batch in on.mock.provider.batches] == [5]
        entries = await on.entries(*replies)
        assert len(entries) == len(on.mock.provider.bill.charges) == 5
        if row.priced:
            assert sum(entry.paid or 0 for entry in entries) == on.mock.provider.bill.total()
        else:
            assert {entry.paid for entry in entries} == {None}


async def test_tools_and_thoughts_are_paid_for_as_they_are_billed(row: Row) -> None:
    async with scene(row) as on:
        bodies = [on.body("[tool] now", tools=[TOOL]), on.body("[think] hard")]
        replies = [await on.ask(body, lane=lane) for lane in (Lane.NOW, Lane.BATCH) for body in bodies]
        for reply in replies[::2]:
            call = json.loads(reply.outcome.body)["choices"][0]["message"]["tool_calls"][0]
            assert json.loads(call["function"]["arguments"])["nested"] == {"n": [1, 2.5, None, True]}
        entries = {entry.ticket: entry for entry in await on.entries(*replies)}
        charges = on.mock.provider.bill.charges
        now = [charge.nano_usd for charge in charges if charge.kind == "sync"]
        assert [entries[reply.ticket].paid for reply in replies[:2]] == now
        billed = [charge.nano_usd for charge in charges if charge.kind == "batch"]
        assert [entries[reply.ticket].paid for reply in replies[2:]] == (billed if row.priced else [None, None])


async def test_a_batch_of_many_pages_comes_home_whole(row: Row) -> None:
    async with scene(row) as on:
        bodies = [on.body(f"number {number}") for number in range(600)]
        replies = await asyncio.gather(*(on.ask(body, 60) for body in bodies))
        assert [said(reply.outcome.body) for reply in replies] == [expected_openai_text(body) for body in bodies]
        assert len(on.mock.provider.bill.charges) == 600


async def test_models_never_meet_in_a_file(row: Row) -> None:
    async with scene(row) as on:
        await asyncio.gather(*(on.ask(on.body() | {"model": model}) for model in (row.model, row.other) * 2))
        models = {row.model, row.other}
        assert sorted(batch.size for batch in on.mock.provider.batches) == [4 // len(models)] * len(models)


async def test_nothing_is_left_at_the_provider(row: Row) -> None:
    async with scene(row) as on:
        calls = [on.body(), *(() if row.blunt else (on.body("[error:invalid_request_error]"),))]
        await asyncio.gather(*map(on.ask, calls))
        project = next(iter(on.mock.provider._state.projects.values()))
        if row.sweeps:
            await until(lambda: not list(project.files.newest_first(0.0)))
        else:  # such a batch does not say which file it was made of
            assert len(list(project.files.newest_first(0.0))) == 1


# ---------------------------------------------------------------- purchases that nobody answered


@pytest.mark.parametrize("fault", ["create_accepted_cut", "create_accepted_500"])
async def test_a_create_with_unknown_outcome_is_found_by_its_nonce(row: Row, fault: str) -> None:
    async with scene(row) as on:
        on.mock.provider.add_openai_stranger("k", 1)
        on.mock.provider.script(fault)
        reply = await on.ask()
        assert said(reply.outcome.body) == expected_openai_text(on.body())
        assert on.engine.stats.batches_unknown == 1
        assert len(on.mock.provider.bill.charges) == 1
        assert not on.mock.provider.canceled


async def test_an_unknown_create_that_bought_nothing_is_bought_once(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.batch.follow.GRACE_S", 0.2)
    async with scene(row) as on:
        on.mock.provider.add_openai_stranger("k", 1)
        on.mock.provider.script("create_cut")
        reply = await on.ask()
        assert reply.outcome.status == 200
        assert len(on.mock.provider.bill.charges) == 1
        entries = await on.entries(reply)
        assert sum(entry.paid is None for entry in entries) == (
            1 if row.priced else 2
        )  # nobody saw whether it went out


@pytest.mark.parametrize("point", ["created", "ended"])
async def test_a_successor_buys_nothing_twice(row: Row, point: str, tmp_path: Path) -> None:
    there = asyncio.Event()

    async def probe(name: str) -> None:
        if name == point:
            there.set()
            await asyncio.Event().wait()  # for ever, until it is aborted

    config = MockConfig(batch_latency=Constant(0.2), openai=OpenAIConfig(vendor=row.name))
    async with serve(config) as mock:
        async with engine_at(row, mock, tmp_path / "fleet.db", probe) as on:
            waiting = asyncio.create_task(on.engine.submit(on.call(on.body(), key="once")))
            await asyncio.wait_for(there.wait(), 20)
            await on.stop()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with engine_at(row, mock, tmp_path / "fleet.db") as on:
            reply = await on.ask(key="once")
            assert said(reply.outcome.body) == expected_openai_text(on.body())
            assert len(mock.provider.batches) == len(mock.provider.bill.charges) == 1


@pytest.mark.parametrize("fault", ["upload_cut", "upload_500", "upload_429", "upload_accepted_cut"])
async def test_an_upload_that_fails_buys_nothing(row: Row, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.batch.api.PAUSE_S", 0.05)
    async with scene(row, {"faults": Faults(retry_after_s=0)}) as on:
        on.mock.provider.script(fault)
        assert (await on.ask()).outcome.status == 200
        assert len(on.mock.provider.bill.charges) == 1
        assert on.engine.stats.batches_unknown == 0


# ---------------------------------------------------------------- states and lines


async def test_a_batch_that_fails_as_a_whole_sends_its_calls_on(row: Row) -> None:
    async with scene(row, max_batch_requests=1) as on:
        replies = await asyncio.gather(*(on.ask(on.body(str(number))) for number in range(3)))
        assert {reply.outcome.status for reply in replies} == {200}
        assert on.engine.stats.batches_refused >= 1
        assert len(on.mock.provider.bill.charges) == 3


async def test_what_a_batch_did_not_run_is_run_elsewhere(row: Row) -> None:
    async with scene(row) as on:
        on.mock.provider.script("line_expired", 1)
        bodies = [on.body(str(number)) for number in range(4)]
        replies = await asyncio.gather(*(on.ask(body) for body in bodies))
        assert [said(reply.outcome.body) for reply in replies] == [expected_openai_text(body) for body in bodies]
        assert len(on.mock.provider.bill.charges) == 4


async def test_an_expired_batch_is_resubmitted(row: Row) -> None:
    async with scene(row, {"batch_latency": Constant(60.0), "expiry_s": 0.4}) as on:
        waiting = asyncio.create_task(on.ask())
        await until(lambda: len(on.mock.provider.batches) > 1)
        on.mock.provider.end_batch(on.mock.provider.batches[-1].id)
        reply = await asyncio.wait_for(waiting, 20)
        assert said(reply.outcome.body) == expected_openai_text(on.body())


async def test_a_cancelled_batch_gives_back_what_it_did_not_run(row: Row) -> None:
    async with scene(row, {"batch_latency": Constant(60.0)}) as on:
        waiting = asyncio.create_task(on.ask())
        await until(lambda: on.mock.provider.batches)
        first = on.mock.provider.batches[0]
        ask = on.upstream.dialect.cancel((), first.id)
        answer = await on.upstream.ask(ask, row.secret, timeout=10)
        assert answer.status == 200, await answer.read()
        assert on.mock.provider.canceled == [first.id]
        await until(lambda: len(on.mock.provider.batches) > 1)
        on.mock.provider.end_batch(on.mock.provider.batches[-1].id)
        assert (await asyncio.wait_for(waiting, 20)).outcome.status == 200
        assert len(on.mock.provider.bill.charges) == 1


@pytest.mark.parametrize("fault", ["line_api_error", "line_overloaded", "line_duplicate", "line_unknown"])
async def test_odd_lines_hurt_nobody(row: Row, fault: str) -> None:
    async with scene(row) as on:
        on.mock.provider.script(fault, 1)
        bodies = [on.body(str(number)) for number in range(3)]
        replies = await asyncio.gather(*(on.ask(body) for body in bodies))
        assert [said(reply.outcome.body) for reply in replies] == [expected_openai_text(body) for body in bodies]
        assert len(on.mock.provider.bill.charges) == 3


@pytest.mark.parametrize("fault", ["poll_500", "poll_garbage", "poll_cut", "results_500", "results_cut"])
async def test_looking_survives(row: Row, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.batch.follow.FAILED_POLL_S", 0.05)
    monkeypatch.setattr("carpool.engine.batch.collect.RETRY_S", 0.05)
    async with scene(row) as on:
        on.mock.provider.script(fault, 2)
        assert (await on.ask()).outcome.status == 200
        assert len(on.mock.provider.bill.charges) == 1


# ---------------------------------------------------------------- errors


async def test_a_bad_call_is_told_as_the_provider_tells_it(row: Row) -> None:
    async with scene(row) as on:
        bad = on.body("[error:invalid_request_error]")
        now, batched = await on.ask(bad, lane=Lane.NOW), await on.ask(bad)
        assert (now.outcome.status, batched.outcome.status) == (400, 500 if row.blunt else 400)
        for reply in (now, batched):
            assert "You asked for invalid_request_error." in reply.outcome.body.decode()
        assert not on.mock.provider.bill.charges


async def test_a_wrong_key_is_remembered_and_told(row: Row) -> None:
    async with scene(row, {"keys": frozenset({"another"})}) as on:
        reply = await on.ask()
        assert reply.outcome.status in (400, 401)
        assert on.engine.stats.batches_refused == 1
        with pytest.raises(BadCall, match="can't batch"):
            await on.ask()


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_where_there_are_no_batches_nobody_waits_for_one(row: Row, status: int) -> None:
    async with scene(row, no_batches=status) as on:
        reply = await on.ask()
        assert (reply.outcome.status, reply.outcome.lane) == (200, Lane.NOW)
        assert on.engine.stats.batches_refused == 1
        second = await on.ask(lane=None)
        assert second.outcome.lane is not Lane.BATCH
        assert on.engine.stats.batches_refused == 1


# ---------------------------------------------------------------- what never rides


async def test_what_its_batches_do_not_take_is_said(row: Row) -> None:
    async with scene(row) as on:
        for path in row.refused:
            body = {"model": row.model, "input": "hi", "prompt": "hi"}
            with pytest.raises(BadCall, match="takes no /v1/"):
                await on.ask(body, path=path)
        if row.unoffered:
            with pytest.raises(BadCall, match="not offered"):
                await on.ask(on.body() | {"model": row.unoffered})
        most = COMPATIBLE_PROVIDERS[row.name].max_line
        if most is not None:
            with pytest.raises(BadCall, match="at most"):
                await on.ask(on.body("x" * most))
        assert not on.mock.provider.batches
