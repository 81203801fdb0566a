"""The token that opens carpool's own pages, and what opens without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.stage import ask

TOKEN = "the-admins-own-token-0123456789"
CLOSED = ("stats", "calls", "batches", "events", "nowhere", "metrics", "ledger", "", "calls?state=settled")
WRONG = (
    {},
    {"x-carpool-admin": ""},
    {"x-carpool-admin": TOKEN[:-1]},
    {"x-carpool-admin": TOKEN + "0"},
    {"x-carpool-admin": TOKEN.upper()},
    {"authorization": TOKEN},
    {"authorization": "Bearer"},
    {"authorization": f"Basic {TOKEN}"},
    {"authorization": f"Bearer {TOKEN[:10]}"},
    {"x-api-key": TOKEN},
)


async def read(stage: Any, page: str, headers: dict[str, str]) -> Any:
    return await stage.http.get(f"{stage.url}/carpool/{page}", headers=headers)


async def test_pages_open_to_the_whole_token_only(stage_with: Any) -> None:
    async with stage_with(admin_token=TOKEN) as stage:
        for page in CLOSED:
            for headers in WRONG:
                answer = await read(stage, page, headers)
                assert answer.status_code == 401, (page, headers)
                assert answer.json()["error"]["type"] == "authentication_error"
                assert answer.headers["www-authenticate"].startswith("Bearer")
                assert TOKEN not in answer.text
        for headers in (
            {"authorization": f"Bearer {TOKEN}"},
            {"authorization": f"bearer {TOKEN}"},
            {"x-carpool-admin": TOKEN},
        ):
            for page in ("stats", "calls", "batches"):
                assert (await read(stage, page, headers)).status_code == 200
            assert (await read(stage, "nowhere", headers)).status_code == 404


@pytest.mark.parametrize("front", ["/@budget=1m", "/@provider=anthropic"])
async def test_no_path_leads_around_it(stage_with: Any, front: str) -> None:
    async with stage_with(admin_token=TOKEN) as stage:
        assert (await stage.http.get(f"{stage.url}{front}/carpool/stats")).status_code == 401
        assert (await stage.http.post(f"{stage.url}/carpool/stats")).status_code == 401


async def test_whether_it_lives_is_told_to_all(stage_with: Any) -> None:
    async with stage_with(admin_token=TOKEN) as stage:
        assert (await read(stage, "healthz", {})).json() == {"status": "ok"}
        assert (await read(stage, "readyz", {})).json() == {"ready": True, "reasons": []}


async def test_without_a_token_they_are_open(stage_with: Any) -> None:
    async with stage_with() as stage:
        assert (await read(stage, "stats", {})).status_code == 200


async def test_a_clients_own_key_opens_its_own_call(stage_with: Any) -> None:
    async with stage_with(admin_token=TOKEN) as stage:
        accepted = await stage.post(ask("later"), x_carpool_budget="30m", prefer="respond-async")
        place = accepted.headers["location"].removeprefix("/carpool/")
        assert (await read(stage, f"{place}?wait=10s", {"x-api-key": "k"})).status_code == 200
        for headers in ({}, {"x-api-key": "other"}):
            assert (await read(stage, place, headers)).status_code == 404


async def test_the_token_does_not_reach_the_provider(stage_with: Any) -> None:
    async with stage_with(admin_token=TOKEN) as stage:
        answer = await stage.post(ask(), x_carpool_admin=TOKEN)
        assert answer.status_code == 400
        assert TOKEN not in answer.text
        assert stage.mock.bill.total() == 0
