"""OpenAI's files and batches, judged by OpenAI's own SDK and by a clock that is turned by hand."""

import asyncio
import json
import random

import openai
import pytest

from carpool.mock import (
    Constant,
    Faults,
    MockConfig,
    OpenAIConfig,
    Uniform,
    expected_openai_text,
    openai_fingerprint,
    parse_latency,
)

SLOW = MockConfig(
    batch_latency=Constant(100),
    openai=OpenAIConfig(validation_latency=Constant(10), finalizing_latency=Constant(5)),
)


async def ended(client, batch_id):
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- the whole way, with the SDK


async def test_from_upload_to_answers(openai_connected, lines_of, as_jsonl):
    lines = [lines_of(f"c{n}", f"text {n}") for n in range(20)]
    lines.append(lines_of("bad", max_completion_tokens=0))
    async with openai_connected() as (server, client):
        file = await client.files.create(file=("in.jsonl", as_jsonl(lines)), purpose="batch")
        assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
        assert file.bytes == len(as_jsonl(lines))
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"carpool_nonce": "n1"},
        )
        assert (batch.status, batch.metadata) == ("validating", {"carpool_nonce": "n1"})
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.to_dict() == {"total": 21, "completed": 20, "failed": 1}
        assert batch.model == "gpt-6-luna"
        output = [json.loads(line) for line in (await client.files.content(batch.output_file_id)).text.splitlines()]
        errors = [json.loads(line) for line in (await client.files.content(batch.error_file_id)).text.splitlines()]
        assert [line["custom_id"] for line in output] != sorted(line["custom_id"] for line in output)
        bodies = {line["custom_id"]: line["body"] for line in lines}
        for line in output:
            assert (line["error"], line["response"]["status_code"]) == (None, 200)
            said = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"], strict=True)
            assert said.choices[0].message.content == expected_openai_text(bodies[line["custom_id"]])
        (bad,) = errors
        assert (bad["custom_id"], bad["error"], bad["response"]["status_code"]) == ("bad", None, 400)
        assert bad["response"]["body"]["error"]["code"] == "integer_below_min_value"
        # Failed lines cost nothing, and the rest half.
        charges = server.provider.bill.of_batches([batch.id])
        assert {charge.custom_id for charge in charges} == {f"c{n}" for n in range(20)}
        assert batch.usage.total_tokens == sum(one.usage.total_input + one.usage.output for one in charges)
        whole = await client.chat.completions.create(**bodies["c0"])
        full = server.provider.bill.charges[-1]
        assert (full.fingerprint, full.message_id) == (openai_fingerprint(bodies["c0"]), whole.id)
        (half,) = (one for one in charges if one.custom_id == "c0")
        assert abs(full.nano_usd - 2 * half.nano_usd) <= 1


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        ("/v1/responses", {"model": "gpt-6-luna", "input": "hi", "instructions": "Be brief."}, "responses.Response"),
        ("/v1/embeddings", {"model": "text-embedding-3-small", "input": ["a", "b"]}, "CreateEmbeddingResponse"),
        ("/v1/completions", {"model": "gpt-3.5-turbo-instruct", "prompt": "hi"}, "Completion"),
        ("/v1/moderations", {"model": "omni-moderation-latest", "input": "hi [flag]"}, "ModerationCreateResponse"),
    ],
)
async def test_every_endpoint_answers_in_a_batch_as_it_does_at_once(openai_connected, as_jsonl, endpoint, body, read):
    kind = openai.types
    for name in read.split("."):
        kind = getattr(kind, name)
    line = {"custom_id": "c", "method": "POST", "url": endpoint, "body": body}
    async with openai_connected() as (server, client):
        file = await client.files.create(file=("in.jsonl", as_jsonl([line])), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
        batch = await ended(client, batch.id)
        told = json.loads((await client.files.content(batch.output_file_id)).text)["response"]["body"]
        kind.model_validate(told, strict=True)
        at_once = json.loads(await client.post(endpoint.removeprefix("/v1"), body=body, cast_to=str))
        differing = {"id", "created", "created_at", "completed_at"}
        assert {k: v for k, v in told.items() if k not in differing} == {
            k: v for k, v in at_once.items() if k not in differing
        }
        batched, full = server.provider.bill.charges
        assert batched.usage == full.usage
        assert abs(full.nano_usd - 2 * batched.nano_usd) <= 1


async def test_a_list_is_newest_first_and_paged(openai_connected, lines_of, as_jsonl):
    async with openai_connected() as (_, client):
        file = await client.files.create(file=("in.jsonl", as_jsonl([lines_of("a")])), purpose="batch")
        made = [
            (
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            )
            for _ in range(5)
        ]
        newest_first = [batch.id for batch in reversed(made)]
        first = await client.batches.list(limit=2)
        assert [batch.id for batch in first.data] == newest_first[:2]
        assert first.has_more
        assert [batch.id async for batch in client.batches.list(limit=2)] == newest_first
        assert not (await client.batches.list(limit=5)).has_more
        for wrong in (0, 101):
            with pytest.raises(openai.BadRequestError):
                await client.batches.list(limit=wrong)
        assert client.api_key == "k"
        assert (await client.with_options(api_key="other").batches.list()).data == []


async def test_files_are_listed_fetched_and_deleted(openai_connected, lines_of, as_jsonl):
    data = as_jsonl([lines_of("a")])
    async with openai_connected() as (_, client):
        named = await client.files.create(file=("carpool-n1.jsonl", data), purpose="batch")
        other = await client.files.create(file=("x.txt", b"x"), purpose="user_data")
        assert [file.id async for file in client.files.list()] == [other.id, named.id]
        assert [file.filename async for file in client.files.list(purpose="batch")] == ["carpool-n1.jsonl"]
        assert (await client.files.retrieve(named.id)).bytes == len(data)
        assert (await client.files.content(named.id)).content == data
        batch = await client.batches.create(
            input_file_id=named.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = await ended(client, batch.id)
        assert [file.id async for file in client.files.list(purpose="batch_output")] == [batch.output_file_id]
        for file_id in (named.id, batch.output_file_id):
            assert (await client.files.delete(file_id)).deleted
            for gone in (client.files.retrieve, client.files.content, client.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await gone(file_id)
        assert (await client.batches.retrieve(batch.id)).usage == batch.usage


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"input_file_id": "file-nowhere"}, "Cannot find file file-nowhere, or project"),
        ({"endpoint": "/v1/other"}, "Supported values are"),
        ({"completion_window": "1h"}, "must be '24h'"),
        ({"metadata": {"k": "v" * 513}}, "string too long"),
        ({"metadata": {str(n): "" for n in range(17)}}, "too many properties"),
        ({"metadata": {"k": 1}}, "expected a string"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "between 3600"),
    ],
)
async def test_creates_that_are_refused_at_once(openai_turned, lines_of, as_jsonl, changed, said):
    world = openai_turned()
    file_id = (await world.upload(as_jsonl([lines_of("a")]))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h", **changed}
    refused = await world.call("POST", "/v1/batches", body)
    assert refused.status == 400
    assert said in refused.json()["error"]["message"]
    assert world.provider.batches == []


async def test_another_project_sees_nothing(openai_turned, lines_of, as_jsonl):
    world = openai_turned()
    batch_id = await world.start([lines_of("a")])
    file_id = (await world.look(batch_id))["input_file_id"]
    assert (await world.call("GET", f"/v1/batches/{batch_id}", key="other")).status == 404
    assert (await world.call("GET", f"/v1/files/{file_id}", key="other")).status == 404
    assert (await world.submit(file_id, key="other")).status == 400
    assert (await world.call("GET", "/v1/batches")).json()["data"][0]["id"] == batch_id
    assert (await world.call("GET", "/v1/files", key="other")).json()["data"] == []


# ---------------------------------------------------------------- states


async def test_every_state_at_its_time(openai_turned, lines_of):
    world = openai_turned(SLOW)
    begun = world.time
    batch_id = await world.start([lines_of("a"), lines_of("b")])
    for seconds, status, total, completed in (
        (9, "validating", 0, 0),
        (10, "in_progress", 2, 0),
        (99, "in_progress", 2, 0),
        (100, "finalizing", 2, 2),
        (104, "finalizing", 2, 2),
        (105, "completed", 2, 2),
    ):
        world.time = begun + seconds
        seen = await world.look(batch_id)
        assert (seen["status"], seen["request_counts"]["total"]) == (status, total), seconds
        assert seen["request_counts"]["completed"] == completed
        assert (seen["output_file_id"] is None) == (status != "completed")
        assert seen["error_file_id"] is None
    stamps = {name: value - int(begun) for name, value in seen.items() if name.endswith("_at") and value is not None}
    assert stamps == {
        "created_at": 0,
        "in_progress_at": 10,
        "finalizing_at": 100,
        "completed_at": 105,
        "expires_at": 86_400,
    }


async def test_an_expired_batch_keeps_what_was_done(openai_turned, lines_of):
    world = openai_turned(MockConfig(batch_latency=Uniform(0, 2 * 86_400), per_request=True))
    batch_id = await world.start([lines_of(f"c{n}") for n in range(40)])
    world.time += 86_399
    assert (await world.look(batch_id))["status"] == "in_progress"
    world.time += 1
    seen = await world.look(batch_id)
    assert (seen["status"], seen["expired_at"]) == ("expired", int(world.time))
    good, bad = await world.told(batch_id)
    assert good
    assert bad
    assert len(good) + len(bad) == 40
    assert not set(good) & set(bad)
    assert {line["error"]["code"] for line in bad.values()} == {"batch_expired"}
    assert {line["response"] for line in bad.values()} == {None}
    assert {one.custom_id for one in world.provider.bill.charges} == set(good)


async def test_a_cancelled_batch_keeps_what_was_done(openai_turned, lines_of):
    world = openai_turned(MockConfig(batch_latency=Uniform(0, 100), per_request=True, cancel_latency=Constant(30)))
    batch_id = await world.start([lines_of(f"c{n}") for n in range(40)])
    world.time += 50
    cancelled = await world.call("POST", f"/v1/batches/{batch_id}/cancel")
    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelling")
    world.time += 29
    assert (await world.look(batch_id))["status"] == "cancelling"
    world.time += 1
    seen = await world.look(batch_id)
    assert (seen["status"], seen["cancelled_at"] - seen["cancelling_at"]) == ("cancelled", 30)
    good, bad = await world.told(batch_id)
    assert good
    assert {line["error"]["code"] for line in bad.values()} == {"batch_cancelled"}
    assert len(good) + len(bad) == 40
    assert {one.custom_id for one in world.provider.bill.charges} == set(good)
    again = await world.call("POST", f"/v1/batches/{batch_id}/cancel")
    assert (again.status, world.provider.canceled) == (409, [batch_id])


async def test_cancelled_while_it_is_read(openai_turned, lines_of):
    world = openai_turned(SLOW)
    batch_id = await world.start([lines_of("a")])
    await world.call("POST", f"/v1/batches/{batch_id}/cancel")
    world.time += 50
    assert (await world.look(batch_id))["status"] == "cancelled"
    good, bad = await world.told(batch_id)
    assert (set(good), set(bad)) == (set(), {"a"})
    assert world.provider.bill.charges == []


async def test_a_hand_on_the_controls(openai_turned, lines_of):
    world = openai_turned(SLOW)
    held, hurried = await world.start([lines_of("a")]), await world.start([lines_of("b")])
    world.provider.hold_batch(held)
    world.provider.end_batch(hurried)
    assert (await world.look(hurried))["status"] == "completed"
    world.time += 1000
    assert (await world.look(held))["status"] == "in_progress"
    world.provider.release_batch(held)
    world.time += 105
    assert (await world.look(held))["status"] == "completed"
    assert [batch.id for batch in world.provider.batches] == [held, hurried]
    assert world.provider.batch(held).size == 1


async def test_files_go_away_with_time(openai_turned, lines_of, as_jsonl):
    world = openai_turned(MockConfig(batch_latency=Constant(0)))
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file_id = (await world.upload(as_jsonl([lines_of("a")]), **fields)).json()["id"]
    kept = {"anchor": "created_at", "seconds": 7200}
    batch_id = (await world.submit(file_id, output_expires_after=kept)).json()["id"]
    output = (await world.look(batch_id))["output_file_id"]
    world.time += 3600
    assert (await world.submit(file_id)).status == 400
    assert (await world.call("GET", f"/v1/files/{output}/content")).status == 200
    world.time += 3600
    assert (await world.call("GET", f"/v1/files/{output}/content")).status == 404
    fields["expires_after[seconds]"] = "3599"
    assert (await world.upload(b"{}", **fields)).status == 400


# ---------------------------------------------------------------- limits


async def test_enqueued_tokens_are_limited_by_model_and_released_at_the_end(openai_turned, lines_of):
    probe = openai_turned()
    await probe.start([lines_of("a")])
    tokens = probe.provider.batches[0].tokens
    limit = 2 * tokens + tokens // 2
    world = openai_turned(
        MockConfig(
            batch_latency=Constant(100),
            openai=OpenAIConfig(validation_latency=Constant(1), enqueued_tokens={"gpt-6-luna": limit}),
        )
    )
    fitting = [await world.start([lines_of("a")]) for _ in range(2)]
    full = await world.start([lines_of("a")])
    other = await world.start([lines_of("a", model="gpt-5-mini")])
    world.time += 1
    seen = await world.look(full)
    assert (seen["status"], seen["failed_at"], seen["output_file_id"]) == ("failed", int(world.time), None)
    (error,) = seen["errors"]["data"]
    assert (error["code"], error["line"], error["param"]) == ("token_limit_exceeded", None, None)
    assert error["message"].startswith("Enqueued token limit reached for gpt-6-luna in organization org_mock. Limit:")
    for batch_id in (*fitting, other):
        assert (await world.look(batch_id))["status"] == "in_progress"
    world.time += 98
    late = await world.start([lines_of("a")])  # read in the moment in which the first two end
    world.time += 1
    assert (await world.look(late))["status"] == "in_progress"
    assert full not in {charge.batch_id for charge in world.provider.bill.charges}


async def test_when_somebody_looks_does_not_change_who_found_room(openai_turned, lines_of):
    async def fates(looks):
        world = openai_turned(
            MockConfig(
                seed=3,
                batch_latency=parse_latency("lognormal:median=50,sigma=1"),
                openai=OpenAIConfig(validation_latency=Uniform(0, 40), enqueued_tokens={"*": 60}),
            )
        )
        made = []
        for _ in range(30):
            made.append(await world.start([lines_of("a", "some text " * 3)]))
            for _ in range(looks):
                world.time += 10 / looks
                await world.look(made[-1])
            world.time += 0 if looks else 10
        world.time += 5000
        return [(await world.look(batch_id))["status"] for batch_id in made]

    seldom = await fates(0)
    assert {"failed", "completed"} == set(seldom)
    assert await fates(1) == seldom
    assert await fates(4) == seldom


async def test_two_thousand_creates_an_hour(openai_turned, lines_of, as_jsonl):
    world = openai_turned(MockConfig(openai=OpenAIConfig(creates_per_hour=3)))
    file_id = (await world.upload(as_jsonl([lines_of("a")]))).json()["id"]
    answers = [await world.submit(file_id) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    wait = int(answers[-1].headers["retry-after"])
    assert 1000 < wait <= 1200
    world.time += wait
    assert (await world.submit(file_id)).status == 200
    assert OpenAIConfig().creates_per_hour == 2000


async def test_a_key_without_batches(openai_turned, as_jsonl, lines_of):
    world = openai_turned(MockConfig(keys_without_batch=frozenset({"k"})))
    assert (await world.upload(as_jsonl([lines_of("a")]))).status == 403
    assert (await world.call("GET", "/v1/batches")).status == 403


async def test_caches_of_batches_are_their_own(openai_turned, lines_of):
    world = openai_turned()
    long = "word " * 4000
    batch_id = await world.start([lines_of("a", long), lines_of("b", long)])
    world.time += 1
    good, _ = await world.told(batch_id)
    reads = [line["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"] for line in good.values()]
    assert sorted(bool(read) for read in reads) == [False, True]
    whole = (await world.call("POST", "/v1/chat/completions", lines_of("a", long)["body"])).json()
    assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_one_seed_one_world(openai_turned, lines_of):
    async def world_of(seed, looks):
        world = openai_turned(
            MockConfig(
                seed=seed,
                batch_latency=parse_latency("lognormal:median=100,sigma=1"),
                per_request=True,
                faults=Faults(line_missing=0.2, line_api_error=0.2),
                openai=OpenAIConfig(validation_latency=Uniform(1, 20), finalizing_latency=Uniform(1, 20)),
            )
        )
        made = []
        for _ in range(3):
            made.append(await world.start([lines_of(name) for name in "abcdef"]))
            for _ in range(looks):
                await world.look(made[-1])
        world.time += 86_400
        return [(name, await world.look(name), await world.told(name)) for name in made], world.provider.bill.total()

    once = await world_of(7, looks=0)
    assert once == await world_of(7, looks=5), "looking more often must not change what happens"
    assert once != await world_of(8, looks=0)


async def test_what_nobody_can_ask_for_is_not_kept(openai_turned, lines_of):
    world = openai_turned()
    batch_id = await world.start([lines_of("a"), lines_of("b", max_completion_tokens=0)])
    world.time += 1
    seen = await world.look(batch_id)
    assert len(world.provider.batch(batch_id).requests) == 2
    for name in ("output_file_id", "error_file_id"):
        assert (await world.call("DELETE", f"/v1/files/{seen[name]}")).status == 200
    assert len(world.provider.batch(batch_id).requests) == 0
    assert await world.look(batch_id) == seen


async def test_whatever_happens_every_line_is_told_once_and_only_answers_are_charged(openai_turned, lines_of):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(30):
        config = MockConfig(
            seed=rng.getrandbits(32),
            batch_latency=parse_latency("mixture:0.8*lognormal(100,1)+0.2*lognormal(80000,1)"),
            batch_execution=Uniform(0, 50),
            per_request=rng.random() < 0.5,
            cancel_latency=Uniform(0, 600),
            faults=Faults(line_api_error=0.1, batch_stuck=0.2, stuck_s=rng.choice([1000.0, float("inf")])),
            openai=OpenAIConfig(
                validation_latency=Uniform(0, 60), finalizing_latency=Uniform(0, 60), enqueued_tokens={"*": 400}
            ),
        )
        world = openai_turned(config)
        made = []
        for _ in range(8):
            made.append(await world.start([lines_of(f"{len(made)}-{n}") for n in range(rng.randrange(1, 9))]))
            world.time += rng.choice([0, 1, 30, 300, 30_000])
            chosen = rng.choice(made)
            if rng.random() < 0.3:
                await world.call("POST", f"/v1/batches/{chosen}/cancel")
            if rng.random() < 0.2:
                world.provider.end_batch(chosen)
        world.time += 3 * 86_400
        charged = [charge.custom_id for charge in world.provider.bill.charges]
        answered = []
        for number, batch_id in enumerate(made):
            seen, (good, bad) = await world.look(batch_id), await world.told(batch_id)
            size = world.provider.batch(batch_id).size
            assert seen["status"] in ("completed", "failed", "expired", "cancelled")
            told = sorted([*good, *bad])
            assert told == ([] if seen["status"] == "failed" else sorted(f"{number}-{n}" for n in range(size)))
            answered += good
        assert sorted(charged) == sorted(answered)
