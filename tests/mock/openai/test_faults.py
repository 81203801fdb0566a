"""Every fault of OpenAI's batch side, as a client meets it."""

import json

import httpx2
import openai
import pytest

from carpool.mock import ConnectionCut, Constant, Faults, MockConfig

QUICK = MockConfig(faults=Faults(hang_s=30))


async def uploaded(client, as_jsonl, lines):
    return await client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")


async def created(client, file_id):
    return await client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"carpool_nonce": "n"}
    )


@pytest.mark.parametrize(
    ("fault", "failure", "stored"),
    [
        ("upload_cut", openai.APIConnectionError, False),
        ("upload_hang", openai.APITimeoutError, False),
        ("upload_500", openai.InternalServerError, False),
        ("upload_529", openai.InternalServerError, False),
        ("upload_429", openai.RateLimitError, False),
        ("upload_accepted_cut", openai.APIConnectionError, True),
        ("upload_accepted_hang", openai.APITimeoutError, True),
        ("upload_accepted_500", openai.InternalServerError, True),
    ],
)
async def test_failing_uploads(openai_connected, lines_of, as_jsonl, fault, failure, stored):
    async with openai_connected(QUICK, timeout=0.3) as (server, client):
        server.provider.script(fault)
        with pytest.raises(failure):
            await uploaded(client, as_jsonl, [lines_of("a")])
        assert len((await client.files.list(purpose="batch")).data) == stored
        assert server.provider.faults_struck == {fault: 1}
        assert (await uploaded(client, as_jsonl, [lines_of("a")])).status == "processed"


@pytest.mark.parametrize(
    ("fault", "failure", "accepted"),
    [
        ("create_cut", openai.APIConnectionError, False),
        ("create_hang", openai.APITimeoutError, False),
        ("create_500", openai.InternalServerError, False),
        ("create_529", openai.InternalServerError, False),
        ("create_429", openai.RateLimitError, False),
        ("create_429_bare", openai.RateLimitError, False),
        ("create_accepted_cut", openai.APIConnectionError, True),
        ("create_accepted_hang", openai.APITimeoutError, True),
        ("create_accepted_500", openai.InternalServerError, True),
        ("create_accepted_529", openai.InternalServerError, True),
    ],
)
async def test_failing_creates(openai_connected, lines_of, as_jsonl, fault, failure, accepted):
    async with openai_connected(QUICK, timeout=0.3) as (server, client):
        file = await uploaded(client, as_jsonl, [lines_of("a")])
        server.provider.script(fault)
        with pytest.raises(failure):
            await created(client, file.id)
        found = [batch.metadata async for batch in client.batches.list()]
        assert found == ([{"carpool_nonce": "n"}] if accepted else [])
        assert (await created(client, file.id)).status == "validating"


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("poll_cut", openai.APIConnectionError),
        ("poll_hang", openai.APITimeoutError),
        ("poll_500", openai.InternalServerError),
        ("poll_429", openai.RateLimitError),
        ("poll_garbage", openai.APIResponseValidationError),
    ],
)
async def test_failing_polls(openai_connected, lines_of, as_jsonl, fault, failure):
    async with openai_connected(QUICK, timeout=0.3) as (server, client):
        batch = await created(client, (await uploaded(client, as_jsonl, [lines_of("a")])).id)
        server.provider.script(fault, times=2)
        with pytest.raises(failure):
            await client.batches.retrieve(batch.id)
        with pytest.raises(failure):
            await client.batches.list()
        assert (await client.batches.retrieve(batch.id)).id == batch.id


@pytest.mark.parametrize(
    "fault", ["results_cut", "results_hang", "results_500", "results_429", "results_404", "results_cut_midway"]
)
async def test_failing_results_can_be_fetched_again(openai_connected, lines_of, as_jsonl, fault):
    config = MockConfig(batch_latency=Constant(0), faults=Faults(hang_s=30))
    async with openai_connected(config, timeout=0.3) as (server, client):
        file = await uploaded(client, as_jsonl, [lines_of(name) for name in "abcdefgh"])
        batch = await client.batches.retrieve((await created(client, file.id)).id)
        server.provider.script(fault)
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            await client.files.content(batch.output_file_id)
        assert len((await client.files.content(batch.output_file_id)).text.splitlines()) == 8


async def test_a_file_that_creates_do_not_find_yet(openai_turned, lines_of, as_jsonl):
    world = openai_turned(MockConfig(faults=Faults(file_lag=1, file_lag_s=7)))
    file_id = (await world.upload(as_jsonl([lines_of("a")]))).json()["id"]
    refused = await world.submit(file_id)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "file_id")
    assert refused.json()["error"]["message"].startswith(f"Cannot find file {file_id}, or project ")
    assert (await world.call("GET", f"/v1/files/{file_id}")).status == 200
    world.time += 7
    assert (await world.submit(file_id)).status == 200


async def test_late_listing_hides_a_batch_from_list_but_not_from_retrieve(openai_turned, lines_of):
    world = openai_turned(MockConfig(faults=Faults(list_lag=1, list_lag_s=7)))
    batch_id = await world.start([lines_of("a")], metadata={"carpool_nonce": "n"})
    assert (await world.look(batch_id))["id"] == batch_id
    assert (await world.call("GET", "/v1/batches")).json()["data"] == []
    world.time += 7
    (found,) = (await world.call("GET", "/v1/batches")).json()["data"]
    assert found["metadata"] == {"carpool_nonce": "n"}


async def test_strangers_put_batches_of_equal_size_alongside(openai_turned, lines_of):
    world = openai_turned(MockConfig(faults=Faults(stranger=1)))
    batch_id = await world.start([lines_of("a"), lines_of("b")], metadata={"carpool_nonce": "n"})
    own = world.provider.add_openai_stranger("k", size=5, metadata={"carpool_nonce": "theirs"})
    world.time += 1
    listed = {batch["id"]: batch for batch in (await world.call("GET", "/v1/batches")).json()["data"]}
    theirs = next(name for name in listed if name not in (batch_id, own.id))
    assert listed[theirs]["request_counts"] == listed[batch_id]["request_counts"]
    assert [listed[name]["metadata"] for name in (theirs, own.id, batch_id)] == [
        None,
        {"carpool_nonce": "theirs"},
        {"carpool_nonce": "n"},
    ]
    assert set((await world.told(theirs))[0]) == {"theirs-0", "theirs-1"}
    assert len(world.provider.bill.charges) == 2
    assert len(world.provider.strangers_bill.charges) == 7


async def test_too_many_tokens_on_demand(openai_turned, lines_of):
    world = openai_turned()
    world.provider.script("token_limit")
    first, second = await world.start([lines_of("a")]), await world.start([lines_of("a")])
    world.time += 1
    assert (await world.look(first))["errors"]["data"][0]["code"] == "token_limit_exceeded"
    assert (await world.look(second))["status"] == "completed"


async def test_a_forgotten_batch_is_denied_everywhere_and_billed_all_the_same(openai_turned, lines_of):
    world = openai_turned(MockConfig(faults=Faults(forgotten_s=60)))
    world.provider.script("batch_forgotten")
    forgotten, kept = await world.start([lines_of("a")]), await world.start([lines_of("b")])
    world.time += 20
    for method, path in (("GET", ""), ("POST", "/cancel")):
        assert (await world.call(method, f"/v1/batches/{forgotten}{path}")).status == 404
    assert [one["id"] for one in (await world.call("GET", "/v1/batches")).json()["data"]] == [kept]
    assert len(world.provider.bill.charges) == 2
    world.time += 45
    assert (await world.look(forgotten))["status"] == "completed"


async def test_stuck_until_it_expires(openai_turned, lines_of):
    world = openai_turned(MockConfig(faults=Faults(batch_stuck=1)))
    stuck = await world.start([lines_of("a")])
    world.time += 86_399
    assert (await world.look(stuck))["status"] == "in_progress"
    world.time += 1
    assert (await world.look(stuck))["status"] == "expired"
    assert set((await world.told(stuck))[1]) == {"a"}
    assert world.provider.bill.charges == []


async def test_missing_duplicate_unknown_and_malformed_lines(openai_turned, lines_of):
    world = openai_turned()
    for fault, expected in {
        "line_missing": ["b", "c"],
        "line_duplicate": ["a", "a", "b", "c"],
        "line_unknown": ["a", "b", "c", "unknown-0"],
        "line_malformed": ["b", "c"],
    }.items():
        world.provider.script(fault)
        batch_id = await world.start([lines_of(name) for name in "abc"])
        world.time += 1
        seen = await world.look(batch_id)
        lines = (await world.call("GET", f"/v1/files/{seen['output_file_id']}/content")).body.splitlines()
        whole = [json.loads(line)["custom_id"] for line in lines if line.endswith(b"}")]
        assert sorted(whole) == expected
        assert len(lines) == len(whole) + (fault == "line_malformed")
        # Whatever became of its line, the request was bought.
        assert len(world.provider.bill.of_batches([batch_id])) == 3
        assert seen["request_counts"]["completed"] == 3


async def test_a_batch_whose_only_line_is_missing_has_no_files(openai_turned, lines_of):
    world = openai_turned(MockConfig(faults=Faults(line_missing=1)))
    batch_id = await world.start([lines_of("a")])
    world.time += 1
    seen = await world.look(batch_id)
    assert (seen["status"], seen["output_file_id"], seen["error_file_id"]) == ("completed", None, None)


async def test_server_errors_and_expiry_in_single_lines_are_unbilled(openai_turned, lines_of):
    world = openai_turned()
    for fault, status in (("line_api_error", 500), ("line_overloaded", 503), ("line_expired", None)):
        world.provider.script(fault)
        batch_id = await world.start([lines_of("a"), lines_of("b")])
        world.time += 1
        good, bad = await world.told(batch_id)
        assert (set(good), set(bad)) == ({"b"}, {"a"})
        if status is None:
            assert (bad["a"]["response"], bad["a"]["error"]["code"]) == (None, "batch_expired")
        else:
            assert bad["a"]["response"]["status_code"] == status
        assert [charge.custom_id for charge in world.provider.bill.of_batches([batch_id])] == ["b"]


async def test_a_cancel_may_forget_what_was_bought(openai_turned, lines_of):
    world = openai_turned(MockConfig(batch_latency=Constant(10), batch_execution=Constant(8)))
    batch_id = await world.start([lines_of(name) for name in "abc"])
    world.time += 5
    world.provider.script("cancel_forgets")
    await world.call("POST", f"/v1/batches/{batch_id}/cancel")
    world.time += 10
    seen = await world.look(batch_id)
    assert (seen["status"], seen["request_counts"]) == ("cancelled", {"total": 3, "completed": 0, "failed": 0})
    good, bad = await world.told(batch_id)
    assert (set(good), set(bad)) == ({"b", "c"}, set())
    assert len(world.provider.bill.charges) == 3


async def test_cancels_fail_and_are_slow(openai_turned, lines_of):
    for fault, status, seen in (
        ("cancel_500", 500, "in_progress"),
        ("cancel_accepted_500", 500, "cancelled"),
        ("cancel_slow", 200, "cancelling"),
    ):
        world = openai_turned(MockConfig(batch_latency=Constant(10), faults=Faults(cancel_slow_s=500)))
        batch_id = await world.start([lines_of("a")])
        world.provider.script(fault)
        assert (await world.call("POST", f"/v1/batches/{batch_id}/cancel")).status == status
        assert (await world.look(batch_id))["status"] == seen


async def test_deleting_may_fail_and_can_be_done_again(openai_turned, lines_of, as_jsonl):
    world = openai_turned()
    file_id = (await world.upload(as_jsonl([lines_of("a")]))).json()["id"]
    world.provider.script("delete_500")
    assert [(await world.call("DELETE", f"/v1/files/{file_id}")).status for _ in range(3)] == [500, 200, 404]


async def test_in_process_a_cut_knows_what_was_accepted(openai_turned, lines_of, as_jsonl):
    world = openai_turned()
    for fault, accepted in (("upload_cut", False), ("upload_accepted_cut", True)):
        world.provider.script(fault)
        with pytest.raises(ConnectionCut) as caught:
            await world.upload(as_jsonl([lines_of("a")]))
        assert caught.value.after_acceptance is accepted


async def test_the_providers_clock_may_be_off(openai_turned, lines_of, as_jsonl):
    world = openai_turned(MockConfig(faults=Faults(clock_offset_s=90)))
    file = (await world.upload(as_jsonl([lines_of("a")]))).json()
    answer = await world.submit(file["id"])
    assert file["created_at"] == answer.json()["created_at"] == int(world.time) + 90
    assert answer.headers["date"] == "Fri, 15 Jan 2027 08:01:30 GMT"


# ---------------------------------------------------------------- flex


async def test_flex_costs_half_and_says_so(openai_connected):
    asked = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "hi"}]}
    async with openai_connected() as (server, client):
        whole = await client.chat.completions.create(**asked)
        half = await client.chat.completions.create(**asked, service_tier="flex")
        assert (whole.service_tier, half.service_tier) == ("default", "flex")
        full, flexed = server.provider.bill.charges
        assert flexed.usage.total_input == full.usage.total_input
        # $0.10 and $0.50 per million, halved: 50 and 250 nano-dollars a token
        assert flexed.nano_usd == flexed.usage.input * 50 + flexed.usage.output * 250
        parts = [
            one
            async for one in await client.responses.create(
                model="gpt-6-luna", input="hi", service_tier="flex", stream=True
            )
        ]
        assert parts[-1].response.service_tier == "flex"
        with pytest.raises(openai.BadRequestError, match="service_tier"):
            await client.chat.completions.create(**{**asked, "model": "gpt-4.1"}, service_tier="flex")


async def test_flex_without_room_is_refused_and_costs_nothing(openai_connected):
    asked = {"model": "gpt-6-luna", "input": "hi"}
    async with openai_connected() as (server, client):
        server.provider.script("flex_429")
        await client.responses.create(**asked)  # other tiers don't notice
        with pytest.raises(openai.RateLimitError, match="Resource unavailable"):
            await client.responses.create(**asked, service_tier="flex")
        await client.responses.create(**asked, service_tier="flex")
        assert [one.status for one in server.provider.arrivals] == [200, 429, 200]
        assert len(server.provider.bill.charges) == 2


async def test_a_share_of_flex_is_refused(openai_turned):
    world = openai_turned(MockConfig(seed=5, faults=Faults(flex_429=0.3)))
    asked = {"model": "gpt-6-luna", "input": "hi", "service_tier": "flex"}
    statuses = [(await world.call("POST", "/v1/responses", asked)).status for _ in range(200)]
    assert 30 <= statuses.count(429) <= 90
    assert len(world.provider.bill.charges) == statuses.count(200)
