"""Every fault, as a client meets it."""

import dataclasses
import json

import anthropic
import httpx2
import pytest

from carpool.mock import ConnectionCut, Constant, Faults, MockConfig, serve
from carpool.mock.core.faults import NAMES

BATCHES = "/v1/messages/batches"
OLD = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
QUICK = MockConfig(faults=Faults(hang_s=30))


@pytest.mark.parametrize(
    ("fault", "failure", "accepted"),
    [
        ("create_cut", anthropic.APIConnectionError, False),
        ("create_hang", anthropic.APITimeoutError, False),
        ("create_500", anthropic.InternalServerError, False),
        ("create_529", anthropic.InternalServerError, False),
        ("create_429", anthropic.RateLimitError, False),
        ("create_429_bare", anthropic.RateLimitError, False),
        ("create_accepted_cut", anthropic.APIConnectionError, True),
        ("create_accepted_hang", anthropic.APITimeoutError, True),
        ("create_accepted_500", anthropic.InternalServerError, True),
        ("create_accepted_529", anthropic.InternalServerError, True),
    ],
)
async def test_failing_creates(connected, requests_of, fault, failure, accepted):
    async with connected(QUICK, timeout=0.2) as (server, client):
        server.provider.script(fault)
        with pytest.raises(failure) as caught:
            await client.messages.batches.create(requests=requests_of("a"))
        assert len(server.provider.batches) == accepted
        assert server.provider.faults_struck == {fault: 1}
        assert (await client.messages.batches.create(requests=requests_of("b"))).processing_status == "in_progress"
    if "429" in fault:
        assert caught.value.response.headers.get("retry-after") == (None if fault.endswith("bare") else "1")
    if "529" in fault:
        assert caught.value.status_code == 529


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("poll_cut", anthropic.APIConnectionError),
        ("poll_hang", anthropic.APITimeoutError),
        ("poll_500", anthropic.InternalServerError),
        ("poll_529", anthropic.InternalServerError),
        ("poll_429", anthropic.RateLimitError),
        ("poll_429_bare", anthropic.RateLimitError),
        ("poll_404", anthropic.NotFoundError),
        ("poll_garbage", anthropic.APIResponseValidationError),
    ],
)
async def test_failing_polls(connected, requests_of, fault, failure):
    async with connected(QUICK, timeout=0.2) as (server, client):
        batch = await client.messages.batches.create(requests=requests_of("a"))
        server.provider.script(fault, times=2)
        with pytest.raises(failure):
            await client.messages.batches.retrieve(batch.id)
        with pytest.raises(failure):
            await client.messages.batches.list()
        assert (await client.messages.batches.retrieve(batch.id)).id == batch.id


@pytest.mark.parametrize(
    ("fault", "failure", "billed"),
    [
        ("sync_cut", anthropic.APIConnectionError, 0),
        ("sync_500", anthropic.InternalServerError, 0),
        ("sync_529", anthropic.InternalServerError, 0),
        ("sync_429", anthropic.RateLimitError, 0),
        ("sync_429_bare", anthropic.RateLimitError, 0),
        ("sync_accepted_cut", anthropic.APIConnectionError, 1),
        ("sync_accepted_hang", anthropic.APITimeoutError, 1),
        ("sync_cut_midway", (anthropic.APIConnectionError, httpx2.TransportError), 1),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
async def test_failing_synchronous_calls(connected, body, fault, failure, billed, streaming):
    async with connected(QUICK, timeout=0.2) as (server, client):
        server.provider.script(fault)
        with pytest.raises(failure):  # noqa: PT012 - a stream may fail at its start or on its way
            if streaming:
                async with client.messages.stream(**body()) as stream:
                    await stream.get_final_message()
            else:
                await client.messages.create(**body())
        assert len(server.provider.bill.charges) == billed


async def test_a_stream_can_end_in_an_error_event(connected, body):
    async with connected() as (server, client):
        server.provider.script("sync_stream_error")
        with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
            async with client.messages.stream(**body()) as stream:
                await stream.get_final_message()
        assert len(server.provider.bill.charges) == 1


async def test_a_cut_is_a_reset_of_the_connection(body):
    async with serve() as server, httpx2.AsyncClient(headers=OLD, verify=False) as http:
        server.provider.script("sync_cut_midway")
        async with http.stream("POST", f"{server.url}/v1/messages", json=body()) as reply:
            assert reply.status_code == 200
            with pytest.raises((httpx2.ReadError, httpx2.RemoteProtocolError)):
                await reply.aread()


async def test_in_process_a_cut_is_an_exception_that_knows_what_was_accepted(turned, body, requests_of):
    world = turned()
    for fault, accepted in (("create_cut", False), ("create_accepted_cut", True)):
        world.provider.script(fault)
        with pytest.raises(ConnectionCut) as caught:
            await world.create(requests_of("a"))
        assert caught.value.after_acceptance is accepted
    assert len(world.provider.batches) == 1


async def test_slow_create_is_accepted_late(connected, requests_of):
    async with connected(MockConfig(faults=Faults(create_slow=1, create_slow_s=30)), timeout=0.1) as (server, client):
        with pytest.raises(anthropic.APITimeoutError):
            await client.messages.batches.create(requests=requests_of("a"))
        assert server.provider.batches == []


async def test_late_listing_hides_a_batch_from_list_but_not_from_retrieve(turned, requests_of):
    world = turned(MockConfig(faults=Faults(list_lag=1, list_lag_s=7)))
    batch_id = await world.create(requests_of("a"))
    assert (await world.look(batch_id))["id"] == batch_id
    assert (await world.call("GET", BATCHES)).json()["data"] == []
    world.time += 7
    assert len((await world.call("GET", BATCHES)).json()["data"]) == 1


async def test_strangers_put_batches_of_equal_size_alongside(turned, requests_of):
    world = turned(MockConfig(faults=Faults(stranger=1)))
    batch_id = await world.create(requests_of("a", "b"))
    own = world.provider.add_stranger("k", size=5)
    listed = {batch["id"]: batch for batch in (await world.call("GET", BATCHES)).json()["data"]}
    world.time += 1
    theirs = next(name for name in listed if name not in (batch_id, own.id))
    assert listed[theirs]["request_counts"] == listed[batch_id]["request_counts"]
    assert set(await world.results(theirs)) == {"theirs-0", "theirs-1"}
    assert len(world.provider.bill.charges) == 2
    assert len(world.provider.strangers_bill.charges) == 7


async def test_stuck_for_a_time_and_for_ever(turned, requests_of):
    world = turned(MockConfig(batch_latency=Constant(10), faults=Faults(stuck_s=100)))
    world.provider.script("batch_stuck")
    late, prompt = await world.create(requests_of("a")), await world.create(requests_of("a"))
    world.time += 109
    assert [(await world.look(name))["processing_status"] for name in (late, prompt)] == ["in_progress", "ended"]
    world.time += 1
    assert (await world.look(late))["processing_status"] == "ended"

    world = turned(MockConfig(faults=Faults(batch_stuck=1)))
    stuck = await world.create(requests_of("a"))
    world.time += 86_400
    assert (await world.look(stuck))["request_counts"]["expired"] == 1
    assert world.provider.bill.charges == []


async def test_a_forgotten_batch_is_denied_everywhere_and_billed_all_the_same(turned, requests_of):
    faults = Faults(forget_after_s=5, forgotten_s=60)
    world = turned(MockConfig(batch_latency=Constant(10), faults=faults))
    world.provider.script("batch_forgotten")
    forgotten, kept = await world.create(requests_of("a")), await world.create(requests_of("b"))
    assert (await world.look(forgotten))["processing_status"] == "in_progress"
    world.time += 20
    for method, path in (("GET", ""), ("POST", "/cancel"), ("GET", "/results")):
        assert (await world.call(method, f"{BATCHES}/{forgotten}{path}")).status == 404
    assert [one["id"] for one in (await world.call("GET", BATCHES)).json()["data"]] == [kept]
    assert len(world.provider.bill.charges) == 2
    world.time += 45
    assert (await world.look(forgotten))["processing_status"] == "ended"
    world.provider.forget_batch(kept)
    assert (await world.call("GET", f"{BATCHES}/{kept}")).status == 404


async def test_a_stuck_batch_can_be_cancelled_slowly(turned, requests_of):
    world = turned(MockConfig(faults=Faults(batch_stuck=1, cancel_slow_s=500)))
    world.provider.script("cancel_slow")
    stuck = await world.create(requests_of("a"))
    await world.call("POST", f"{BATCHES}/{stuck}/cancel")
    world.time += 499
    assert (await world.look(stuck))["processing_status"] == "canceling"
    world.time += 1
    assert (await world.look(stuck))["request_counts"]["canceled"] == 1
    assert world.provider.canceled == [stuck]


@pytest.mark.parametrize(
    ("fault", "status", "cancels"), [("cancel_500", 500, False), ("cancel_accepted_500", 500, True)]
)
async def test_failing_cancels(turned, requests_of, fault, status, cancels):
    world = turned(MockConfig(batch_latency=Constant(10)))
    batch_id = await world.create(requests_of("a"))
    world.provider.script(fault)
    assert (await world.call("POST", f"{BATCHES}/{batch_id}/cancel")).status == status
    assert (await world.look(batch_id))["processing_status"] == ("ended" if cancels else "in_progress")


async def test_missing_duplicate_unknown_and_malformed_lines(turned, requests_of):
    world = turned()
    for fault in ("line_missing", "line_duplicate", "line_unknown", "line_malformed"):
        world.provider.script(fault)
        batch_id = await world.create(requests_of("a", "b", "c"))
        world.time += 1
        lines = (await world.call("GET", f"{BATCHES}/{batch_id}/results")).body.splitlines()
        whole = [json.loads(line)["custom_id"] for line in lines if line.endswith(b"}")]
        expected = {
            "line_missing": ["c1", "c2"],
            "line_duplicate": ["c0", "c0", "c1", "c2"],
            "line_unknown": ["c0", "c1", "c2", "unknown-0"],
            "line_malformed": ["c1", "c2"],
        }
        assert sorted(whole) == expected[fault]
        assert len(lines) == len(whole) + (fault == "line_malformed")
        # Whatever became of its line, the request was bought.
        assert len(world.provider.bill.of_batches([batch_id])) == 3
        assert (await world.look(batch_id))["request_counts"]["succeeded"] == 3


async def test_server_errors_and_expiry_in_single_lines_are_unbilled(turned, requests_of):
    world = turned()
    for fault, kind in (
        ("line_api_error", "api_error"),
        ("line_overloaded", "overloaded_error"),
        ("line_expired", None),
    ):
        world.provider.script(fault)
        batch_id = await world.create(requests_of("a", "b"))
        world.time += 1
        line = (await world.results(batch_id))["c0"]
        assert line["type"] == ("errored" if kind else "expired")
        assert kind is None or line["error"]["error"]["type"] == kind
        assert [charge.custom_id for charge in world.provider.bill.of_batches([batch_id])] == ["c1"]


@pytest.mark.parametrize(
    "fault", ["results_cut", "results_hang", "results_500", "results_429", "results_404", "results_cut_midway"]
)
async def test_failing_results_can_be_fetched_again(connected, requests_of, fault):
    config = MockConfig(batch_latency=Constant(0), faults=Faults(hang_s=30))
    async with connected(config, timeout=0.2) as (server, client):
        batch = await client.messages.batches.create(requests=requests_of(*"abcdefgh"))
        server.provider.script(fault)
        got = []
        with pytest.raises((anthropic.APIError, httpx2.TransportError)):
            got.extend([line async for line in await client.messages.batches.results(batch.id)])
        assert len([line async for line in await client.messages.batches.results(batch.id)]) == 8


async def test_the_providers_clock_may_be_off(turned, requests_of):
    world = turned(MockConfig(faults=Faults(clock_offset_s=90)))
    answer = await world.call("POST", BATCHES, {"requests": requests_of("a")})
    assert answer.json()["created_at"] == "2027-01-15T08:01:30.000000Z"
    assert answer.headers["date"] == "Fri, 15 Jan 2027 08:01:30 GMT"


async def test_probabilities_are_obeyed_and_replayed_by_the_seed(turned, body):
    async def statuses(seed):
        world = turned(MockConfig(seed=seed, faults=Faults(sync_500=0.3)))
        return [(await world.call("POST", "/v1/messages", body())).status for _ in range(200)]

    first = await statuses(1)
    assert 30 <= first.count(500) <= 90
    assert first == await statuses(1)
    assert first != await statuses(2)


def test_unknown_faults_are_refused_and_all_known_ones_have_a_probability(turned):
    with pytest.raises(ValueError, match="no fault 'create_meteor'"):
        turned().provider.script("create_meteor")
    assert set(NAMES) < {field.name for field in dataclasses.fields(Faults)}
