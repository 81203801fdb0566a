"""What carpool's own refusals say of trying again: Claude Code tries a refused key for minutes unless it is told."""

from pathlib import Path

import pytest
from anthropic import AsyncAnthropic, ConflictError

from carpool.core.keys import Profile
from carpool.core.model import Lane
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.mock import Constant, MockConfig
from tests.support.key_holders import HOUSE, give, hosting
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}
UNKNOWN = "cpk-" + "a" * 43


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (400, {"x-carpool-budget": "soon"}),
        (401, {"x-api-key": UNKNOWN}),
        (401, {"x-api-key": UNKNOWN, **BATCH}),
        (404, {"x-carpool-provider": "nobody"}),
        (421, {"host": "elsewhere.example"}),
    ],
)
async def test_what_no_retry_mends_says_so(status: int, headers: dict[str, str]) -> None:
    async with hosting() as stage:
        answer = await stage.post(ask(), **headers)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")


async def test_what_a_key_may_not_do_is_not_tried_again() -> None:
    async with hosting() as stage:
        key = await give(stage, "ci", Profile(lanes=frozenset({Lane.NOW})))
        answer = await stage.post(ask(), **{"x-api-key": key, "x-carpool-lane": "batch"})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (403, "false")
        unset = await give(stage, "unset", env="NOT_SET")
        answer = await stage.post(ask(), **{"x-api-key": unset})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")


async def test_an_sdk_asks_once_where_another_call_has_its_key(tmp_path: Path) -> None:
    headers = BATCH | {"x-carpool-key": "one"}
    async with hosting(MockConfig(batch_latency=Constant(0.1)), store=tmp_path / "s.db") as stage:
        async with AsyncAnthropic(base_url=stage.url, api_key="k", max_retries=2) as client:
            await client.messages.create(**ask("first"), extra_headers=headers)
            with pytest.raises(ConflictError) as found:
                await client.messages.create(**ask("second"), extra_headers=headers)
        assert found.value.response.headers["x-should-retry"] == "false"
        assert found.value.request.headers["x-stainless-retry-count"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_the_provider_refuses_for_a_batch_is_not_tried_again(stream: bool) -> None:
    patient = KeepAliveIntervals(stream_head_s=60.0)  # once its head is sent, a stream has no status of its own
    async with hosting(MockConfig(keys=frozenset({HOUSE})), intervals=patient) as stage:
        answer = await stage.post(ask(stream=stream), **BATCH, x_api_key="sk-wrong")
        assert (answer.status_code, answer.headers["x-should-retry"]) == (401, "false")
        assert answer.headers["x-carpool-lane"] == "now"
        plain = await stage.post(ask(stream=stream), x_api_key="sk-wrong")
        assert plain.status_code == 401
        assert "x-should-retry" not in plain.headers  # the provider's own words pass as they are
