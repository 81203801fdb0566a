"""Virtual keys over HTTP: what they buy with never shows, and what they may is decided by the house."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carpool.core.keys import Profile, new_key, revoked, rotated
from carpool.core.model import Lane
from carpool.engine.virtual_keys import KEYS_POLL_S
from carpool.mock import Constant, MockConfig, expected_text
from tests.support.key_holders import HOUSE, give, hosting
from tests.support.stage import ask

BATCH = {"x-carpool-budget": "30m"}


def upstream_keys(stage: Any) -> set[str]:
    """Every key that the provider was sent."""
    return {credential for _, credential in stage.mock.requests_seen.as_dict()}


async def get(stage: Any, path: str, key: str, method: str = "GET", **headers: str) -> Any:
    sent = {"x-api-key": key, "anthropic-version": "2023-06-01"} | headers
    return await stage.http.request(method, stage.url + path, headers=sent)


def said(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["message"]


async def at_last(stage: Any, key: str) -> Any:
    """The first answer that is a refusal."""
    async with asyncio.timeout(20):
        while True:
            answer = await stage.post(ask(), **{"x-api-key": key})
            if answer.status_code != 200:
                return answer
            await asyncio.sleep(0.05)


# ------------------------------------------------------------ buying


@pytest.mark.parametrize("form", ["x-api-key", "authorization"])
@pytest.mark.parametrize("way", [{}, BATCH])
async def test_a_key_buys_with_that_of_the_house(form: str, way: dict[str, str]) -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.1), keys=frozenset({HOUSE}))) as stage:
        key = await give(stage, "ci")
        sent = {"anthropic-version": "2023-06-01", form: key if form == "x-api-key" else f"Bearer {key}"}
        answer = await stage.http.post(stage.url + "/v1/messages", json=ask("mine"), headers=sent | way)
        assert answer.status_code == 200
        assert answer.json()["content"][0]["text"] == expected_text(ask("mine"))
        assert upstream_keys(stage) == {HOUSE}
        assert key not in str(answer.headers) + answer.text


async def test_the_sdk_works_with_a_virtual_key() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.1), keys=frozenset({HOUSE}))) as stage:
        key = await give(stage, "ci")
        async with stage.client("/@budget=30m", api_key=key) as client:
            answer = await client.messages.create(**ask("sdk"))
        async with stage.client(api_key=key) as client, client.messages.stream(**ask("stream")) as stream:
            streamed = await stream.get_final_message()
        assert answer.content[0].text == expected_text(ask("sdk"))
        assert streamed.content[0].text == expected_text(ask("stream"))


async def test_what_is_not_understood_passes_with_the_key_of_the_house() -> None:
    async with hosting(MockConfig(keys=frozenset({HOUSE}))) as stage:
        key, whole = await give(stage, "ci"), await give(stage, "whole", Profile(whole_account=True))
        counted = await stage.post(ask(), path="/v1/messages/count_tokens", **{"x-api-key": key})
        assert counted.json()["input_tokens"] > 0
        assert (await get(stage, "/v1/models", key)).status_code == 200
        assert (await get(stage, "/v1/messages/batches", whole)).json()["data"] == []
        assert (await get(stage, "/v1/unheard/of", whole)).status_code == 404
        assert upstream_keys(stage) == {HOUSE}


async def test_whatever_shows_the_whole_account_is_shut() -> None:
    async with hosting() as stage:
        key = await give(stage, "ci")
        paths = ["/v1/messages/batches", "/v1/messages/batches/msgbatch_1/results", "/v1/files", "/v1/models/../files"]
        paths += [
            "/v1//messages/batches",
            "/v1/%6dessages/batches",
            "/v1/organizations/me",
            "/V1/files",
            "/v2/anything",
        ]
        for path in paths:
            for method in ("GET", "POST", "DELETE"):
                status, kind, message = said(await get(stage, path, key, method))
                assert (status, kind) == (403, "permission_error")
                assert "--whole-account" in message
        assert said(await get(stage, "/v1/models/claude-x", key, "DELETE"))[0] == 403
        assert upstream_keys(stage) == set()


# ------------------------------------------------------------ who comes in


async def test_keys_that_are_not_good_are_refused_in_a_sentence() -> None:
    async with hosting() as stage:
        now, store = stage.engine._context.now(), stage.engine._context.store
        expired = await give(stage, "old", expires_at=now - 1)
        gone = await give(stage, "gone")
        [key] = [key for key in (await store.keys())[1] if key.name == "gone"]
        await store.write_keys(revoked([key], "gone", now))
        await stage.engine.virtual_key_cache._read()
        for secret, why in [
            ("cpk-" + "x" * 43, "does not know this virtual key"),
            ("cpk-", "does not know this virtual key"),
            (expired, "The virtual key old has expired."),
            (gone, "The virtual key gone was revoked."),
        ]:
            status, kind, message = said(await stage.post(ask(), **{"x-api-key": secret}))
            assert (status, kind) == (401, "authentication_error")
            assert why in message
            assert secret not in message or secret == "cpk-"
        assert upstream_keys(stage) == set()


async def test_a_key_that_expires_is_refused_although_its_greeting_is_known() -> None:
    async with hosting() as stage:
        key = await give(stage, "brief", expires_at=stage.engine._context.now() + 0.5)
        assert (await stage.post(ask(), **{"x-api-key": key})).status_code == 200
        status, kind, message = said(await at_last(stage, key))
        assert (status, kind) == (401, "authentication_error")
        assert "has expired" in message


async def test_another_process_may_add_and_revoke(tmp_path: Path) -> None:
    """Nobody tells the proxy: it looks."""
    async with hosting(store=tmp_path / "carpool.db") as stage:
        store, now = stage.engine._context.store, stage.engine._context.now
        key = await give(stage, "ci")
        assert (await stage.post(ask(), **{"x-api-key": key})).status_code == 200
        [standing] = (await store.keys())[1]
        await store.write_keys(revoked([standing], "ci", now()))
        assert "was revoked" in said(await at_last(stage, key))[2]
        assert KEYS_POLL_S <= 1


@pytest.mark.parametrize("way", [{}, BATCH])
async def test_a_new_key_works_at_once(way: dict[str, str]) -> None:
    """A script makes a key and uses it in the next line."""
    async with hosting(MockConfig(batch_latency=Constant(0.1))) as stage:
        stage.engine.virtual_key_cache.stop()  # no poll comes to help
        store, now = stage.engine._context.store, stage.engine._context.now()
        unknown = await stage.post(ask(), **{"x-api-key": "cpk-" + "x" * 43}, **way)
        key, secret = new_key(store.pepper, "ci", "anthropic", "HOUSE_KEY", now)
        await store.write_keys([key])
        answer = await stage.post(ask(), **{"x-api-key": secret}, **way)
        assert (unknown.status_code, answer.status_code) == (401, 200)


async def test_a_rotated_key_keeps_its_calls() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.3))) as stage:
        store, now = stage.engine._context.store, stage.engine._context.now
        old = await give(stage, "ci")
        keyed = BATCH | {"x-carpool-key": "once"}
        accepted = await stage.post(ask("mine"), **keyed, prefer="respond-async", **{"x-api-key": old})
        [standing] = (await store.keys())[1]
        changed, new = rotated([standing], "ci", now(), 0.0, store.pepper)
        await store.write_keys(changed)
        await stage.engine.virtual_key_cache._read()
        assert said(await stage.post(ask(), **{"x-api-key": old}))[0] == 401
        assert (await get(stage, accepted.headers["location"], old)).status_code == 401
        answer = await get(stage, accepted.headers["location"] + "?wait=10s", new)
        assert answer.json()["content"][0]["text"] == expected_text(ask("mine"))
        again = await stage.post(ask("mine"), **keyed, **{"x-api-key": new})
        assert again.content == answer.content
        assert len(stage.mock.bill.charges) == 1


async def test_a_virtual_key_elsewhere_does_not_leave_the_house() -> None:
    async with hosting() as stage:
        key = await give(stage, "ci")
        for headers, path in [
            ({"x-note": f"my key is {key}"}, "/v1/messages"),
            ({"cookie": key}, "/v1/messages"),
            ({}, f"/v1/messages?key={key}"),
            ({}, f"/v1/{key}/messages"),
        ]:
            status, _, message = said(await stage.post(ask(), path=path, **{"x-api-key": "k"}, **headers))
            assert status == 400
            assert "virtual key" in message
            assert key not in message
        both = {"x-api-key": key, "authorization": f"Bearer {await give(stage, 'other')}"}
        assert said(await stage.post(ask(), **both))[0] == 401
        assert upstream_keys(stage) == set()


async def test_a_second_key_beside_it_stays_in_the_house_too() -> None:
    """Some clients send one in each of both headers."""
    async with hosting() as stage:
        key = await give(stage, "ci")
        answer = await stage.post(ask(), **{"x-api-key": "sk-of-my-own", "authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        assert upstream_keys(stage) == {HOUSE}


async def test_a_key_whose_variable_is_not_set_says_so() -> None:
    async with hosting() as stage:
        key = await give(stage, "ci", env="NOWHERE_KEY")
        status, _, message = said(await stage.post(ask(), **{"x-api-key": key}))
        assert status == 503
        assert "NOWHERE_KEY, which is not set" in message
        listed = await get(stage, "/carpool/calls", key)
        assert listed.json()["calls"] == []
        elsewhere = await give(stage, "far", provider="unheard-of")
        assert said(await stage.post(ask(), **{"x-api-key": elsewhere}))[0] == 503


async def test_where_keys_are_required_nothing_else_is_taken() -> None:
    async with hosting(keys_required=True, keys={"anthropic": ("x-api-key", HOUSE)}) as stage:
        key = await give(stage, "ci")
        assert (await stage.post(ask(), **{"x-api-key": key})).status_code == 200
        status, kind, message = said(await stage.post(ask(), **{"x-api-key": "sk-ant-mine"}))
        assert (status, kind) == (401, "authentication_error")
        assert "virtual keys only" in message
        none = await stage.http.post(
            stage.url + "/v1/messages", json=ask(), headers={"anthropic-version": "2023-06-01"}
        )
        assert none.status_code == 401
        assert (await get(stage, "/v1/models", "sk-ant-mine")).status_code == 401
        assert (await stage.http.get(stage.url + "/carpool/healthz")).status_code == 200
        assert upstream_keys(stage) == {HOUSE}


async def test_a_key_may_come_back_in_another_header() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.1))) as stage:
        key = await give(stage, "ci")
        accepted = await stage.post(ask("mine"), **BATCH, prefer="respond-async", **{"x-api-key": key})
        bearer = {"authorization": f"Bearer {key}"}
        answer = await stage.http.get(stage.url + accepted.headers["location"] + "?wait=10s", headers=bearer)
        assert answer.json()["content"][0]["text"] == expected_text(ask("mine"))
        listed = await stage.http.get(stage.url + "/carpool/calls", headers=bearer)
        assert len(listed.json()["calls"]) == 1


# ------------------------------------------------------------ what they may


async def test_the_profile_holds() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.1))) as stage:
        profile = Profile(max_budget=3600.0, tags={"team": "ci"}, budget=1800.0)
        key = {"x-api-key": await give(stage, "ci", profile)}
        unasked = await stage.post(ask("unasked"), **key)
        assert unasked.headers["x-carpool-lane"] == "batch"
        assert "The key ci gives a budget" in unasked.headers["x-carpool-reason"]
        greedy = await stage.post(ask("g"), **key, **{"x-carpool-budget": "9h", "x-carpool-tags": "team=boss,job=7"})
        assert "at most 60 min" in greedy.headers["x-carpool-reason"]
        rows = (await get(stage, "/carpool/calls", key["x-api-key"])).json()["calls"]
        assert rows[0]["tags"] == {"team": "ci", "job": "7"}
        assert rows[0]["deadline"] - rows[0]["arrived"] == pytest.approx(3600)
        status, kind, _ = said(await stage.post(ask(), **key, **{"x-carpool-provider": "openai"}))
        assert (status, kind) == (403, "permission_error")
        assert said(await stage.post(ask(), path="/@provider=openai/v1/messages", **key))[0] == 403


async def test_a_key_for_batches_buys_nothing_on_now() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.1))) as stage:
        key = {"x-api-key": await give(stage, "night", Profile(lanes=(Lane.BATCH,)))}
        assert (await stage.post(ask("slow"), **key)).headers["x-carpool-lane"] == "batch"
        assert said(await stage.post(ask(), **key, **{"x-carpool-lane": "now"}))[0] == 403
        unreadable = await stage.http.post(
            stage.url + "/v1/messages", content=b"{", headers=key | {"anthropic-version": "2023-06-01"}
        )
        assert unreadable.status_code == 400
        assert said(await stage.post(ask(), path="/v1/complete", **key))[0] == 403
        assert (await stage.post(ask(), path="/v1/messages/count_tokens", **key)).status_code == 200
        assert not [one for one in stage.mock.bill.charges if one.kind != "batch"]


async def test_a_key_for_now_buys_no_batches() -> None:
    async with hosting() as stage:
        key = {"x-api-key": await give(stage, "quick", Profile(lanes=(Lane.NOW,)))}
        assert (await stage.post(ask(), **key, **BATCH)).headers["x-carpool-lane"] == "now"
        assert said(await stage.post(ask(), **key, **{"x-carpool-lane": "batch"}))[0] == 403
        assert not stage.mock.batches


async def test_who_pays_is_not_the_clients_to_say() -> None:
    async with hosting() as stage:
        key = {"x-api-key": await give(stage, "ci")}
        assert said(await stage.post(ask(), **key, **{"openai-organization": "org-of-others"}))[0] == 403


# ------------------------------------------------------------ books and roads


async def test_the_last_use_is_written() -> None:
    async with hosting() as stage:
        store, key = stage.engine._context.store, await give(stage, "ci")
        [before] = (await store.keys())[1]
        await stage.post(ask(), **{"x-api-key": key})
        await stage.engine.virtual_key_cache._write_uses()
        [after] = (await store.keys())[1]
        assert after.last_used == pytest.approx(stage.engine._context.now(), abs=5)
        assert replace(after, last_used=None) == before


async def test_no_call_reads_the_keys_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosting() as stage:
        key = await give(stage, "ci")
        stage.engine.virtual_key_cache.stop()
        store, reads = stage.engine._context.store, []
        monkeypatch.setattr(store, "keys", lambda *known: reads.append(known))
        for number in range(5):
            await stage.post(ask(str(number)), **{"x-api-key": key})
        assert reads == []


async def test_keys_of_one_account_share_its_road_and_its_looks() -> None:
    async with hosting(MockConfig(batch_latency=Constant(0.3))) as stage:
        one, two = await give(stage, "one"), await give(stage, "two")
        other = await give(stage, "other", env="OTHER_KEY")
        sent = [stage.post(ask("x"), **BATCH, **{"x-api-key": key}) for key in (one, two, other)]
        assert {answer.status_code for answer in await asyncio.gather(*sent)} == {200}
        assert len(stage.mock.batches) == 3  # never in one batch
        assert len(stage.engine._api._quotas) == 2


async def test_what_the_provider_denies_one_of_an_account_is_believed_for_all() -> None:
    async with hosting(MockConfig(keys=frozenset({"nobody"}))) as stage:
        one, two = {"x-api-key": await give(stage, "one")}, {"x-api-key": await give(stage, "two")}
        other = {"x-api-key": await give(stage, "other", env="OTHER_KEY")}
        assert (await stage.post(ask("x"), **BATCH, **one)).status_code == 401
        creates = stage.mock.requests_seen.count("create")
        assert creates == 1
        second = await stage.post(ask("x"), **BATCH, **two)
        assert second.headers["x-carpool-lane"] == "now"
        assert "can't batch" in second.headers["x-carpool-reason"]
        assert stage.mock.requests_seen.count("create") == creates
        await stage.post(ask("x"), **BATCH, **other)
        assert stage.mock.requests_seen.count("create") == creates + 1


async def test_a_create_of_unknown_fate_is_not_taken_for_that_of_a_neighbour() -> None:
    """Both buy one call at the same time and see each other's batch in the account's list; the create of one went
    unanswered."""
    async with hosting(MockConfig(batch_latency=Constant(0.3))) as stage:
        one, two = {"x-api-key": await give(stage, "one")}, {"x-api-key": await give(stage, "two")}
        stage.mock.script("create_accepted_cut")
        answers = await asyncio.gather(
            *(stage.post(ask(name), **BATCH, **key) for name, key in (("1", one), ("2", two)))
        )
        assert [answer.json()["content"][0]["text"] for answer in answers] == [
            expected_text(ask("1")),
            expected_text(ask("2")),
        ]
        assert len({answer.headers["x-carpool-batch"] for answer in answers}) == 2
        assert len(stage.mock.bill.charges) == 2
        assert stage.mock.faults_struck == {"create_accepted_cut": 1}
