"""carpool's own pages: is it well, what does it hold, what happens."""

import asyncio
import json
from typing import Any

import pytest

from carpool.core.errors import StoreUnwritable
from carpool.engine.events import Trouble
from carpool.frontends.proxy import admin
from carpool.mock import Constant, MockConfig
from carpool.planners.policy import RoutingPolicy
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}
LATER = BATCH | {"prefer": "respond-async"}


async def read(stage: Any, path: str) -> Any:
    return await stage.http.get(f"{stage.url}/carpool/{path}")


async def test_it_is_ready_while_it_works(stage_with: Any) -> None:
    async with stage_with() as stage:
        answer = await read(stage, "readyz")
        assert (answer.status_code, answer.json()) == (200, {"ready": True, "reasons": []})


async def test_it_says_why_it_is_not_ready(stage_with: Any, monkeypatch: Any) -> None:
    async with stage_with() as stage:

        async def refuse(*_: Any) -> None:
            raise StoreUnwritable("The disk is full.")

        monkeypatch.setattr(stage.engine._context.store, "remember", refuse)
        answer = await read(stage, "readyz")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["The disk is full."])
        monkeypatch.undo()
        await stage.proxy.drain(0.0)
        assert (await read(stage, "readyz")).json()["reasons"] == ["carpool is stopping."]
        await stage.engine.close(0.0)
        answer = await read(stage, "readyz")
        assert answer.status_code == 503
        assert "The engine is not running." in answer.json()["reasons"]
        assert (await read(stage, "healthz")).status_code == 200


async def test_stats_have_counters_money_and_lanes(stage_with: Any) -> None:
    async with stage_with() as stage:
        await stage.post(ask("counted"), **BATCH)
        await stage.post(ask("counted"))
        await stage.until(lambda: stage.engine.stats.paid == stage.mock.bill.total())
        said = (await read(stage, "stats")).json()
        assert said["carpool.batched_calls"] == said["carpool.sync_calls"] == 1
        assert said["money"]["paid_usd"] == pytest.approx(stage.mock.bill.total() / 1e9)
        assert said["money"]["saved_usd"] > 0
        assert {row["lane"] for row in said["lanes"]} == {"now", "batch"}
        assert said["store"]["tickets.settled"] == 1
        assert said["waiting"] == 0


async def test_calls_are_listed_newest_first_without_bodies(stage_with: Any) -> None:
    async with stage_with(policy=RoutingPolicy(linger_ms=60_000)) as stage:
        for number in range(5):
            await stage.post(ask(f"secret words {number}"), **LATER, x_carpool_tags=f"n={number}")
        answer = await read(stage, "calls?limit=2")
        first = answer.json()
        assert [call["tags"] for call in first["calls"]] == [{"n": "4"}, {"n": "3"}]
        rest = (await read(stage, f"calls?before={first['next']}")).json()
        assert [call["tags"]["n"] for call in rest["calls"]] == ["2", "1", "0"]
        assert rest["next"] is None
        call = rest["calls"][0]
        assert (call["state"], call["lane"], call["provider"]) == ("queued", "batch", "anthropic")
        assert call["bytes"] > 0
        assert "secret words" not in answer.text


async def test_calls_are_found_by_state(stage_with: Any) -> None:
    async with stage_with() as stage:
        done = (await stage.post(ask("done"), **BATCH)).headers["x-carpool-ticket"]
        settled = (await read(stage, "calls?state=settled")).json()["calls"]
        assert [call["ticket"] for call in settled] == [done]
        assert (settled[0]["status"], settled[0]["kind"]) == (200, "succeeded")
        assert settled[0]["paid"] == stage.mock.bill.total()
        assert settled[0]["batch"] == stage.mock.batches[0].id
        for state in ("queued", "boarded", "sending"):
            assert (await read(stage, f"calls?state={state}")).json()["calls"] == []


async def test_what_was_bought_for_a_call_is_shown_with_it_and_to_its_own_key_only(
    stage_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.planners.tracking.DOUBT_S", 0.2)
    async with stage_with() as stage:
        stage.mock.script("batch_forgotten")
        answer = await stage.post(ask("lost once"), **BATCH)
        assert answer.status_code == 200
        page = f"calls/{answer.headers['x-carpool-ticket']}/purchases"
        for key in ({"x-api-key": "k"}, {}):  # without a key this machine sees everything, as on every page
            said = (await stage.http.get(f"{stage.url}/carpool/{page}", headers=key)).json()
            assert said["call"]["purchases"] == 2
            lost, bought = said["purchases"]
            assert (lost["batch"], lost["batch_state"]) == (stage.mock.batches[0].id, "abandoned")
            assert lost["paid"] is None
            assert "its batch was lost" in lost["reason"]
            assert (bought["batch"], bought["kind"]) == (stage.mock.batches[1].id, "purchase")
            assert bought["paid"] > 0
        other = await stage.http.get(f"{stage.url}/carpool/{page}", headers={"x-api-key": "another"})
        assert other.status_code == 404
        stats = (await read(stage, "stats")).json()
        assert (stats["calls"]["batch"], stats["calls"]["settled"]) == (1, 1)
        assert (stats["purchases"]["batch"], stats["purchases"]["unknown"]) == (1, 1)


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("calls?state=lost", "not a state"),
        ("calls?limit=0", "out of range"),
        ("calls?limit=x", "whole number"),
        ("calls?before=x", "not a ticket"),
        ("batches?state=queued", "not a state"),
        ("batches?before=x", "whole number"),
        ("batches?page=2", "not known here"),
    ],
)
async def test_bad_questions_are_answered_in_a_sentence(stage_with: Any, query: str, told: str) -> None:
    async with stage_with() as stage:
        answer = await read(stage, query)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


async def test_batches_are_listed_with_their_state(stage_with: Any) -> None:
    async with stage_with(MockConfig(batch_latency=Constant(30))) as stage:
        await stage.post(ask("one"), **LATER)
        await stage.until(lambda: stage.engine.stats.batches_submitted)
        [batch] = (await read(stage, "batches")).json()["batches"]
        assert (batch["state"], batch["count"], batch["provider"]) == ("open", 1, "anthropic")
        assert batch["provider_id"] == stage.mock.batches[0].id
        assert 0 <= batch["age_s"] < 30
        assert (await read(stage, "batches?state=collected")).json()["batches"] == []


async def test_pages_are_only_read(stage_with: Any) -> None:
    async with stage_with() as stage:
        answer = await stage.http.post(f"{stage.url}/carpool/stats")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


# ------------------------------------------------------------ events


async def listen(stage: Any, count: int, ready: asyncio.Event) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    async with stage.http.stream("GET", f"{stage.url}/carpool/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            ready.set()
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == count:
                break
    return events


async def test_what_happens_is_told(stage_with: Any) -> None:
    async with stage_with() as stage:
        ready = asyncio.Event()
        listening = asyncio.ensure_future(listen(stage, 5, ready))
        await ready.wait()
        await stage.post(ask("told, but not what was said"), **BATCH)
        events = await listening
        kinds = ["CallAdmitted", "BatchSubmitted", "BatchEnded", "CallSettled", "BatchCollected"]
        assert sorted(event["type"] for event in events) == sorted(kinds)
        assert "not what was said" not in json.dumps(events)
        await stage.until(lambda: not stage.engine.event_hooks._hooks)


async def test_a_listener_that_reads_too_slowly_is_told_and_dropped(stage_with: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(admin, "MAX_UNREAD", 10)
    async with stage_with() as stage:
        async with stage.http.stream("GET", f"{stage.url}/carpool/events") as response:
            lines = response.aiter_lines()
            await anext(lines)
            for number in range(50):  # within one turn of the loop: nobody could read them
                stage.engine.event_hooks.emit(Trouble(0.0, "testing", str(number)))
            rest = [line async for line in lines]
        assert sum(line.startswith("data: ") for line in rest) == 10
        assert any(line.startswith(": 40 events were missed") for line in rest)


async def test_listeners_are_kept_alive_and_let_go_at_the_end(stage_with: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(admin, "KEEP_ALIVE_S", 0.05)
    async with stage_with() as stage, stage.http.stream("GET", f"{stage.url}/carpool/events") as response:
        lines = response.aiter_lines()
        for _ in range(5):
            assert await anext(lines) in (": still here", "")
        await stage.proxy.drain(1.0)
        assert ": carpool is stopping." in [line async for line in lines]
