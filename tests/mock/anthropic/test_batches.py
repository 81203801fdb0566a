"""The life of a batch: limits, validation timing, cancel, expiry, archive, listing."""

import asyncio

import anthropic
import pytest

from carpool.mock import Constant, MockConfig, Uniform, expected_text

DAY = 86_400
BATCHES = "/v1/messages/batches"


async def test_whole_life_with_the_real_sdk(connected, requests_of, body):
    async with connected() as (server, client):
        api = client.messages.batches
        created = await api.create(requests=requests_of("a", "b", "[blocks]", "[error:api_error]"))
        assert created.processing_status == "in_progress"
        assert created.request_counts.processing == 4
        assert created.results_url is None
        await asyncio.sleep(0.06)
        ended = await api.retrieve(created.id)
        assert ended.processing_status == "ended"
        assert (ended.request_counts.succeeded, ended.request_counts.errored) == (3, 1)
        assert ended.results_url.startswith(server.url)
        lines = {line.custom_id: line.result async for line in await api.results(created.id)}
        assert [batch.id async for batch in api.list()] == [created.id]
        assert (await api.delete(created.id)).type == "message_batch_deleted"
        with pytest.raises(anthropic.NotFoundError):
            await api.retrieve(created.id)
    assert lines["c0"].message.content[0].text == expected_text(body("a"))
    assert lines["c1"].message.content[0].text == expected_text(body("b"))
    assert lines["c0"].message.usage.service_tier == "batch"
    assert lines["c3"].error.error.type == "api_error"
    assert len(lines) == 4


@pytest.mark.parametrize(
    "raw",
    [
        b'{"requests":[',
        b'{"requests":[]}',
        b'{"requests":[{"custom_id":"a"}]}',
        b'{"requests":[{"custom_id":"a","params":{}},{"custom_id":"a","params":{}}]}',
        b'{"requests":[{"custom_id":"a.b","params":{}}]}',
        b'{"requests":[{"custom_id":"","params":{}}]}',
        b'{"requests":[{"custom_id":"%s","params":{}}]}' % (b"x" * 65),
        b'{"requests":[{"custom_id":"a\\n","params":{}}]}',
        b'{"requests":[{"custom_id":"1","params":{}},{"custom_id":"2","params":{}},{"custom_id":"3","params":{}},'
        b'{"custom_id":"4","params":{}}]}',
    ],
)
async def test_a_bad_envelope_fails_the_create(turned, raw):
    world = turned(MockConfig(max_batch_requests=3))
    answer = await world.call("POST", BATCHES, raw)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert world.provider.batches == []


async def test_too_many_bytes_are_refused_before_they_are_parsed(turned):
    world = turned(MockConfig(max_batch_bytes=100))
    answer = await world.call("POST", BATCHES, b"not even json" * 10)
    assert (answer.status, answer.json()["error"]["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"stream": True}, "invalid_request_error"),
        ({"speed": "fast"}, "invalid_request_error"),
        ({"store": True}, "invalid_request_error"),
        ({"previous_thread_event_id": "x"}, "invalid_request_error"),
        ({"cache_hint": {}}, "invalid_request_error"),
        ({"context_hint": {}}, "invalid_request_error"),
        ({"max_tokens": 0}, "invalid_request_error"),
        ({"max_tokens": None}, "invalid_request_error"),
        ({"messages": "hi"}, "invalid_request_error"),
        ({"model": 5}, "invalid_request_error"),
        ({"model": "claude-none"}, "not_found_error"),
        ({"model": "claude-mythos-preview"}, "invalid_request_error"),
    ],
)
async def test_bad_params_show_only_after_the_end_and_hurt_no_neighbour(turned, body, change, kind):
    world = turned(MockConfig(batch_latency=Constant(100)))
    bad, good = {"custom_id": "bad", "params": {**body(), **change}}, {"custom_id": "good", "params": body()}
    batch_id = await world.create([bad, good])
    world.time += 99
    assert (await world.look(batch_id))["request_counts"]["errored"] == 0
    world.time += 1
    lines = await world.results(batch_id)
    assert lines["bad"]["error"]["error"]["type"] == kind
    assert lines["good"]["type"] == "succeeded"
    assert set(world.provider.bill.by_custom_id) == {"good"}


async def test_params_that_are_no_object_are_an_errored_line(turned):
    world = turned()
    batch_id = await world.create([{"custom_id": "a", "params": [1]}])
    world.time += 1
    assert (await world.results(batch_id))["a"]["type"] == "errored"


async def test_counters_flip_only_when_the_slowest_has_ended(turned, requests_of):
    world = turned(MockConfig(batch_latency=Uniform(10, 1000), per_request=True))
    batch_id = await world.create(requests_of(*"abcdefgh"))
    ends = sorted(world.provider.batch(batch_id).ends)
    world.time = (ends[-2] + ends[-1]) / 2
    before = await world.look(batch_id)
    assert before["processing_status"] == "in_progress"
    assert before["request_counts"] == {"processing": 8, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert len(world.provider.bill.charges) == 7
    world.time = ends[-1]
    assert (await world.look(batch_id))["request_counts"]["succeeded"] == 8


async def test_results_come_in_another_order_but_all_of_them(turned, requests_of):
    world = turned()
    batch_id = await world.create(requests_of(*(str(i) for i in range(50))))
    world.time += 1
    ids = list(await world.results(batch_id))
    assert sorted(ids) == sorted(f"c{i}" for i in range(50))
    assert ids != [f"c{i}" for i in range(50)]
    assert ids == list(await world.results(batch_id))


async def test_cancel_takes_time_and_lets_the_executing_ones_finish(turned, requests_of):
    config = MockConfig(
        batch_latency=Uniform(0, 100), per_request=True, batch_execution=Constant(10), cancel_latency=Constant(5)
    )
    world = turned(config)
    batch_id = await world.create(requests_of(*(str(i) for i in range(40))))
    batch = world.provider.batch(batch_id)
    world.time += 50
    started = {batch.custom_ids[i] for i in range(40) if batch.starts[i] <= world.time}
    canceled = await world.call("POST", f"{BATCHES}/{batch_id}/cancel")
    assert canceled.json()["processing_status"] == "canceling"
    assert (await world.look(batch_id))["processing_status"] == "canceling"
    world.time += 11
    ended = await world.look(batch_id)
    assert ended["processing_status"] == "ended"
    assert ended["cancel_initiated_at"] is not None
    lines = await world.results(batch_id)
    assert {name for name, result in lines.items() if result["type"] == "succeeded"} == started
    assert {result["type"] for name, result in lines.items() if name not in started} == {"canceled"}
    assert set(world.provider.bill.by_custom_id) == started
    assert 0 < len(started) < 40


async def test_an_ended_batch_cannot_be_cancelled_and_an_open_one_not_deleted(turned, requests_of):
    world = turned(MockConfig(batch_latency=Constant(10)))
    batch_id = await world.create(requests_of("a"))
    assert (await world.call("DELETE", f"{BATCHES}/{batch_id}")).status == 400
    assert (await world.call("GET", f"{BATCHES}/{batch_id}/results")).status == 404
    world.time += 10
    assert (await world.call("POST", f"{BATCHES}/{batch_id}/cancel")).status == 400
    assert world.provider.canceled == []


async def test_after_a_day_the_unfinished_expire_unbilled(turned, requests_of):
    world = turned(MockConfig(batch_latency=Uniform(0, 2 * DAY), per_request=True))
    batch_id = await world.create(requests_of(*(str(i) for i in range(40))))
    world.time += DAY - 1
    assert (await world.look(batch_id))["processing_status"] == "in_progress"
    world.time += 1
    counts = (await world.look(batch_id))["request_counts"]
    assert counts["processing"] == 0
    assert counts["succeeded"] + counts["expired"] == 40
    assert counts["succeeded"] == len(world.provider.bill.charges) > 0
    assert counts["expired"] > 0


async def test_results_are_archived_after_29_days(turned, requests_of):
    world = turned()
    batch_id = await world.create(requests_of("a"))
    world.time += 29 * DAY - 1
    assert (await world.look(batch_id))["results_url"] == f"http://mock.test{BATCHES}/{batch_id}/results"
    world.time += 1
    archived = await world.look(batch_id)
    assert archived["results_url"] is None
    assert archived["archived_at"] is not None
    assert (await world.call("GET", f"{BATCHES}/{batch_id}/results")).status == 404


async def test_listing_pages_newest_first_in_both_directions(turned, requests_of):
    world = turned()
    made = [await world.create(requests_of("a")) for _ in range(5)][::-1]

    async def page(query):
        answer = (await world.call("GET", f"{BATCHES}?{query}")).json()
        assert (answer["first_id"], answer["last_id"]) == (answer["data"][0]["id"], answer["data"][-1]["id"])
        return [made.index(batch["id"]) for batch in answer["data"]], answer["has_more"]

    assert await page("limit=2") == ([0, 1], True)
    assert await page(f"limit=2&after_id={made[1]}") == ([2, 3], True)
    assert await page(f"limit=2&after_id={made[3]}") == ([4], False)
    assert await page(f"limit=2&before_id={made[4]}") == ([2, 3], True)
    assert await page(f"limit=9&before_id={made[2]}") == ([0, 1], False)
    assert (await world.call("GET", f"{BATCHES}?limit=1001")).status == 400
    assert (await world.call("GET", f"{BATCHES}?limit=0")).status == 400


async def test_batches_are_seen_in_their_workspace_only(turned, requests_of):
    world = turned(MockConfig(workspaces={"k": "shared", "k2": "shared"}))
    batch_id = await world.create(requests_of("a"))
    assert (await world.look(batch_id, key="k2"))["id"] == batch_id
    assert (await world.call("GET", f"{BATCHES}/{batch_id}", key="k3")).status == 404
    assert (await world.call("GET", BATCHES, key="k3")).json()["data"] == []


async def test_a_key_without_batch_permission(turned, requests_of):
    world = turned(MockConfig(keys_without_batch=frozenset({"k"})))
    answer = await world.call("POST", BATCHES, {"requests": requests_of("a")})
    assert (answer.status, answer.json()["error"]["type"]) == (403, "permission_error")


async def test_one_rate_limit_covers_all_batch_endpoints(turned, requests_of):
    world = turned(MockConfig(batch_rpm=3, workspaces={"k": "w", "k2": "w"}))
    batch_id = await world.create(requests_of("a"))
    await world.look(batch_id)
    await world.call("GET", BATCHES, key="k2")
    refused = await world.call("GET", f"{BATCHES}/{batch_id}")
    assert (refused.status, refused.headers["retry-after"]) == (429, "20")
    world.time += 20
    assert (await world.call("GET", f"{BATCHES}/{batch_id}")).status == 200


async def test_queue_limit_counts_what_waits(turned, requests_of):
    world = turned(MockConfig(queue_limit=3, batch_latency=Constant(10)))
    await world.create(requests_of("a", "b"))
    full = await world.call("POST", BATCHES, {"requests": requests_of("a", "b")})
    assert (full.status, full.json()["error"]["type"]) == (429, "rate_limit_error")
    world.time += 10
    await world.create(requests_of("a", "b", "c"))


async def test_tests_can_hold_release_and_end_a_batch(turned, requests_of):
    world = turned(MockConfig(batch_latency=Constant(100)))
    held, hurried = await world.create(requests_of("a")), await world.create(requests_of("b"))
    world.time += 40
    world.provider.hold_batch(held)
    world.provider.end_batch(hurried)
    assert (await world.results(hurried))["c0"]["type"] == "succeeded"
    world.time += 1000
    assert (await world.look(held))["processing_status"] == "in_progress"
    world.provider.release_batch(held)
    world.time += 59
    assert (await world.look(held))["processing_status"] == "in_progress"
    world.time += 1
    assert (await world.look(held))["processing_status"] == "ended"
    assert len(world.provider.bill.charges) == 2


async def test_ending_a_batch_now_moves_the_charges_of_what_was_executing(turned, requests_of):
    world = turned(MockConfig(batch_latency=Constant(100), batch_execution=Constant(100)))
    batch_id = await world.create(requests_of("a", "b"))
    world.time += 1
    assert world.provider.bill.charges == []
    world.provider.end_batch(batch_id)
    assert [charge.at for charge in world.provider.bill.charges] == [world.time] * 2
    assert (await world.look(batch_id))["processing_status"] == "ended"
