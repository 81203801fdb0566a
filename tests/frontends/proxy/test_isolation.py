"""A second credential never meets anything of the first: not by asking, not by guessing, not by sending the same."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from carpool.core.model import ticket_text
from carpool.mock import Constant, MockConfig, serve
from tests.support.deep import quick_and_deep
from tests.support.key_holders import HOUSE, give, hosting
from tests.support.stage import Stage, ask

BATCH = {"x-carpool-budget": "30m"}
LATER = BATCH | {"prefer": "respond-async"}
PAIRS = ["two passed keys", "passed and virtual", "virtual and passed", "two virtual keys", "two virtual forms"]
WALKED = {"healthz", "readyz", "stats", "calls", "batches", "tasks", "events"}
UNKNOWN = ticket_text(1234567890123456789 >> 2)
SECRET_TAG = "canary"

both = pytest.mark.parametrize("pair", PAIRS)
TEXTS = ["answered", "at once", "keyed", "later", "waiting"]
EQUAL = list(itertools.product(PAIRS, TEXTS))
Headers = dict[str, str]


@dataclass
class Scene:
    stage: Stage
    first: Headers
    second: Headers
    traces: set[str] = field(default_factory=set)  # of the first, wherever they may turn up

    async def send(self, who: Headers, text: str, **headers: str) -> httpx2.Response:
        answer = await self.stage.http.post(self.stage.url + "/v1/messages", json=ask(text), headers=who | headers)
        if who is self.first:
            self.traces.add(answer.headers["x-carpool-ticket"])
            self.traces |= {
                answer.headers[name] for name in ("x-carpool-batch", "request-id") if name in answer.headers
            }
        return answer

    async def get(self, who: Headers, path: str, method: str = "GET") -> httpx2.Response:
        return await self.stage.http.request(method, self.stage.url + path, headers=who)

    def clean(self, text: str) -> None:
        found = sorted(trace for trace in self.traces | {SECRET_TAG} if trace in text)
        assert not found, found


@asynccontextmanager
async def scene(pair: str, latency: float = 0.05) -> AsyncIterator[Scene]:
    config = MockConfig(batch_latency=Constant(latency))
    async with hosting(config) as stage:
        base = {"anthropic-version": "2023-06-01"}
        virtual = [base | {"x-api-key": await give(stage, name)} for name in ("one", "two") if "virtual" in pair]
        passed = [base | {"x-api-key": key} for key in (HOUSE, "sk-ant-other")]
        first, second = {
            "two passed keys": passed,
            "passed and virtual": [passed[0], *virtual[:1]],
            "virtual and passed": [*virtual[:1], passed[0]],
            "two virtual keys": virtual,
            "two virtual forms": [
                *virtual[:1],
                base | {"authorization": f"Bearer {(virtual or passed)[-1]['x-api-key']}"},
            ],
        }[pair]
        yield Scene(stage, dict(first), dict(second))


async def lived_in(one: Scene) -> list[str]:
    """The first has calls of every sort: waiting, answered, collected, bought on `now`. Their tickets."""
    tags = {"x-carpool-tags": f"team={SECRET_TAG}"}
    answered = await one.send(one.first, "answered", **BATCH, **tags)
    at_once = await one.send(one.first, "at once", **tags)
    keyed = await one.send(one.first, "keyed", **BATCH, **tags, **{"x-carpool-key": "the-key"})
    later = await one.send(one.first, "later", **LATER, **tags)
    waiting = await one.send(one.first, "waiting", **{"prefer": "respond-async", "x-carpool-lane": "batch"}, **tags)
    answers = [answered, at_once, keyed, later, waiting]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 202, 202]
    batches = await one.stage.engine.overview.batches(None, None, 99)
    one.traces |= {batch.provider_id for batch in batches if batch.provider_id}
    one.traces |= {batch.key.credential[:8] for batch in batches}
    return [answer.headers["x-carpool-ticket"] for answer in answers]


# ------------------------------------------------------------ by asking


@both
async def test_a_foreign_ticket_answers_exactly_like_an_unknown_one(pair: str) -> None:
    async with scene(pair, latency=0.3) as one:
        tickets = await lived_in(one)
        for verb, suffix in [
            *(("GET", ""), ("GET", "?wait=1s"), ("HEAD", ""), ("DELETE", ""), ("POST", "/cancel"), ("POST", "")),
            *(("PUT", ""), ("GET", "/cancel"), ("GET", "/"), ("PATCH", "/x")),
        ]:
            unknown = await one.get(one.second, f"/carpool/calls/{UNKNOWN}{suffix}", verb)
            assert unknown.status_code == 404
            for ticket in tickets:
                foreign = await one.get(one.second, f"/carpool/calls/{ticket}{suffix}", verb)
                assert (foreign.status_code, foreign.content) == (unknown.status_code, unknown.content)
                assert foreign.headers == unknown.headers
        mine = await one.get(one.first, f"/carpool/calls/{tickets[3]}?wait=10s")
        assert mine.status_code == 200  # and nothing of that ended it


@both
async def test_every_page_shows_each_its_own(pair: str) -> None:
    async with scene(pair) as one:
        await lived_in(one)
        routes = set(one.stage.proxy._admin._routes)
        assert routes == WALKED, "A new page: say here what a second credential may see of it."
        for page in sorted(WALKED - {"events"}):
            for query in ("", "?limit=1000", "?state=settled", "?state=open", "?state=queued"):
                answer = await one.get(one.second, f"/carpool/{page}{query}")
                assert answer.status_code in (200, 400)
                one.clean(answer.text)
        assert (await one.get(one.second, "/carpool/calls")).json() == {"calls": [], "next": None}
        assert (await one.get(one.second, "/carpool/batches")).json() == {"batches": [], "next": None}
        stats = (await one.get(one.second, "/carpool/stats")).json()
        assert stats == {"lanes": [], "money": {"paid_usd": 0, "saved_usd": 0, "would_have_paid_usd": 0}}
        own = (await one.get(one.first, "/carpool/calls")).json()["calls"]
        assert {row["tags"]["team"] for row in own} == {SECRET_TAG}
        assert len(own) == 4
        assert (await one.get(one.first, "/carpool/stats")).json()["money"]["paid_usd"] > 0


@both
async def test_events_are_told_to_their_own_only(pair: str) -> None:
    async with scene(pair) as one:
        heard: dict[str, str] = {"first": "", "second": ""}

        async def listen(name: str, who: Headers) -> None:
            url = one.stage.url + "/carpool/events"
            async with one.stage.http.stream("GET", url, headers=who) as stream:
                async for text in stream.aiter_text():
                    heard[name] += text

        listeners = [
            asyncio.create_task(listen(name, who)) for name, who in (("first", one.first), ("second", one.second))
        ]
        await one.stage.until(lambda: all(heard.values()))
        await lived_in(one)
        mine = await one.send(one.second, "my own", **BATCH)
        await one.stage.until(lambda: mine.headers["x-carpool-ticket"] in heard["second"])
        await one.stage.until(lambda: "BatchCollected" in heard["second"] and "BatchCollected" in heard["first"])
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)
        one.clean(heard["second"])
        assert mine.headers["x-carpool-ticket"] not in heard["first"]
        assert all(name in heard["first"] for name in ("CallAdmitted", "CallSettled", "BatchSubmitted", "BatchEnded"))


async def test_whoever_leaves_the_key_out_sees_nothing_more_once_there_are_virtual_keys() -> None:
    async with scene("two virtual keys") as one:
        await lived_in(one)
        for page in sorted(WALKED - {"healthz", "readyz"}):
            answer = await one.get({}, f"/carpool/{page}")
            assert answer.status_code == 401
            one.clean(answer.text)
        wrong = await one.get({"x-api-key": "cpk-" + "x" * 43}, "/carpool/calls")
        assert wrong.status_code == 401


async def test_the_admin_token_shows_everything_and_a_key_beside_it_its_own() -> None:
    async with hosting(admin_token="the-token-of-the-house") as stage:
        key = await give(stage, "one")
        one = Scene(
            stage, {"x-api-key": key, "anthropic-version": "2023-06-01"}, {"x-api-key": await give(stage, "two")}
        )
        await lived_in(one)
        everything = await one.get({"x-carpool-admin": "the-token-of-the-house"}, "/carpool/calls")
        assert len(everything.json()["calls"]) == 4
        assert (await one.get(one.second, "/carpool/calls")).json()["calls"] == []
        assert (await one.get({"x-api-key": HOUSE}, "/carpool/calls")).status_code == 401
        assert (await one.get({"x-carpool-admin": "wrong"}, "/carpool/calls")).status_code == 401
        assert (await one.get({}, "/carpool/events")).status_code == 401


# ------------------------------------------------------------ by sending the same


@pytest.mark.parametrize(("pair", "text"), quick_and_deep(EQUAL, list(zip(PAIRS, TEXTS, strict=True))))
async def test_an_equal_call_is_a_call_of_its_own(pair: str, text: str) -> None:
    async with scene(pair) as one:
        await lived_in(one)
        charged = len(one.stage.mock.bill.charges)
        for headers in [
            BATCH,
            BATCH | {"x-stainless-retry-count": "1"},
            BATCH | {"x-carpool-key": "the-key"},
        ]:
            answer = await one.send(one.second, text, **headers)
            assert answer.status_code == 200
            one.clean(str(answer.headers))
        await one.stage.until(lambda: len(one.stage.mock.bill.charges) >= charged + 2)
        own = (await one.get(one.second, "/carpool/calls")).json()["calls"]
        assert own
        assert not {row["ticket"] for row in own} & one.traces


@both
async def test_what_a_client_left_behind_is_adopted_by_nobody_else(pair: str) -> None:
    async with scene(pair, latency=0.6) as one:
        with pytest.raises(httpx2.ReadTimeout):
            await one.stage.http.post(
                one.stage.url + "/v1/messages", json=ask("left"), headers=one.first | BATCH, timeout=0.3
            )
        await one.stage.until(lambda: not len(one.stage.engine._context.waiters))
        foreign = await one.send(one.second, "left", **BATCH)
        own = await one.send(one.first, "left", **BATCH)
        assert foreign.status_code == own.status_code == 200
        assert foreign.headers["x-carpool-ticket"] != own.headers["x-carpool-ticket"]
        assert foreign.headers["x-carpool-batch"] != own.headers["x-carpool-batch"]
        assert len(one.stage.mock.bill.charges) == 2
        assert one.stage.engine.stats.returned_calls == 1


@both
async def test_the_same_idempotency_key_means_nothing_to_another(pair: str) -> None:
    async with scene(pair) as one:
        key = {"x-carpool-key": "the-key"}
        assert (await one.send(one.first, "mine", **BATCH, **key)).status_code == 200
        other = await one.send(one.second, "something else", **BATCH, **key)  # no conflict to learn from
        assert other.status_code == 200
        own = await one.stage.http.post(
            one.stage.url + "/v1/messages", json=ask("something else"), headers=one.first | BATCH | key
        )
        assert own.status_code == 409


@both
async def test_no_batch_holds_calls_of_two(pair: str) -> None:
    async with scene(pair) as one:
        calls = [one.send(who, f"call {number}", **BATCH) for number in range(6) for who in (one.first, one.second)]
        answers = await asyncio.gather(*calls)
        batches = {
            name: {answer.headers["x-carpool-batch"] for answer in answers[place::2]}
            for place, name in ((0, "a"), (1, "b"))
        }
        assert not batches["a"] & batches["b"]


@pytest.mark.parametrize(
    "header",
    [
        {"anthropic-version": "2026-10-21"},
        {"anthropic-beta": "context-1m-2025-08-07"},
        {"anthropic-workspace-id": "wrkspc_other"},
        {"anthropic-user-profile-id": "user_other"},
    ],
)
async def test_what_changes_the_answer_keeps_calls_apart(header: Headers) -> None:
    async with scene("two virtual keys") as one:
        plain, other = await asyncio.gather(
            one.send(one.first, "x", **BATCH), one.send(one.first | header, "x", **BATCH)
        )
        assert plain.status_code == other.status_code == 200
        assert plain.headers["x-carpool-batch"] != other.headers["x-carpool-batch"]


# ------------------------------------------------------------ one key in two headers is nobody else


FORMS = [
    ("x-api-key", "authorization"),
    ("authorization", "x-api-key"),
    ("authorization", "both"),
    ("both", "x-api-key"),
]


def carrying(form: str, key: str) -> Headers:
    headers = {"x-api-key": key, "authorization": f"Bearer {key}"}
    return {"anthropic-version": "2023-06-01"} | {name: headers[name] for name in headers if form in (name, "both")}


@asynccontextmanager
async def two_forms(whose: str, forms: tuple[str, str], latency: float = 0.2) -> AsyncIterator[Scene]:
    async with hosting(MockConfig(batch_latency=Constant(latency), keys=frozenset({HOUSE}))) as stage:
        key = HOUSE if whose == "passed" else await give(stage, "one")
        yield Scene(stage, *(carrying(form, key) for form in forms))


in_both = pytest.mark.parametrize("whose", ["passed", "virtual"])


@in_both
@pytest.mark.parametrize("forms", FORMS)
async def test_a_ticket_is_found_with_the_same_key_in_another_header(whose: str, forms: tuple[str, str]) -> None:
    async with two_forms(whose, forms) as one:
        accepted = await one.send(one.first, "later", **LATER)
        ticket = accepted.headers["x-carpool-ticket"]
        answer = await one.get(one.second, f"/carpool/calls/{ticket}?wait=10s")
        assert answer.status_code == 200
        assert [row["ticket"] for row in (await one.get(one.second, "/carpool/calls")).json()["calls"]] == [ticket]
        await one.stage.until(lambda: one.stage.engine.stats.batches_collected)
        [batch] = (await one.get(one.second, "/carpool/batches")).json()["batches"]
        [row] = (await one.get(one.first, "/carpool/calls")).json()["calls"]
        assert batch["credential"] == row["credential"]
        paid = [(await one.get(who, "/carpool/stats")).json()["money"]["paid_usd"] for who in (one.first, one.second)]
        assert paid[0] == paid[1] > 0
        for form in ("x-api-key", "authorization", "both"):
            foreign = await one.get(carrying(form, "sk-ant-other"), f"/carpool/calls/{ticket}")
            assert foreign.status_code == 404


@in_both
@pytest.mark.parametrize("forms", FORMS)
async def test_a_call_is_found_again_with_the_same_key_in_another_header(whose: str, forms: tuple[str, str]) -> None:
    async with two_forms(whose, forms, latency=0.6) as one:
        with pytest.raises(httpx2.ReadTimeout):
            await one.stage.http.post(
                one.stage.url + "/v1/messages", json=ask("left"), headers=one.first | BATCH, timeout=0.3
            )
        await one.stage.until(lambda: not len(one.stage.engine._context.waiters))
        assert (await one.send(one.second, "left", **BATCH)).status_code == 200
        keyed = {"x-carpool-key": "the-key"}
        first, second = [await one.send(who, "keyed", **BATCH, **keyed) for who in (one.first, one.second)]
        assert first.headers["x-carpool-ticket"] == second.headers["x-carpool-ticket"]
        assert (await one.send(one.second, "other", **BATCH, **keyed)).status_code == 409
        assert len(one.stage.mock.bill.charges) == 2
        assert one.stage.engine.stats.returned_calls == 2


async def test_the_header_decides_what_goes_into_one_batch() -> None:
    async with two_forms("passed", ("x-api-key", "authorization")) as one:
        calls = [one.send(who, f"call {number}", **BATCH) for number in range(3) for who in (one.first, one.second)]
        answers = await asyncio.gather(*calls)
        batches = [{answer.headers["x-carpool-batch"] for answer in answers[place::2]} for place in (0, 1)]
        assert not batches[0] & batches[1]
        assert len(one.stage.engine._api._quotas) == 1  # and both are one account's


async def test_calls_of_a_virtual_key_travel_together_whatever_header_it_comes_in() -> None:
    async with two_forms("virtual", ("x-api-key", "authorization")) as one:
        calls = [one.send(who, f"call {number}", **BATCH) for number in range(3) for who in (one.first, one.second)]
        answers = await asyncio.gather(*calls)
        assert len({answer.headers["x-carpool-batch"] for answer in answers}) == 1
        newer = await one.send(one.second | {"anthropic-version": "2026-10-21"}, "call 0", **BATCH)
        assert newer.headers["x-carpool-batch"] != answers[0].headers["x-carpool-batch"]


@pytest.mark.parametrize(
    "pair", [("sk-1", "sk-2"), ("sk-1", "Bearer sk-1"), ("Bearer sk-1", "sk-1"), ("sk-1", "sk-1 x")]
)
async def test_two_keys_in_two_headers_are_neither_of_them(pair: tuple[str, str]) -> None:
    async with hosting() as stage:
        base = {"anthropic-version": "2023-06-01"}
        both = base | {"x-api-key": pair[0], "authorization": f"Bearer {pair[1]}"}
        one = Scene(stage, both, {})
        ticket = (await one.send(both, "later", **LATER)).headers["x-carpool-ticket"]
        assert (await one.get(both, f"/carpool/calls/{ticket}?wait=10s")).status_code == 200
        for key in pair:
            for form in ("x-api-key", "authorization", "both"):
                assert (await one.get(carrying(form, key), f"/carpool/calls/{ticket}")).status_code == 404


async def test_a_batch_goes_on_with_whichever_header_brings_its_key(tmp_path: Path) -> None:
    """The process that bought it is gone, and its successor sees the key in the other header only."""
    config = MockConfig(batch_latency=Constant(1.0), keys=frozenset({HOUSE}))
    async with serve(config) as mock:
        async with hosting(config, store=tmp_path / "s.db", beside=mock) as stage:
            one = Scene(stage, carrying("authorization", HOUSE), {})
            ticket = (await one.send(one.first, "later", **LATER)).headers["x-carpool-ticket"]
            await stage.until(lambda: stage.engine.stats.batches_submitted)
        async with hosting(config, store=tmp_path / "s.db", beside=mock) as stage:
            one = Scene(stage, carrying("x-api-key", HOUSE), {})
            assert (await one.get(one.first, f"/carpool/calls/{ticket}?wait=20s")).status_code == 200
            assert len(stage.mock.bill.charges) == 1
