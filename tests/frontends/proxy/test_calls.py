"""Calls through the proxy, on both lanes, whole and streamed."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from carpool.mock import expected_text
from tests.support.stage import staged

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID_ON_BATCH = {"lane", "ticket", "batch", "cost", "saved"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Any]:
    async with staged() as one:
        yield one


def said(response: Any) -> dict[str, str]:
    prefix = "x-carpool-"
    return {name.removeprefix(prefix): value for name, value in response.headers.items() if name.startswith(prefix)}


def end_to_end(response: Any) -> dict[str, str]:
    own = {"date", "request-id", "connection", "transfer-encoding", "server"}
    return {
        k: v
        for k, v in response.headers.items()
        if k not in own and not k.startswith("x-carpool-") and not k.endswith("-reset")
    }


async def test_without_a_budget_a_call_goes_straight_through(stage: Any, body: Any) -> None:
    direct, through = await stage.post(body(), to=stage.direct), await stage.post(body())
    assert through.status_code == 200
    assert through.json()["content"] == direct.json()["content"]
    assert through.json()["usage"] == direct.json()["usage"]
    assert end_to_end(through) == end_to_end(direct)
    assert said(through)["lane"] == "now"
    assert said(through).keys() == {"lane", "ticket", "reason"}  # what it cost is not known at its head


async def test_a_stream_on_now_passes_byte_for_byte(stage: Any, body: Any) -> None:
    text = "every block [blocks]"
    direct = await stage.post(body(text, stream=True), to=stage.direct)
    through = await stage.post(body(text, stream=True))
    first = direct.text.split('"id":"msg_')[1].split('"')[0]
    second = through.text.split('"id":"msg_')[1].split('"')[0]
    assert through.text.replace(second, first) == direct.text
    assert end_to_end(through) == end_to_end(direct)
    assert said(through).keys() == {"lane", "ticket", "reason"}


async def test_a_budget_in_a_header_takes_the_batch(stage: Any, body: Any) -> None:
    asked = body("by header")
    answer = await stage.post(asked, x_carpool_budget="30m")
    assert answer.json()["content"][0]["text"] == expected_text(asked)
    assert answer.json()["usage"]["service_tier"] == "batch"
    assert said(answer).keys() >= SAID_ON_BATCH
    assert said(answer)["lane"] == "batch"
    assert said(answer)["cost"] == said(answer)["saved"]


async def test_a_budget_in_the_base_url_takes_the_batch(stage: Any, body: Any) -> None:
    asked = body("by base URL")
    async with stage.client("/@budget=30m,tags.team=ci") as client:
        answer = await client.messages.create(**asked)
    assert answer.content[0].text == expected_text(asked)
    assert answer.usage.service_tier == "batch"


async def test_a_batched_answer_is_replayed_as_a_stream(stage: Any, body: Any) -> None:
    asked = body("replayed [blocks]")
    whole = (await stage.post(asked, to=stage.direct)).json()
    async with stage.client("/@budget=30m") as client, client.messages.stream(**asked) as stream:
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == whole["content"]
    assert final.stop_reason == whole["stop_reason"]
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]


async def test_a_waiting_stream_is_pinged(stage: Any, body: Any) -> None:
    answer = await stage.post(body("pinged", stream=True), x_carpool_budget="30m")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert said(answer)["lane"] == "batch"
    events = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert events[0] == "ping"
    assert events.count("ping") >= 2
    assert events[-1] == "message_stop"


@pytest.mark.parametrize("budget", [None, "30m"])
async def test_the_providers_errors_keep_status_and_shape(stage: Any, body: Any, budget: str | None) -> None:
    asked = body("[error:invalid_request_error]")
    direct = await stage.post(asked, to=stage.direct)
    through = await stage.post(asked, **({"x_carpool_budget": budget} if budget else {}))
    assert through.status_code == direct.status_code == 400
    assert through.json()["type"] == "error"
    assert through.json()["error"] == direct.json()["error"]


@pytest.mark.parametrize("options", ["", "/@budget=30m"])
async def test_the_sdk_raises_its_own_errors_while_streaming(stage: Any, body: Any, options: str) -> None:
    async with stage.client(options) as client:
        with pytest.raises(anthropic.APIStatusError, match="invalid_request_error"):
            async with client.messages.stream(**body(f"[error:invalid_request_error] {options}")) as stream:
                await stream.get_final_message()


async def test_a_refused_stream_on_now_has_the_providers_status(stage: Any, body: Any) -> None:
    through = await stage.post(body("[error:not_found_error]", stream=True))
    assert through.status_code == 404
    assert through.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ({"x_carpool_budget": "soon"}, "not a budget"),
        ({"x_carpool_lane": "fast"}, "not a lane"),
        ({"x_carpool_colour": "red"}, "no option"),
        ({"x_carpool_tags": "team"}, "not a tag"),
    ],
)
async def test_bad_options_are_refused_in_the_providers_shape(stage: Any, body: Any, headers: Any, told: str) -> None:
    answer = await stage.post(body(), **headers)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert told in answer.json()["error"]["message"]


async def test_a_bad_option_in_the_path_is_refused(stage: Any, body: Any) -> None:
    answer = await stage.post(body(), path="/@30m/v1/messages")
    assert answer.status_code == 400
    assert "@budget=30m" in answer.json()["error"]["message"]


@pytest.mark.parametrize("budget", [{}, {"x-carpool-budget": "30m"}])
async def test_without_a_key_the_provider_answers(stage: Any, body: Any, budget: dict[str, str]) -> None:
    headers = {"anthropic-version": "2023-06-01", **budget}
    direct = await stage.http.post(f"{stage.direct}/v1/messages", json=body(), headers=headers)
    through = await stage.http.post(f"{stage.url}/v1/messages", json=body(), headers=headers)
    assert through.status_code == direct.status_code == 401
    assert through.json()["error"] == direct.json()["error"]


async def test_a_broken_body_is_refused(stage: Any) -> None:
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    answer = await stage.http.post(f"{stage.url}/v1/messages", content=b'{"model": ', headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_the_same_key_is_the_same_call(stage: Any, body: Any) -> None:
    first = await stage.post(body("keyed"), x_carpool_key="once", x_carpool_budget="30m")
    again = await stage.post(body("keyed"), x_carpool_key="once", x_carpool_budget="30m")
    assert again.content == first.content
    assert said(again)["ticket"] == said(first)["ticket"]
    other = await stage.post(body("another"), x_carpool_key="once", x_carpool_budget="30m")
    assert other.status_code == 409


async def test_a_keyed_stream_on_now_says_so(stage: Any, body: Any) -> None:
    answer = await stage.post(body("keyed now", stream=True), x_carpool_key="now-once")
    assert said(answer)["lane"] == "now"
    assert answer.text.rstrip().endswith('{"type":"message_stop"}')
