"""Edits for the prompt cache, from the client to the provider: what is sent, what stays, and how it is taken back."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest

from carpool import RoutingPolicy
from carpool.core.model import CachePlan, ticket_number
from carpool.core.ports import EditedBody
from carpool.dialects.anthropic.caching import MessagesCacheEdits
from tests.support.stage import MODEL, Stage

MODEL_512 = "claude-sonnet-5-5"
SYSTEM = "You help. " * 1500
SHORT = {"type": "ephemeral"}
PLANS = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, batch_rpm=100_000, caching="plan")


def body(*, marked: bool = False, model: str = MODEL_512, **more: Any) -> dict[str, Any]:
    system = [{"type": "text", "text": SYSTEM, "cache_control": SHORT}] if marked else SYSTEM
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    return {"model": model, "max_tokens": 50, "system": system, "messages": messages, **more}


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[CachePlan]:
    """Edits that the provider refuses; each call is noted."""
    made: list[CachePlan] = []

    def edited(_: object, text: bytes, plan: CachePlan) -> EditedBody:
        made.append(plan)
        document = json.loads(text)
        document["tools"] = [{"name": f"t{n}", "input_schema": {}, "cache_control": SHORT} for n in range(6)]
        return EditedBody(json.dumps(document).encode(), "too many marks")

    monkeypatch.setattr(MessagesCacheEdits, "edited", edited)
    return made


async def purchases(stage: Stage, ticket: str) -> list[dict[str, Any]]:
    found = await stage.http.get(f"{stage.url}/carpool/calls/{ticket}/purchases")
    return found.json()["purchases"]


async def test_a_conversation_without_marks_gets_some(stage_with: Callable[..., Any]) -> None:
    async with stage_with(policy=PLANS) as stage:
        first = await stage.post(body())
        again = await stage.post(body())
        off = await stage.post(body(), x_carpool_caching="off")
    assert first.status_code == 200
    assert "For the prompt cache: a mark on the system prompt for 5m" in first.headers["x-carpool-reason"]
    assert first.json()["usage"]["cache_creation_input_tokens"] > 1000
    assert again.json()["usage"]["cache_read_input_tokens"] > 1000
    assert off.json()["usage"]["cache_read_input_tokens"] == 0
    assert "prompt cache" not in off.headers["x-carpool-reason"]


@pytest.mark.parametrize("mode", ["off", "observe"])
async def test_other_modes_change_nothing(stage_with: Callable[..., Any], mode: str) -> None:
    async with stage_with() as stage:
        found = await stage.post(body(), x_carpool_caching=mode)
    assert found.json()["usage"]["cache_creation_input_tokens"] == 0


async def test_a_compressed_request_is_edited_too(stage_with: Callable[..., Any]) -> None:
    async with stage_with(policy=PLANS) as stage:
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01", "content-encoding": "gzip"}
        packed = gzip.compress(json.dumps(body()).encode())
        found = await stage.http.post(stage.url + "/v1/messages", content=packed, headers=headers)
    assert found.json()["usage"]["cache_creation_input_tokens"] > 1000


async def test_refused_edits_are_taken_back(stage_with: Callable[..., Any], spoiled: list[CachePlan]) -> None:
    async with stage_with(policy=PLANS) as stage:
        found = await stage.post(body())
        assert found.status_code == 200
        assert "prompt cache" not in found.headers["x-carpool-reason"]
        number = ticket_number(found.headers["x-carpool-ticket"])
        rows = await stage.engine.overview.purchases(number)
        assert [row["paid"] for row in rows] == [0, rows[1]["paid"]]
        assert "too many marks" in rows[0]["reason"]
        await stage.post(body())
        assert len(spoiled) == 1  # never again for this model
        await stage.post(body(model="claude-opus-5"))
        assert len(spoiled) == 2


async def test_marks_live_longer_in_a_batch(stage_with: Callable[..., Any]) -> None:
    async with stage_with(policy=PLANS) as stage:
        found = await stage.post(body(marked=True), x_carpool_lane="batch")
        usage = found.json()["usage"]
        rows = await purchases(stage, found.headers["x-carpool-ticket"])
    assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 1000
    assert usage["cache_creation"]["ephemeral_5m_input_tokens"] == 0
    assert [row["reason"] for row in rows] == ["For the prompt cache: 1 mark for 1h."]


async def test_a_batch_holds_edited_and_unedited_calls(stage_with: Callable[..., Any]) -> None:
    async with stage_with(policy=PLANS) as stage:
        bodies = [body(marked=number % 2 == 0, metadata={"user_id": str(number)}) for number in range(6)]
        found = await asyncio.gather(*(stage.post(one, x_carpool_lane="batch") for one in bodies))
    hours = [one.json()["usage"]["cache_creation"]["ephemeral_1h_input_tokens"] for one in found]
    assert [one.status_code for one in found] == [200] * 6
    assert sum(hours[0::2]) > 1000
    assert hours[1::2] == [0, 0, 0]


async def test_a_call_refused_in_its_batch_is_bought_as_it_came(
    stage_with: Callable[..., Any], spoiled: list[CachePlan]
) -> None:
    async with stage_with(policy=PLANS) as stage:
        found = await stage.post(body(marked=True), x_carpool_lane="batch")
        assert found.status_code == 200
        assert found.json()["usage"]["cache_creation"]["ephemeral_5m_input_tokens"] > 1000
        rows = await purchases(stage, found.headers["x-carpool-ticket"])
    assert len(rows) == 2
    assert set(spoiled) == {CachePlan(ttl="1h")}


async def test_a_small_prompt_is_left_alone(stage_with: Callable[..., Any]) -> None:
    async with stage_with(policy=PLANS) as stage:
        found = await stage.post(body(system="Be brief.", model=MODEL))
    assert "prompt cache" not in found.headers["x-carpool-reason"]
