"""What fails a batch as a whole, when its file is read."""

import json

import pytest

from carpool.mock import MockConfig, OpenAIConfig


def edited(line, **changes):
    body = {**line["body"], **changes.pop("body", {})}
    return {name: value for name, value in {**line, "body": body, **changes}.items() if value is not ...}


FLAWS = {
    "invalid_json_line": lambda line: b'{"custom_id": "b", ',
    "duplicate_custom_id": lambda line: edited(line, custom_id="a"),
    "mismatched_model": lambda line: edited(line, body={"model": "gpt-5-mini"}),
    "invalid_url": lambda line: edited(line, url="/v1/responses"),
    "invalid_method": lambda line: edited(line, method="GET"),
    "missing_required_parameter": lambda line: edited(line, custom_id=...),
    "streaming_unsupported": lambda line: edited(line, body={"stream": True}),
    "invalid_request": lambda line: edited(line, body={"background": True}),
}


@pytest.mark.parametrize("code", FLAWS)
async def test_one_bad_line_fails_all(openai_turned, lines_of, as_jsonl, code):
    world = openai_turned()
    flawed = FLAWS[code](lines_of("b"))
    middle = flawed + b"\n" if isinstance(flawed, bytes) else as_jsonl([flawed])
    batch_id = await world.start(as_jsonl([lines_of("a")]) + middle + as_jsonl([lines_of("c")]))
    world.time += 1
    seen = await world.look(batch_id)
    (error,) = seen["errors"]["data"]
    assert (seen["status"], error["code"], error["line"]) == ("failed", code, 2)
    assert (seen["output_file_id"], seen["error_file_id"], seen["usage"]) == (None, None, None)
    assert seen["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    assert seen["failed_at"] is not None
    assert seen["in_progress_at"] is None
    assert world.provider.bill.charges == []


@pytest.mark.parametrize("model", ["gpt-9-nowhere", "gpt-5.3-codex"])
async def test_models_that_are_not_there_or_not_in_batches(openai_turned, lines_of, model):
    world = openai_turned()
    batch_id = await world.start([lines_of("a", model=model)])
    world.time += 1
    (error,) = (await world.look(batch_id))["errors"]["data"]
    assert (error["code"], error["line"]) == ("model_not_found", 1)
    assert model in error["message"]


@pytest.mark.parametrize(
    ("limits", "count", "code"),
    [
        ({"max_batch_requests": 3}, 3, None),
        ({"max_batch_requests": 3}, 4, "too_many_tasks"),
        ({"max_file_bytes": 200}, 3, "file_too_large"),
        ({}, 0, "empty_file"),
    ],
)
async def test_size(openai_turned, lines_of, limits, count, code):
    world = openai_turned(MockConfig(openai=OpenAIConfig(**limits)))
    batch_id = await world.start([lines_of(f"c{n}") for n in range(count)])
    world.time += 1
    seen = await world.look(batch_id)
    assert seen["status"] == ("completed" if code is None else "failed")
    assert code is None or seen["errors"]["data"][0]["code"] == code


async def test_embedding_inputs_are_counted_over_all_lines(openai_turned):
    world = openai_turned(MockConfig(openai=OpenAIConfig(max_embedding_inputs=5)))
    body = {"model": "text-embedding-3-small", "input": ["x", "y", "z"]}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/embeddings", "body": body} for name in "ab"]
    for some, status in ((lines[:1], "completed"), (lines, "failed")):
        batch_id = await world.start(some, endpoint="/v1/embeddings")
        world.time += 1
        assert (await world.look(batch_id))["status"] == status


async def test_the_providers_limits_are_the_documented_ones():
    limits = OpenAIConfig()
    assert (limits.max_batch_requests, limits.max_file_bytes) == (50_000, 200_000_000)


async def test_files_that_are_refused_at_once(openai_turned, as_jsonl, lines_of):
    world = openai_turned(MockConfig(openai=OpenAIConfig(max_upload_bytes=1000)))
    text = 'form-data; name="file"; filename="in.txt"'
    for answer, said in (
        (await world.upload(b"x" * 1001), "File is too large."),
        (await world.upload(b"x" * 100_000), "File is too large."),
        (await world.upload(b"x", head=text), "Must be .jsonl"),
        (await world.upload(b"x", purpose="other"), "is not one of"),
        (await world.call("POST", "/v1/files", {"purpose": "batch"}), "form can't be read"),
    ):
        assert (answer.status, said in answer.json()["error"]["message"]) == (400, True), answer.body
    assert (await world.upload(b"x" * 1000)).status == 200


async def test_bad_parameters_fail_their_line_only(openai_turned, lines_of):
    world = openai_turned()
    lines = [lines_of("good"), lines_of("bad", tools=[{"type": "function"}]), lines_of("down", "[error:api_error]")]
    batch_id = await world.start(lines)
    world.time += 1
    good, bad = await world.told(batch_id)
    assert set(good) == {"good"}
    assert {name: line["response"]["status_code"] for name, line in bad.items()} == {"bad": 400, "down": 500}
    assert "error" in bad["bad"]["response"]["body"]
    assert (await world.look(batch_id))["request_counts"] == {"total": 3, "completed": 1, "failed": 2}


async def test_ids_of_any_kind_come_back(openai_turned, lines_of):
    world = openai_turned()
    ids = ["x" * 300, "ünïcode \u2028", '"quoted"\\', ""]
    batch_id = await world.start([lines_of(name) for name in ids])
    world.time += 1
    assert set((await world.told(batch_id))[0]) == set(ids)


async def test_fifty_thousand_lines(openai_turned):
    world = openai_turned()
    body = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 50}
    line = json.dumps({"custom_id": "c%d", "method": "POST", "url": "/v1/chat/completions", "body": body})
    batch_id = await world.start(b"".join(line.replace("%d", str(n)).encode() + b"\n" for n in range(50_000)))
    world.time += 1
    seen = await world.look(batch_id)
    assert seen["request_counts"] == {"total": 50_000, "completed": 50_000, "failed": 0}
    answer = await world.call("GET", f"/v1/files/{seen['output_file_id']}/content")
    assert answer.body.count(b"\n") == 50_000
    assert len(world.provider.bill.charges) == 50_000
    fifty_thousand_first = await world.start((line.replace("%d", "x") + "\n").encode() * 50_001)
    world.time += 1
    (error,) = (await world.look(fifty_thousand_first))["errors"]["data"]
    assert (error["code"], error["line"]) == ("duplicate_custom_id", 2)
