"""The record of calls through the proxy and the library: every lane leaves one, and nothing of what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic

from carpool import FleetDispatcher, RoutingPolicy
from carpool.core.model import EntryKind, Lane, RecordedPurchase
from carpool.core.ports import Store
from carpool.mock import Constant, MockConfig, serve
from carpool.stores import open_store
from tests.support.stage import MODEL, Stage, ask

from .test_openai_calls import both, chat

SLOW = MockConfig(batch_latency=Constant(30))
MARKER = "zwergpinguin"
OFF = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, record_calls=False)


async def recorded(store: Store) -> list[RecordedPurchase]:
    found: list[RecordedPurchase] = []
    page = await store.shapes(0.0, 0)
    while page is not None:
        found += page[1]
        page = await store.shapes(0.0, page[0])
    return found


async def of_stage(stage: Stage, count: int) -> list[RecordedPurchase]:
    """The record, once so many purchases are in it."""
    async with asyncio.timeout(5):
        while True:
            await stage.engine.recorder.flush()
            found = await recorded(stage.engine._context.store)
            if len(found) >= count:
                return found
            await asyncio.sleep(0.01)


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


async def test_a_call_on_now(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage:
        response = await stage.post(
            ask("hello", system="Be brief."),
            user_agent="claude-cli/2.1 (external, cli)",
            x_claude_code_agent_id="a1",
            x_carpool_tags="team=red",
        )
        used = response.json()["usage"]
        [found] = await of_stage(stage, 1)
        call, entry = found.call, found.entry
        assert (entry.lane, entry.kind, entry.model, entry.provider) == (Lane.NOW, "purchase", MODEL, "anthropic")
        assert entry.tags == {"team": "red"}
        assert (entry.usage.input_tokens, entry.usage.output_tokens) == (used["input_tokens"], used["output_tokens"])
        assert (call.client, call.stream, call.tool_turn) == ("claude-code/subagent", False, False)
        assert (call.deadline, call.max_output_tokens) == (None, 100)
        assert call.seconds is not None
        assert found.answered == entry.at + call.seconds >= call.arrived
        assert call.bytes == len(response.request.content)
        assert call.prefixes.root_bytes == len("Be brief.")
        assert call.prefixes.root_bytes < call.prefixes.end_bytes < call.bytes
        assert call.prefixes.parent is None


async def test_a_stream_and_its_next_turn(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage, stage.client() as client:
        for texts in (("a",), ("a", "b", "c")):
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=conversation(*texts)) as stream:
                await stream.get_final_message()
        first, second = await of_stage(stage, 2)
        assert first.call.stream
        assert second.call.prefixes.parent == first.call.prefixes.end
        assert second.call.prefixes.parent_bytes == first.call.prefixes.end_bytes
        assert second.call.prefixes.root == first.call.prefixes.root
        assert first.call.client == "AsyncAnthropic"


async def test_a_batch(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage:
        response = await stage.post(ask(), x_carpool_budget="10m", x_carpool_lane="batch")
        assert response.headers["x-carpool-lane"] == "batch"
        [found] = await of_stage(stage, 1)
        assert found.entry.lane is Lane.BATCH
        assert found.entry.usage.output_tokens == response.json()["usage"]["output_tokens"]
        assert found.call.deadline == found.call.arrived + 600
        assert found.call.seconds is None
        assert found.answered > found.call.arrived


async def test_a_rescue_and_its_batch(stage_with: Callable[..., Any]) -> None:
    async with stage_with(SLOW) as stage:
        response = await stage.post(ask(), x_carpool_budget="3s", x_carpool_lane="batch")
        assert response.headers["x-carpool-lane"] == "now"
        found = await of_stage(stage, 1)
        rescue = next(one for one in found if one.entry.lane is Lane.NOW)
        assert rescue.entry.kind in (EntryKind.RESCUE, EntryKind.PURCHASE)
        assert rescue.call.arrived < rescue.answered < rescue.call.deadline
        assert len({(one.entry.ticket, one.entry.purchase) for one in found}) == len(found)


async def test_a_call_on_flex() -> None:
    async with both() as stage, stage.client("/@lane=flex") as client:
        await client.chat.completions.create(**chat())
        await stage.booked(1)
        await stage.engine.recorder.flush()
        [found] = await recorded(stage.store)
        assert (found.entry.lane, found.call.client) == (Lane.FLEX, "AsyncOpenAI")
        assert found.answered > found.call.arrived


async def test_what_was_refused_is_not_recorded(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage:
        stage.mock.script("sync_429")
        assert (await stage.post(ask())).status_code == 429
        assert (await stage.post(ask("b"))).status_code == 200
        assert len(await of_stage(stage, 1)) == 1


async def test_nothing_of_what_was_said_is_in_the_record(stage_with: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "calls.db"
    async with stage_with(store=path) as stage:
        said = ask(MARKER, system=f"{MARKER} system", tools=[{"name": MARKER, "input_schema": {"type": "object"}}])
        for _ in range(3):
            assert (await stage.post(said)).status_code == 200
        await of_stage(stage, 3)
    files = list(tmp_path.glob("calls.db*"))  # noqa: ASYNC240
    assert path in files
    assert all(MARKER.encode() not in file.read_bytes() for file in files)


async def test_off_means_off(stage_with: Callable[..., Any], tmp_path: Path) -> None:
    async with stage_with(policy=OFF, store=tmp_path / "calls.db") as stage:
        assert (await stage.post(ask())).status_code == 200
        assert (await stage.post(ask(), x_carpool_lane="batch")).status_code == 200
    store = await open_store(tmp_path / "calls.db")
    assert await store.shapes(0.0, 0) is None
    await store.aclose()


async def test_another_key_shares_no_hash(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage:
        for key in ("one", "one", "two"):
            await stage.post(ask(), x_api_key=key)
        first, again, other = [found.call.prefixes for found in await of_stage(stage, 3)]
        assert first == again
        assert {first.root, first.end}.isdisjoint({other.root, other.end})


async def test_the_library_records_too(tmp_path: Path) -> None:
    async with serve(MockConfig(batch_latency=Constant(0.2))) as mock:
        policy, path = RoutingPolicy(linger_ms=20, poll_interval_s=0.05), tmp_path / "fleet.db"
        async with (
            AsyncAnthropic(api_key="k", base_url=mock.url) as client,
            FleetDispatcher(client, policy=policy, store=path) as fleet,
        ):
            for lane in (Lane.NOW, Lane.BATCH):
                await fleet.submit(lane=lane, tags={"team": "red"}, **ask(str(lane)))
    store = await open_store(path)
    found = await recorded(store)
    await store.aclose()
    assert [one.entry.lane for one in found] == [Lane.NOW, Lane.BATCH]
    assert {one.call.client for one in found} == {"AsyncAnthropic"}
    assert all(one.entry.tags == {"team": "red"} and one.entry.usage is not None for one in found)
