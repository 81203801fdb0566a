"""What clients hear while they wait: 102, white space, pings, early messages; and the truth at the end."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
import pytest_asyncio

from carpool.dialects.keep_alive import ClientKind, recognise
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, MockConfig, expected_openai_text, expected_text
from tests.support.raw_client import exchange
from tests.support.stage import ask, staged

from .test_openai_calls import MODEL as OPENAI_MODEL
from .test_openai_calls import both, chat

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOON = KeepAliveIntervals(
    informational_s=0.1,
    head_s=0.2,
    space_s=0.05,
    stream_head_s=0.1,
    ping_s=0.05,
    early_s=0.05,
)
SDK = {"x-stainless-lang": "python", "x-stainless-retry-count": "0"}
BATCH = {"x-carpool-budget": "30m"}
FAILS = "[error:invalid_request_error]"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Any]:
    async with staged(MockConfig(batch_latency=Constant(0.6)), intervals=SOON) as one:
        yield one


# ------------------------------------------------------------ 102 Processing


async def test_an_sdk_hears_102_and_then_its_true_status(stage: Any) -> None:
    said = await exchange(stage.url, ask("informed"), SDK | BATCH)
    *informed, final = said.heads
    assert len(informed) >= 3
    assert {head.status for head in informed} == {102}
    assert final.status == 200
    assert json.loads(said.body)["content"][0]["text"] == expected_text(ask("informed"))


async def test_a_late_failure_has_its_true_status_behind_102(stage: Any) -> None:
    said = await exchange(stage.url, ask(f"{FAILS} informed"), SDK | BATCH)
    assert said.heads[0].status == 102
    assert said.heads[-1].status == 400
    assert json.loads(said.body)["error"]["type"] == "invalid_request_error"


async def test_the_sdk_outlasts_its_own_time_out(stage: Any) -> None:
    async with stage.client("/@budget=30m", timeout=0.4) as client:
        answer = await client.messages.create(**ask("outlasting"))
        assert answer.content[0].text == expected_text(ask("outlasting"))
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**ask(f"{FAILS} outlasting"))


async def test_http_1_0_never_hears_1xx(stage: Any) -> None:
    said = await exchange(stage.url, ask("old"), SDK | BATCH, version="1.0")
    assert [head.status for head in said.heads] == [200]
    assert "transfer-encoding" not in said.heads[0].fields
    assert json.loads(said.body)["content"][0]["text"] == expected_text(ask("old"))


@pytest.mark.parametrize("language", ["go", "java", "ruby"])
async def test_sdks_that_bear_few_1xx_get_white_space(stage: Any, language: str) -> None:
    said = await exchange(stage.url, ask(f"written in {language}"), {"x-stainless-lang": language} | BATCH)
    assert [head.status for head in said.heads] == [200]
    assert said.body.startswith(b"  ")


# ------------------------------------------------------------ clients that say how long they wait


LIMIT_S = 0.8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient() -> AsyncIterator[Any]:
    """With carpool's own times, and batches that take longer than the limit of any client here."""
    async with staged(MockConfig(batch_latency=Constant(2 * LIMIT_S)), intervals=KeepAliveIntervals()) as one:
        yield one


@pytest.mark.parametrize("form", ["x-stainless-read-timeout", "x-stainless-timeout"])
async def test_102_comes_within_the_limit_that_an_sdk_states(patient: Any, form: str) -> None:
    said = await exchange(patient.url, ask(f"stated in {form}"), SDK | BATCH | {form: str(LIMIT_S)})
    assert len(said.heads) >= 3
    assert {head.status for head in said.heads[:-1]} == {102}
    assert said.heads[-1].status == 200


async def test_the_sdk_outlasts_the_limit_that_it_states(patient: Any) -> None:
    async with patient.client("/@budget=30m", timeout=LIMIT_S) as client:

        async def streamed(text: str, **headers: str) -> str:
            async with client.messages.stream(**ask(text), extra_headers=headers) as stream:
                return await stream.get_final_text()

        async def whole() -> str:
            return (await client.messages.create(**ask("a whole"))).content[0].text

        async def refused() -> None:
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(**ask(f"{FAILS} within its limit"))

        agent = {"user-agent": "claude-cli/2.1.325"}
        *told, _ = await asyncio.gather(whole(), streamed("a stream"), streamed("an early one", **agent), refused())
        assert told == [expected_text(ask(text)) for text in ("a whole", "a stream", "an early one")]


async def test_openais_sdk_outlasts_the_limit_that_it_states() -> None:
    async with both(MockConfig(batch_latency=Constant(2 * LIMIT_S))) as stage:
        async with stage.client("/@lane=batch", timeout=LIMIT_S) as client:

            async def whole() -> str | None:
                return (await client.chat.completions.create(**chat("a whole"))).choices[0].message.content

            async def streamed() -> str:
                stream = await client.chat.completions.create(**chat("a stream"), stream=True)
                chunks = [one async for one in stream]
                return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)

            async def response() -> str:
                stream = await client.responses.create(model=OPENAI_MODEL, input="a response", stream=True)
                return [one async for one in stream][-1].type

            told = await asyncio.gather(whole(), streamed(), response())
        expected = [expected_openai_text(chat(text)) for text in ("a whole", "a stream")]
        assert told == [*expected, "response.completed"]


async def test_white_space_comes_within_the_limit_that_a_client_states(patient: Any) -> None:
    stated = {"x-stainless-lang": "java", "x-stainless-read-timeout": str(LIMIT_S)}
    async with httpx2.AsyncClient(timeout=LIMIT_S) as client:
        sent = {"x-api-key": "k", "anthropic-version": "2023-06-01"} | stated | BATCH
        answer = await client.post(patient.url + "/v1/messages", json=ask("spaced within"), headers=sent)
    assert answer.content.startswith(b" ")
    assert answer.json()["content"][0]["text"] == expected_text(ask("spaced within"))


async def test_a_budget_longer_than_the_limit_is_outlasted_on_now_too() -> None:
    config = MockConfig(sync_latency=Constant(2 * LIMIT_S))
    async with staged(config, intervals=KeepAliveIntervals()) as stage:
        over = {"x-carpool-lane": "now", "x-carpool-budget": "500ms"}  # then its limit is its own again
        limit = {"x-stainless-read-timeout": "0.5"}
        async with stage.client("/@lane=now,budget=30s", timeout=LIMIT_S) as client:
            answer, unhurried, late = await asyncio.gather(
                client.messages.create(**ask("slow")),
                exchange(stage.url, ask("over"), SDK | limit),
                exchange(stage.url, ask("late"), SDK | over | limit),
            )
        assert answer.content[0].text == expected_text(ask("slow"))
        assert 102 not in [head.status for head in unhurried.heads]
        assert len(late.heads) <= 2
        assert late.heads[-1].status == 200


async def test_a_limit_that_counts_to_the_head_is_met_by_retries(patient: Any) -> None:
    """As Node's: no sign of life prolongs it, and its retry finds the call."""
    before, charged = patient.engine.stats.returned_calls, len(patient.mock.bill.charges)
    stated = {"x-stainless-lang": "js", "x-stainless-timeout": "1"} | BATCH
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await exchange(patient.url, ask("from Node"), stated | {"x-stainless-retry-count": "0"})
    said = await exchange(patient.url, ask("from Node"), stated | {"x-stainless-retry-count": "1"})
    assert said.heads[-1].status == 200
    assert patient.engine.stats.returned_calls == before + 1
    assert len(patient.mock.bill.charges) == charged + 1


@pytest.mark.parametrize(
    ("headers", "limit"),
    [
        ({"x-stainless-read-timeout": "30", "x-stainless-timeout": "NOT_GIVEN"}, 30.0),
        ({"x-stainless-read-timeout": "600.0", "x-stainless-timeout": "7.5"}, 7.5),
        ({"x-stainless-timeout": "10"}, 10.0),
        ({"x-stainless-timeout": "None"}, math.inf),
        ({"x-stainless-timeout": "0"}, math.inf),
        ({"x-stainless-timeout": "-3"}, math.inf),
        ({"x-stainless-timeout": "nan"}, math.inf),
        ({"x-stainless-timeout": "inf"}, math.inf),
        ({"x-stainless-timeout": "1" * 400}, math.inf),
        ({"x-stainless-timeout": ""}, math.inf),
        ({"user-agent": "mistral-client-python/3.7"}, 5.0),
        ({"user-agent": "speakeasy-sdk/python 3.7", "x-stainless-timeout": "2"}, 2.0),
        ({}, math.inf),
    ],
)
async def test_the_limit_that_a_client_states(headers: dict[str, str], limit: float) -> None:
    assert recognise(tuple(headers.items())).limit == limit


async def test_signs_come_by_half_of_a_limit_but_not_in_a_rush() -> None:
    usual = KeepAliveIntervals()
    assert usual.within(math.inf) == usual.within(600) == usual
    ten = usual.within(10)
    assert (ten.informational_s, ten.head_s, ten.space_s, ten.ping_s, ten.stream_head_s) == (5, 5, 5, 5, 2)
    assert usual.within(0.5).ping_s == 0.25
    assert usual.within(1e-9).ping_s == 0.25


# ------------------------------------------------------------ white space


async def test_others_get_white_space_before_their_json(stage: Any) -> None:
    said = await exchange(stage.url, ask("spaced"), BATCH)
    assert [head.status for head in said.heads] == [200]
    assert said.heads[0].fields["content-type"] == "application/json"
    assert said.heads[0].fields["x-carpool-lane"] == "batch"
    assert said.heads[0].fields["x-carpool-ticket"]
    spaces = len(said.body) - len(said.body.lstrip(b" "))
    assert spaces >= 3
    assert json.loads(said.body)["content"][0]["text"] == expected_text(ask("spaced"))


async def test_a_failure_after_a_committed_200_breaks_the_connection(stage: Any) -> None:
    with pytest.raises(httpx2.RemoteProtocolError):
        await stage.post(ask(f"{FAILS} spaced"), **{"x-carpool-budget": "30m"})


async def test_a_failure_after_a_committed_200_resets_http_1_0(stage: Any) -> None:
    with pytest.raises(ConnectionError):
        await exchange(stage.url, ask(f"{FAILS} old and spaced"), BATCH, version="1.0")


async def test_a_failure_while_the_head_is_held_has_its_true_status() -> None:
    async with staged(MockConfig(batch_latency=Constant(0.1)), intervals=KeepAliveIntervals()) as stage:
        answer = await stage.post(ask(FAILS), **BATCH)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        headers = {"x-carpool-budget": "30m"}
        streamed = await stage.post(ask(f"{FAILS} streamed", stream=True), **headers)
        assert streamed.status_code == 400


# ------------------------------------------------------------ streams


async def events_of(stage: Any, text: str, **headers: str) -> list[dict[str, Any]]:
    answer = await stage.post(ask(text, stream=True), **BATCH, **headers)
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


async def test_a_stream_is_pinged(stage: Any) -> None:
    events = await events_of(stage, "pinged")
    kinds = [event["type"] for event in events]
    assert kinds.index("message_start") == kinds.count("ping") >= 3


@pytest.mark.parametrize(
    "headers", [{"user-agent": "claude-cli/2.1.325 (external, cli)"}, {"x-claude-code-session-id": "abc"}]
)
async def test_claude_code_gets_its_message_started_early(stage: Any, headers: dict[str, str]) -> None:
    events = await events_of(stage, f"early {min(headers)}", **headers)
    kinds = [event["type"] for event in events]
    assert kinds.count("message_start") == 1
    assert kinds[0] == "message_start"
    assert kinds[1:4] == ["message_delta"] * 3
    assert events[1]["delta"] == {"stop_reason": None, "stop_sequence": None}
    assert kinds[-1] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert events[-2]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_an_early_message_is_whole_to_the_sdk(stage: Any) -> None:
    asked = ask("early for the SDK [blocks]")
    whole = (await stage.post(asked, to=stage.direct)).json()
    async with (
        stage.client("/@budget=30m", default_headers={"user-agent": "claude-cli/2.1.325"}) as client,
        client.messages.stream(**asked) as stream,
    ):
        final = await stream.get_final_message()
    assert [block.to_dict() for block in final.content] == whole["content"]
    assert final.usage.input_tokens == whole["usage"]["input_tokens"]
    assert final.usage.output_tokens == whole["usage"]["output_tokens"]
    assert final.stop_reason == whole["stop_reason"]


@pytest.mark.parametrize("agent", ["python-httpx/0.28", "claude-cli/2.1.325"])
async def test_a_late_failure_in_a_stream_has_its_true_type(stage: Any, agent: str) -> None:
    events = await events_of(stage, f"{FAILS} {agent}", **{"user-agent": agent})
    assert len(events) > 1
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "invalid_request_error"


async def test_the_sdk_raises_a_late_failure(stage: Any) -> None:
    async with stage.client("/@budget=30m") as client:
        with pytest.raises(anthropic.APIStatusError, match="invalid_request_error"):
            async with client.messages.stream(**ask(f"{FAILS} raised")) as stream:
                await stream.get_final_message()


# ------------------------------------------------------------ kinds


@pytest.mark.parametrize(
    ("headers", "kind", "bears"),
    [
        ({"user-agent": "claude-cli/2.1.325 (external)", "x-stainless-lang": "js"}, ClientKind.CLAUDE_CODE, True),
        ({"user-agent": "node", "x-claude-code-session-id": "x"}, ClientKind.CLAUDE_CODE, False),
        ({"user-agent": "codex_exec/0.166"}, ClientKind.CODEX, False),
        ({"originator": "codex_cli_rs"}, ClientKind.CODEX, False),
        ({"user-agent": "AsyncAnthropic/Python 2.8", "x-stainless-lang": "python"}, ClientKind.SDK, True),
        ({"user-agent": "Anthropic/Go", "x-stainless-lang": "go"}, ClientKind.SDK, False),
        ({"user-agent": "python-requests/2"}, ClientKind.OTHER, False),
        ({}, ClientKind.OTHER, False),
    ],
)
async def test_kinds_of_clients(headers: dict[str, str], kind: ClientKind, bears: bool) -> None:
    client = recognise(tuple(headers.items()))
    assert (client.kind, client.accepts_1xx) == (kind, bears)


async def test_a_client_that_leaves_while_it_hears_102_is_noticed(stage: Any) -> None:
    before = stage.engine.stats.returned_calls
    leaving = asyncio.ensure_future(exchange(stage.url, ask("leaving"), SDK | BATCH))
    await stage.until(lambda: len(stage.engine._context.waiters) == 1)
    leaving.cancel()
    await asyncio.wait([leaving])
    await stage.until(lambda: len(stage.engine._context.waiters) == 0)
    answer = await stage.post(ask("leaving"), **BATCH)
    assert answer.status_code == 200
    assert stage.engine.stats.returned_calls == before + 1
