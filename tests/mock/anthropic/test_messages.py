"""Synchronous calls over real HTTP, with the real SDK as the judge of the shapes."""

import asyncio
import json

import anthropic
import httpx2
import pytest

from carpool.mock import Constant, Faults, MockConfig, expected_text, fingerprint, run, serve, serve_in_thread

OLD = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
TOOLS = [{"name": "lookup", "description": "Looks up.", "input_schema": {"type": "object"}}]


async def test_answers_with_the_requests_own_echo(connected, body):
    async with connected() as (server, client):
        one = await client.messages.create(**body("first"))
        two = await client.messages.create(**body("second"))
    assert one.content[0].text == expected_text(body("first")) == f"echo:{fingerprint(body('first'))} first"
    assert two.content[0].text != one.content[0].text
    assert one.stop_reason == "end_turn"
    assert one.usage.service_tier == "standard"
    assert 1 <= one.usage.output_tokens <= 100
    assert server.provider.requests_seen.count("messages", "k") == 2


def test_fingerprint_ignores_key_order_and_streaming(body):
    straight = body("x", temperature=1)
    turned_round = dict(reversed(list(straight.items()))) | {"stream": True}
    assert fingerprint(straight) == fingerprint(turned_round)
    assert fingerprint(straight) != fingerprint(body("x", temperature=0))


@pytest.mark.parametrize(
    "text", ["plain", "[tool] use it", "[think] hard", "[blocks] all", "[refuse] this", "[max]", ""]
)
async def test_stream_and_plain_answer_are_the_same_message(connected, body, text):
    asked = body(text, tools=TOOLS)
    async with connected() as (_, client):
        plain = (await client.messages.create(**asked)).model_dump(exclude={"id"})
        async with client.messages.stream(**asked) as stream:
            streamed = (await stream.get_final_message()).model_dump(exclude={"id", "parsed_output"})
    for block in streamed["content"]:
        block.pop("parsed_output", None)
    assert streamed == plain


async def test_directives_choose_the_blocks(connected, body):
    async with connected() as (_, client):
        tool = await client.messages.create(**body("[tool]", tools=TOOLS))
        thought = await client.messages.create(**body("[think]"))
        every = await client.messages.create(**body("[blocks]"))
        refused = await client.messages.create(**body("[refuse]"))
        longest = await client.messages.create(**body("[max]"))
    assert (tool.stop_reason, tool.content[-1].name) == ("tool_use", "lookup")
    assert thought.content[0].signature.endswith("==")
    assert thought.usage.output_tokens_details.thinking_tokens <= thought.usage.output_tokens
    assert len({block.type for block in every.content}) == 12
    assert every.usage.server_tool_use.web_search_requests == 1
    assert (refused.stop_reason, refused.stop_details.type) == ("refusal", "refusal")
    assert (longest.stop_reason, longest.usage.output_tokens) == ("max_tokens", 100)


async def test_stream_pings_while_it_waits(body):
    config = MockConfig(sync_latency=Constant(0.3), ping_s=0.01)
    async with serve(config) as server, httpx2.AsyncClient(headers=OLD, verify=False) as http:
        reply = await http.post(f"{server.url}/v1/messages?beta=true", json=body(stream=True))
    names = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("ping") > 3


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"model": "claude-none"}, 404, "not_found_error"),
        ({"model": None}, 400, "invalid_request_error"),
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"max_tokens": 64_001}, 400, "invalid_request_error"),
        ({"max_tokens": 0, "stream": True}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user"}]}, 400, "invalid_request_error"),
        ({"tools": ["hammer"]}, 400, "invalid_request_error"),
        ({"stream": "yes"}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "[error:overloaded_error]"}]}, 529, "overloaded_error"),
        ({"messages": [{"role": "user", "content": "[error:billing_error]"}]}, 402, "billing_error"),
    ],
)
async def test_bad_bodies_are_refused_at_once_and_unbilled(turned, body, change, status, kind):
    world = turned()
    answer = await world.call("POST", "/v1/messages", {**body(), **change})
    assert (answer.status, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]
    assert world.provider.bill.charges == []


async def test_broken_json_and_oversized_bodies(turned, body):
    world = turned(MockConfig(max_message_bytes=1000))
    assert (await world.call("POST", "/v1/messages", b'{"model":')).status == 400
    large = await world.call("POST", "/v1/messages", body("x" * 1000))
    assert (large.status, large.json()["error"]["type"]) == (413, "request_too_large")


async def test_zero_tokens_warm_the_cache_without_an_answer(turned, body):
    answer = (await turned().call("POST", "/v1/messages", body(max_tokens=0))).json()
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "k", "anthropic-version": "2023-06-01"}, 200),
        ({"authorization": "Bearer k", "anthropic-version": "2026-10-21"}, 200),
        ({"anthropic-version": "2023-06-01"}, 401),
        ({"x-api-key": "stolen", "anthropic-version": "2023-06-01"}, 401),
        ({"x-api-key": "k"}, 400),
        ({"x-api-key": "k", "anthropic-version": "1999-01-01"}, 400),
    ],
)
async def test_authentication_and_version(body, headers, status):
    async with serve(MockConfig(keys=frozenset({"k"}))) as server, httpx2.AsyncClient(verify=False) as http:
        reply = await http.post(f"{server.url}/v1/messages", json=body(), headers=headers)
    assert reply.status_code == status


async def test_every_answer_carries_the_providers_headers(body):
    config = MockConfig(sync_rpm=10, faults=Faults(clock_offset_s=3600))
    async with serve(config) as server, httpx2.AsyncClient(headers=OLD, verify=False) as http:
        reply = await http.post(f"{server.url}/v1/messages", json=body())
        hello = await http.head(f"{server.url}/api/hello")
    assert hello.status_code == 200
    assert reply.headers.get_list("date") == [reply.headers["date"]]
    assert reply.headers["request-id"].startswith("req_")
    assert reply.headers["anthropic-organization-id"] == "org_mock"
    assert reply.headers["anthropic-ratelimit-requests-limit"] == "10"
    assert reply.headers["anthropic-ratelimit-requests-remaining"] == "9"


async def test_synchronous_rate_limit_says_when_to_come_back(turned, body):
    world = turned(MockConfig(sync_rpm=2))
    statuses = [(await world.call("POST", "/v1/messages", body())).status for _ in range(3)]
    refused = await world.call("POST", "/v1/messages", body())
    assert statuses == [200, 200, 429]
    assert refused.headers["retry-after"] == "30"
    world.time += 30
    assert (await world.call("POST", "/v1/messages", body())).status == 200
    assert (await world.call("POST", "/v1/messages", body(), key="other")).status == 200


async def test_counts_tokens_and_lists_models(connected, body):
    async with connected() as (_, client):
        asked = body("x" * 400)
        counted = await client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
        used = await client.messages.create(**asked)
        models = {model.id: model async for model in client.models.list()}
        dated = await client.models.retrieve("claude-haiku-4-5-20251001")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("claude-none")
    assert counted.input_tokens == used.usage.input_tokens == 101
    assert models["claude-opus-5"].capabilities.batch.supported
    assert not models["claude-mythos-preview"].capabilities.batch.supported
    assert dated.id == "claude-haiku-4-5"


async def test_a_client_that_hangs_up_has_still_bought_its_answer(connected, body):
    async with connected(MockConfig(sync_latency=Constant(5)), timeout=0.1) as (server, client):
        with pytest.raises(anthropic.APITimeoutError):
            await client.messages.create(**body())
        assert len(server.provider.bill.charges) == 1


def test_serves_blocking_clients_from_a_thread(body):
    with serve_in_thread() as server, anthropic.Anthropic(base_url=server.url, api_key="k") as client:
        assert client.messages.create(**body("hi")).content[0].text == expected_text(body("hi"))


async def test_stopping_the_server_leaves_nobody_waiting(body):
    async with httpx2.AsyncClient(headers=OLD, verify=False) as http:
        async with serve(MockConfig(sync_latency=Constant(60))) as server:
            waiting = asyncio.create_task(http.post(f"{server.url}/v1/messages", content=json.dumps(body())))
            await asyncio.sleep(0.1)
            assert server.provider.bill.charges
        with pytest.raises(httpx2.TransportError):
            await waiting


def test_run_serves_until_it_is_interrupted():
    ports = []

    def ready(server):
        ports.append(int(server.url.rpartition(":")[2]))
        raise KeyboardInterrupt

    run(MockConfig(), port=0, ready=ready)
    assert ports[0] > 0
