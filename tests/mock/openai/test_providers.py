"""OpenAI-compatible providers: other paths, other headers, other habits."""

import json

import openai
import pytest

from carpool.mock import Faults, MockConfig, OpenAIConfig


async def test_under_a_name_and_with_azures_header(openai_connected, lines_of, as_jsonl):
    async with openai_connected() as (server, _):
        http = openai.DefaultAsyncHttpxClient(verify=False)
        url = f"{server.url}/openai/v1"
        async with openai.AsyncAzureOpenAI(base_url=url, api_key="a", api_version="preview", http_client=http) as azure:
            file = await azure.files.create(file=("in.jsonl", as_jsonl([lines_of("a")])), purpose="batch")
            batch = await azure.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            server.provider.end_batch(batch.id)
            assert (await azure.batches.retrieve(batch.id)).status == "completed"
        assert {charge.credential for charge in server.provider.bill.charges} == {"a"}


async def test_azures_habits(openai_turned, lines_of):
    world = openai_turned(MockConfig(openai=OpenAIConfig(vendor="azure")))
    created = await world.upload(b"")
    batch_id = (await world.submit(created.json()["id"])).json()["id"]
    world.time += 1
    assert (await world.look(batch_id))["status"] == "Failed"
    data = json.dumps(lines_of("a")).encode() + b"\n" + json.dumps(lines_of("b", url="/v1/other")).encode()
    mixed = (await world.submit((await world.upload(data)).json()["id"])).json()
    assert mixed["status"] == "Validating"
    world.time += 1
    assert (await world.look(mixed["id"]))["errors"]["data"][0]["code"] == "url_mismatch"
    good = (await world.submit((await world.upload(json.dumps(lines_of("a")).encode())).json()["id"])).json()
    world.time += 1
    seen = await world.look(good["id"])
    assert (seen["status"], seen["request_counts"]) == ("Completed", None)
    assert seen["created_at"].startswith("2027-01-15T08:00:02")
    assert await world.content(seen["error_file_id"]) == []
    assert len(await world.content(seen["output_file_id"])) == 1


@pytest.mark.parametrize(("window", "status"), [("24h", 200), ("7d", 200), ("1h", 400)])
async def test_longer_windows(openai_turned, lines_of, as_jsonl, window, status):
    world = openai_turned(MockConfig(openai=OpenAIConfig(windows=frozenset({"24h", "7d"}))))
    file_id = (await world.upload(as_jsonl([lines_of("a")]))).json()["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": window}
    answer = await world.call("POST", "/v1/batches", body)
    assert answer.status == status
    assert status != 200 or answer.json()["completion_window"] == window


async def test_both_wires_live_side_by_side(openai_turned, turned, lines_of, requests_of):
    world = openai_turned(MockConfig(faults=Faults(stranger=1)))
    theirs = await world.start([lines_of("a")])
    anthropic = turned()
    anthropic.provider, anthropic.time = world.provider, world.time
    ours = await anthropic.create(requests_of("a"))
    world.time += 1
    assert {batch.status for batch in world.provider.batches} == {"completed", "ended"}
    assert {charge.batch_id for charge in world.provider.bill.charges} == {theirs, ours}
    assert len(world.provider.strangers_bill.charges) == 2
