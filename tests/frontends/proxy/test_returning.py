"""Clients that come back: retries, keys, adoption, tickets. Answered, and bought once; never joined by accident."""

import asyncio
from typing import Any

import anthropic
import httpx2
import pytest

from carpool.frontends.proxy.parse_head import later
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, MockConfig, expected_text, serve
from carpool.planners.policy import RoutingPolicy
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}
LATER = BATCH | {"prefer": "respond-async"}
KEY = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
SLOW = MockConfig(batch_latency=Constant(0.7))


def bought(stage: Any) -> int:
    return len(stage.mock.bill.charges)


async def take(stage: Any, path: str, method: str = "GET", **headers: str) -> Any:
    return await stage.http.request(method, stage.url + path, headers=KEY | headers)


# ------------------------------------------------------------ without a ticket


async def test_a_client_that_times_out_and_retries_is_answered_once(stage_with: Any) -> None:
    """The SDK gives up after 0.2 s, too soon for any sign of life, tries again, and so on, until the batch is there."""
    async with (
        stage_with(SLOW, intervals=KeepAliveIntervals()) as stage,
        stage.client("/@budget=30m", timeout=0.2, max_retries=8) as client,
    ):
        answer = await client.messages.create(**ask("impatient"))
        assert answer.content[0].text == expected_text(ask("impatient"))
        assert bought(stage) == 1
        assert stage.engine.stats.returned_calls >= 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_that_has_less_time_finds_its_call(stage_with: Any, stream: bool) -> None:
    """With 5 s it is routed to `now`: a fresh purchase, unless its answer is here already."""
    async with stage_with(MockConfig(batch_latency=Constant(0.1))) as stage:
        with pytest.raises(httpx2.ReadTimeout):
            await stage.http.post(
                f"{stage.url}/v1/messages", json=ask("hurry"), headers=KEY | BATCH, timeout=httpx2.Timeout(5, read=0.05)
            )
        await stage.until(lambda: stage.engine.stats.settled_calls)
        again = {"x-carpool-budget": "5s", "x-stainless-retry-count": "1"}
        answer = await stage.post(ask("hurry", stream=stream), **again)
        assert answer.status_code == 200
        assert bought(stage) == 1


async def test_a_retry_on_now_without_an_earlier_call_is_bought(stage_with: Any) -> None:
    async with stage_with() as stage:
        answer = await stage.post(ask("new"), **{"x-carpool-budget": "5s", "x-stainless-retry-count": "1"})
        assert (answer.status_code, answer.headers["x-carpool-lane"]) == (200, "now")
        assert bought(stage) == 1


async def test_two_live_identical_requests_are_two_purchases(stage_with: Any) -> None:
    async with stage_with(SLOW) as stage:
        one, two = await asyncio.gather(stage.post(ask("twice"), **BATCH), stage.post(ask("twice"), **BATCH))
        assert one.status_code == two.status_code == 200
        assert one.headers["x-carpool-ticket"] != two.headers["x-carpool-ticket"]
        assert bought(stage) == 2


async def test_a_sequential_second_sample_is_a_fresh_purchase(stage_with: Any) -> None:
    async with stage_with() as stage:
        one = await stage.post(ask("again"), **BATCH)
        await stage.until(lambda: not stage.engine.deliveries._pending)
        two = await stage.post(ask("again"), **BATCH)
        assert one.headers["x-carpool-ticket"] != two.headers["x-carpool-ticket"]
        assert bought(stage) == 2


async def test_a_marked_retry_of_a_delivered_answer_gets_it_again(stage_with: Any) -> None:
    async with stage_with() as stage:
        one = await stage.post(ask("lost on the way"), **BATCH)
        await stage.until(lambda: not stage.engine.deliveries._pending)
        two = await stage.post(ask("lost on the way"), **BATCH, **{"x-stainless-retry-count": "1"})
        assert two.content == one.content
        assert bought(stage) == 1


async def test_equal_bodies_of_two_keys_never_meet(stage_with: Any) -> None:
    async with stage_with(SLOW) as stage:
        with pytest.raises(anthropic.APITimeoutError):
            async with stage.client("/@budget=30m", timeout=0.2) as client:
                await client.messages.create(**ask("mine"))
        await stage.until(lambda: not len(stage.engine._context.waiters))
        other = await stage.post(ask("mine"), **BATCH, **{"x-api-key": "another"})
        assert other.status_code == 200
        assert bought(stage) == 2


@pytest.mark.parametrize("lane", ["batch", "now"])
async def test_one_key_at_the_same_time_is_one_purchase(stage_with: Any, lane: str) -> None:
    headers = {"x-carpool-key": "k1", "x-carpool-lane": lane}
    async with stage_with(SLOW) as stage:
        answers = await asyncio.gather(*(stage.post(ask("keyed"), **headers) for _ in range(5)))
        late = await stage.post(ask("keyed"), **headers)
        assert {answer.content for answer in answers} == {late.content}
        assert {answer.headers["x-carpool-ticket"] for answer in answers} == {late.headers["x-carpool-ticket"]}
        assert bought(stage) == 1


# ------------------------------------------------------------ 202 and a ticket


async def test_a_client_may_come_back_for_its_answer(stage_with: Any) -> None:
    async with stage_with(SLOW) as stage:
        accepted = await stage.post(ask("later"), **LATER)
        assert accepted.status_code == 202
        assert accepted.headers["preference-applied"] == "respond-async"
        told = accepted.json()
        assert accepted.headers["location"] == f"/carpool/calls/{told['ticket']}" == told["location"]
        assert (told["state"], told["lane"]) == ("queued", "batch")
        soon = await take(stage, told["location"])
        assert soon.status_code == 202
        assert soon.headers["retry-after"]
        assert soon.json()["ticket"] == told["ticket"]
        answer = await take(stage, told["location"] + "?wait=10s")
        assert answer.status_code == 200
        assert answer.json()["content"][0]["text"] == expected_text(ask("later"))
        assert answer.headers["x-carpool-lane"] == "batch"
        again = await take(stage, told["location"])
        assert again.content == answer.content
        assert bought(stage) == 1


async def test_an_answer_that_is_collected_keeps_the_providers_status(stage_with: Any) -> None:
    async with stage_with() as stage:
        accepted = await stage.post(ask("[error:invalid_request_error]"), **LATER)
        answer = await take(stage, accepted.headers["location"] + "?wait=10s")
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_without_a_budget_it_travels_on_now(stage_with: Any) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(0.3))) as stage:
        accepted = await stage.post(ask("now, but later"), prefer="respond-async")
        assert accepted.status_code == 202
        assert accepted.json()["lane"] == "now"
        answer = await take(stage, accepted.headers["location"] + "?wait=10s")
        assert answer.json()["content"][0]["text"] == expected_text(ask("now, but later"))
        assert bought(stage) == 1


async def test_a_client_may_hold_the_line_for_a_while(stage_with: Any) -> None:
    async with stage_with(MockConfig(batch_latency=Constant(0.2))) as stage:
        whole = await stage.post(ask("held"), **BATCH, prefer="respond-async, wait=10")
        assert whole.status_code == 200
        assert whole.json()["content"][0]["text"] == expected_text(ask("held"))


async def test_a_call_to_be_collected_is_no_ones_to_adopt(stage_with: Any) -> None:
    async with stage_with(SLOW) as stage:
        await stage.post(ask("mine alone"), **LATER)
        await stage.post(ask("mine alone"), **BATCH)
        assert bought(stage) == 2


async def test_a_call_to_be_collected_is_rescued_in_time(stage_with: Any) -> None:
    """Its client does not hold the line, but it asked for a deadline."""
    slow = MockConfig(batch_latency=Constant(60), sync_latency=Constant(0.05))
    async with stage_with(slow) as stage:
        headers = {"x-carpool-lane": "batch", "x-carpool-budget": "2s", "prefer": "respond-async"}
        accepted = await stage.post(ask("in time"), **headers)
        answer = await take(stage, accepted.headers["location"] + "?wait=10s")
        assert answer.status_code == 200
        assert answer.headers["x-carpool-lane"] == "now"


async def test_a_ticket_is_shown_to_its_own_key_only(stage_with: Any) -> None:
    async with stage_with() as stage:
        accepted = await stage.post(ask("private"), **LATER)
        place = accepted.headers["location"]
        strangers = [
            await take(stage, place, **{"x-api-key": "another"}),
            await take(stage, place, "DELETE", **{"x-api-key": "another"}),
            await stage.http.get(stage.url + place),
            await take(stage, "/carpool/calls/0000000000000"),
            await take(stage, "/carpool/calls/zzzzzzzzzzzzz"),
            await take(stage, "/carpool/calls/short"),
        ]
        assert {answer.status_code for answer in strangers} == {404}
        assert len({answer.content for answer in strangers}) == 1
        assert (await take(stage, place + "?wait=10s")).status_code == 200


async def test_a_waiting_call_is_taken_back(stage_with: Any) -> None:
    async with stage_with(policy=RoutingPolicy(linger_ms=60_000)) as stage:
        place = (await stage.post(ask("never mind"), **LATER)).headers["location"]
        told = (await take(stage, place, "DELETE")).json()
        assert (told["cancelled"], told["state"]) == (True, "settled")
        after = await take(stage, place)
        assert after.status_code == 409
        again = (await take(stage, place + "/cancel", "POST")).json()
        assert (again["cancelled"], again["state"]) == (False, "settled")
        assert bought(stage) == 0


async def test_a_call_on_its_way_is_left_to_itself(stage_with: Any) -> None:
    async with stage_with(SLOW) as stage:
        place = (await stage.post(ask("too late"), **LATER)).headers["location"]
        await stage.until(lambda: stage.mock.batches)
        told = (await take(stage, place, "DELETE")).json()
        assert (told["cancelled"], told["state"]) == (False, "boarded")
        assert "not be rescued" in told["message"]
        [row] = await stage.engine.overview.calls(None, None, 10)
        assert not row.awaited


async def test_other_methods_are_refused(stage_with: Any) -> None:
    async with stage_with() as stage:
        place = (await stage.post(ask("methods"), **LATER)).headers["location"]
        answer = await take(stage, place, "PUT")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "GET, DELETE"
        assert (await take(stage, place + "?wait=soon")).status_code == 400


async def test_a_restart_keeps_tickets(stage_with: Any, tmp_path: Any) -> None:
    store = tmp_path / "s.db"
    async with serve(MockConfig(batch_latency=Constant(0.5))) as mock:
        async with stage_with(store=store, beside=mock) as first:
            place = (await first.post(ask("kept"), **LATER)).headers["location"]
            await first.until(lambda: first.engine.stats.batches_submitted)
        async with stage_with(store=store, beside=mock) as second:
            answer = await take(second, place + "?wait=10s")
            assert answer.status_code == 200
            assert bought(second) == 1


async def test_a_call_on_now_that_lost_its_process_is_sent_anew(stage_with: Any, tmp_path: Any) -> None:
    store = tmp_path / "s.db"
    async with serve(MockConfig(sync_latency=Constant(1.0))) as mock:
        async with stage_with(store=store, beside=mock) as first:
            place = (await first.post(ask("sent anew"), prefer="respond-async")).headers["location"]
            await first.until(lambda: mock.provider.bill.charges)
            first.engine.abort()
        async with stage_with(store=store, beside=mock) as second:
            answer = await take(second, place + "?wait=10s")
            assert answer.status_code == 200
            assert answer.json()["content"][0]["text"] == expected_text(ask("sent anew"))
            assert bought(second) == 2  # the first may have been bought, and stands in the ledger as unknown


# ------------------------------------------------------------ wishes


@pytest.mark.parametrize(
    ("prefer", "seconds"),
    [
        ("", None),
        ("wait=10", None),
        ("return=minimal", None),
        ("respond-async", 0.0),
        ("Respond-Async; foo", 0.0),
        ("respond-async, wait=10", 10.0),
        ('wait="7", respond-async', 7.0),
        ("respond-async, wait=99999", 600.0),
        ("respond-async, wait=soon", 0.0),
    ],
)
async def test_wishes(prefer: str, seconds: float | None) -> None:
    assert later(prefer) == seconds


async def test_a_client_that_hangs_up_may_cancel_by_its_own_wish(stage_with: Any) -> None:
    async with stage_with(policy=RoutingPolicy(linger_ms=60_000)) as stage:
        headers = {"x-carpool-on-disconnect": "cancel"}
        async with stage.client("/@budget=30m", timeout=0.2, default_headers=headers) as client:
            with pytest.raises(anthropic.APITimeoutError):
                await client.messages.create(**ask("never mind"))
        await stage.until(lambda: not stage.proxy._open and not stage.engine._context.waiters)
        await asyncio.gather(*[task for task in asyncio.all_tasks() if task.get_name() in ("take back", "gone")])
        [call] = (await stage.http.get(f"{stage.url}/carpool/calls")).json()["calls"]
        assert call["kind"] == "cancelled"
