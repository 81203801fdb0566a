"""A ticket that an answer names can be looked up by its own key; where there is nothing to look up, none is named."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.model import Entry, EntryKind, Lane, Outcome, OutcomeKind, ticket_number
from carpool.engine import Reply
from carpool.engine.now.send import UNSENT
from carpool.frontends.intake import carpool_headers, early_headers
from carpool.mock import Constant, Faults, MockConfig
from carpool.planners.policy import RoutingPolicy
from tests.support.sockets import House, dialled, request
from tests.support.sockets import ask as sent
from tests.support.stage import Stage, ask

from .test_disconnect import MESSAGES, Scene, chunk, head
from .test_openai_calls import both, chat
from .test_pass_through import SSE

KEY = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
LONG = {"x-carpool-budget": "30s", "x-carpool-lane": "now"}


async def look_up(stage: Stage, ticket: str, method: str = "GET", **headers: str) -> Any:
    return await stage.http.request(method, f"{stage.url}/carpool/calls/{ticket}", headers=KEY | headers)


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("way", [{}, LONG], ids=["short", "long"])
async def test_a_call_on_now_is_found_in_the_ledger(stage_with: Any, way: dict[str, str], stream: bool) -> None:
    async with stage_with() as stage:
        answer = await stage.post(ask("at once", stream=stream), **way, x_carpool_tags="team=ci")
        ticket = answer.headers["x-carpool-ticket"]
        found = await look_up(stage, ticket)
        assert found.status_code == 410
        told = found.json()
        assert (told["ticket"], told["state"], told["lane"], told["tags"]) == (ticket, "settled", "now", {"team": "ci"})
        assert told["cost_usd"] == stage.mock.bill.total() / 1e9 > 0
        assert found.headers["x-carpool-ticket"] == ticket
        assert found.headers["x-carpool-cost"].startswith("$0.")
        (purchase,) = told["purchases"]
        assert (purchase["kind"], purchase["cost_usd"]) == ("purchase", told["cost_usd"])
        assert purchase["usage"]["output_tokens"] > 0
        assert "not kept" in told["message"]
        taken_back = (await look_up(stage, ticket, "DELETE")).json()
        assert (taken_back["cancelled"], taken_back["state"]) == (False, "settled")
        assert (await look_up(stage, ticket, "PUT")).status_code == 405


@pytest.mark.parametrize("way", [{}, LONG], ids=["short", "long"])
async def test_a_refusal_of_the_provider_is_found(stage_with: Any, way: dict[str, str]) -> None:
    async with stage_with() as stage:
        answer = await stage.post(ask("[error:invalid_request_error]"), **way)
        assert answer.status_code == 400
        told = (await look_up(stage, answer.headers["x-carpool-ticket"])).json()
        assert (told["state"], told["cost_usd"], told["purchases"][0]["usage"]) == ("settled", 0, None)


async def test_a_call_on_flex_is_found() -> None:
    async with both(MockConfig()) as stage, stage.client("/@lane=flex") as client:
        raw = await client.chat.completions.with_raw_response.create(**chat())
        place = f"{stage.url}/carpool/calls/{raw.headers['x-carpool-ticket']}"
        found = await client._client.get(place, headers=client.auth_headers)
        told = found.json()
        assert (found.status_code, told["lane"]) == (410, "flex")
        assert told["saved_usd"] == told["cost_usd"] > 0


@pytest.mark.parametrize(
    "headers",
    [
        {"x-carpool-budget": "30m"},
        {"x-carpool-key": "mine"},
        {"x-carpool-budget": "30m", "prefer": "respond-async"},
        {"prefer": "respond-async, wait=10"},
    ],
)
async def test_kept_calls_give_their_answer(stage_with: Any, headers: dict[str, str]) -> None:
    async with stage_with() as stage:
        answer = await stage.post(ask("kept"), **headers)
        found = await look_up(stage, answer.headers["x-carpool-ticket"] + "?wait=10s")
        assert found.status_code == 200
        assert found.json()["type"] == "message"


async def test_what_was_kept_is_found_in_the_ledger_later(stage_with: Any) -> None:
    async with stage_with() as stage:
        ticket = (await stage.post(ask("kept for a while"), x_carpool_budget="30m")).headers["x-carpool-ticket"]
        store = stage.engine._context.store
        await stage.until(lambda: not stage.engine.deliveries._pending)
        while not await store.retain(float("inf"), float("inf"), 10):  # noqa: ASYNC110  it is delivered in a moment
            await asyncio.sleep(0.01)
        assert await store.listed_call(ticket_number(ticket)) is None
        told = (await look_up(stage, ticket)).json()
        assert (told["state"], told["lane"], len(told["purchases"])) == ("settled", "batch", 1)


@pytest.mark.parametrize("way", [(), ("X-Carpool-Budget: 30s", "X-Carpool-Lane: now")], ids=["short", "long"])
async def test_a_call_is_found_while_its_answer_passes(way: tuple[str, ...]) -> None:
    begun = SSE[: SSE.index(b"event: message_delta")]
    scene = Scene(head(), chunk(begun))
    async with scene.open(MESSAGES) as house:
        async with dialled(house.url) as (reader, writer):
            writer.write(MESSAGES.call(*way))
            told = (await reader.readuntil(begun)).decode("latin-1")
            ticket = told.partition("x-carpool-ticket: ")[2][:13]
            assert await entry_of(house, ticket) == ("sent", None, None)
        await scene.told(house)
        state, cost, usage = await entry_of(house, ticket)
        assert (state, cost) == ("settled", None)
        assert usage["input_tokens"] == 10


async def entry_of(house: House, ticket: str) -> tuple[str, float | None, Any]:
    keys = ("Authorization: Bearer k", "X-Api-Key: k")
    answer = await sent(house.url, request(f"GET /carpool/calls/{ticket}", *keys))
    assert answer.status == 410
    told = json.loads(answer.body)
    return told["state"], told["cost_usd"], told["purchases"][0]["usage"]


async def test_a_call_that_was_not_sent_names_no_ticket(stage_with: Any) -> None:
    """carpool refuses it itself: nothing was bought, and nothing stands in the ledger."""
    slow = MockConfig(faults=Faults(burst_s=60.0, retry_after_s=10), sync_latency=Constant(0.01))
    async with stage_with(slow, RoutingPolicy(max_wait_now_s=0.1)) as stage:
        stage.mock.script("sync_429_burst")
        refused = await stage.post(ask())
        assert (await look_up(stage, refused.headers["x-carpool-ticket"])).status_code == 410
        held = await stage.post(ask())
        assert stage.engine.stats.turned_away_calls == 1
        assert held.status_code == 429
        assert held.headers["x-carpool-lane"] == "now"
        assert "x-carpool-ticket" not in held.headers


async def test_others_do_not_find_it(stage_with: Any) -> None:
    async with stage_with() as stage:
        ticket = (await stage.post(ask("private"))).headers["x-carpool-ticket"]
        unknown = await look_up(stage, "0" * 13)
        for headers in ({"x-api-key": "another"}, {"x-api-key": ""}, {"authorization": "Bearer k2", "x-api-key": ""}):
            for method in ("GET", "DELETE"):
                foreign = await look_up(stage, ticket, method, **headers)
                assert (foreign.status_code, foreign.content) == (404, unknown.content)
        assert (await look_up(stage, ticket)).status_code == 410


def test_the_library_names_none_either() -> None:
    outcome = Outcome(OutcomeKind.ERRORED, 429, b"{}", 1.0, Lane.NOW)
    entry = Entry(7, -1, 1.0, Lane.NOW, EntryKind.PURCHASE, "anthropic", "c", "m")
    assert "x-carpool-ticket" in dict(carpool_headers(Reply(7, outcome, entry)))
    assert "x-carpool-ticket" not in dict(carpool_headers(Reply(7, outcome, replace(entry, purchase=UNSENT))))
    assert "x-carpool-ticket" not in dict(early_headers(None, Lane.NOW, "why"))
