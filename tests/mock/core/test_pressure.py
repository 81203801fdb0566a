"""The mock's synchronous limits: what it lets in, what it says of it, and its bursts of 429."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from carpool.mock import Faults, MockAnthropic, MockConfig
from carpool.mock.core.limits import TokenBucket


class Clock:
    def __init__(self) -> None:
        self.time = 1_794_000_000.0

    def __call__(self) -> float:
        return self.time


def standing(config: MockConfig) -> tuple[MockAnthropic, Clock, httpx2.AsyncClient]:
    clock = Clock()
    mock = MockAnthropic(config, now=clock)
    return mock, clock, httpx2.AsyncClient(transport=httpx2.ASGITransport(mock.app), base_url="http://mock")


async def call(http: httpx2.AsyncClient, key: str = "k") -> Any:
    body = {"model": "claude-haiku-4-5", "max_tokens": 10, "messages": [{"role": "user", "content": "hi"}]}
    return await http.post("/v1/messages", json=body, headers={"x-api-key": key, "anthropic-version": "2023-06-01"})


def test_a_bucket_with_a_burst_refills_at_its_rate() -> None:
    bucket = TokenBucket(6000, 0.0, 10)
    assert bucket.limit == 10
    assert [bucket.take(0.0) for _ in range(10)] == [0.0] * 10
    assert bucket.take(0.0) == pytest.approx(0.01)
    assert bucket.full_at(0.0) == pytest.approx(0.1)
    assert bucket.remaining(100.0) == 10


async def test_the_limit_is_kept_and_said() -> None:
    mock, clock, http = standing(MockConfig(sync_rpm=60, sync_burst=2))
    async with http:
        answers = [await call(http) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["anthropic-ratelimit-requests-remaining"] for answer in answers] == ["1", "0", "0"]
        assert answers[0].headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answers[2].headers["retry-after"] == "1"
        clock.time += 1.0
        assert (await call(http)).status_code == 200
    assert [one.status for one in mock.arrivals] == [200, 200, 429, 200]


async def test_a_burst_refuses_everybody_of_a_workspace_for_a_while() -> None:
    mock, clock, http = standing(
        MockConfig(workspaces={"a": "w", "b": "w"}, faults=Faults(burst_s=5.0, retry_after_s=3))
    )
    async with http:
        mock.script("sync_429_burst")
        refused = await call(http, "a")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "3"
        clock.time += 4.9
        assert (await call(http, "b")).status_code == 429
        assert (await call(http, "elsewhere")).status_code == 200
        clock.time += 0.2
        assert (await call(http, "a")).status_code == 200
    assert len(mock.bill.charges) == 2
