"""A new dialect is one folder and one registration: with them alone, proxy, library and `--check` serve its calls.

The folder is `tests/support/toy`; the registration is the fixture below. `test_dialect.py` runs the contract of all
dialects over it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx2
import pytest

import carpool
from carpool import cli, dialects
from carpool.core.errors import ConfigError
from carpool.core.keys import header_forms, new_key
from carpool.core.model import Usage, ticket_number
from carpool.planners.access.read_rules import read_rules
from tests.support.fleets import QUICK, soon
from tests.support.sockets import proxied
from tests.support.toy import ENDPOINT, TOY
from tests.support.toy.standin import said, serve_toy

BODY = {"model": "toy-1", "text": "hello"}
KEY = {"x-toy-key": "k"}
BATCH = {"x-carpool-lane": "batch"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dialects._REGISTERED, TOY.name, TOY)


def providers(url: str) -> dict[str, tuple[str, str]]:
    """The toy among others: nothing but the request tells whose it is."""
    nowhere = "http://127.0.0.1:9"
    return {"toy": ("toy", url), "anthropic": ("anthropic", nowhere), "openai": ("openai", f"{nowhere}/v1")}


@pytest.mark.parametrize("lane", ["now", "batch"])
async def test_the_proxy_serves_it(lane: str) -> None:
    async with serve_toy() as (url, provider), proxied(providers(url), policy=QUICK) as house, client() as http:
        sent = await http.post(house.url + ENDPOINT, json=BODY, headers={**KEY, "x-carpool-lane": lane})
        assert (sent.status_code, sent.json()) == (200, said(BODY))
        assert sent.headers["x-carpool-lane"] == lane
        assert (len(provider.calls), len(provider.jobs)) == ((1, 0) if lane == "now" else (0, 1))
        assert provider.keys == {"k"}
        (entry,) = await house.engine._context.store.entries(ticket_number(sent.headers["x-carpool-ticket"]))
        assert entry.usage == Usage(5, 3)


async def test_calls_ride_together_through_the_proxy_and_stream_when_they_are_back() -> None:
    async with serve_toy() as (url, provider), proxied(providers(url), policy=QUICK) as house, client() as http:
        bodies = [BODY | {"text": f"number {number}", "stream": bool(number % 2)} for number in range(4)]
        answers = await asyncio.gather(
            *(http.post(house.url + ENDPOINT, json=body, headers=KEY | BATCH) for body in bodies)
        )
        for body, answer in zip(bodies, answers, strict=True):
            expected = said(body)
            if body["stream"]:
                assert json.dumps(expected["said"]) in answer.text
            else:
                assert answer.json() == expected
        assert [job["count"] for job in provider.jobs.values()] == [4]


async def test_an_error_of_carpool_is_one_of_the_dialect() -> None:
    async with serve_toy() as (url, _), proxied(providers(url)) as house, client() as http:
        refused = await http.post(house.url + ENDPOINT, json={"text": "hello"}, headers=KEY | BATCH)
        assert (refused.status_code, list(refused.json())) == (400, ["fault"])


async def test_its_key_header_carries_a_virtual_key_and_stays_secret() -> None:
    async with serve_toy() as (url, provider), proxied(providers(url), policy=QUICK) as house, client() as http:
        store, virtual_keys = house.engine._context.store, house.engine.virtual_key_cache
        key, secret = new_key(store.pepper, "ci", "toy", "TOY_KEY", house.engine._context.now())
        await store.write_keys([key])
        await virtual_keys.open(lambda provider, variable: header_forms(TOY.key_headers, "of-the-house"))
        sent = await http.post(house.url + ENDPOINT, json=BODY, headers={"x-toy-key": secret} | BATCH)
        assert (sent.status_code, sent.json(), provider.keys) == (200, said(BODY), {"of-the-house"})
        models = await http.get(f"{house.url}/@provider=toy{TOY.models_path}", headers={"x-toy-key": secret})
        assert models.status_code not in (401, 403)  # open to all holders of a key
    with pytest.raises(ConfigError, match="holds a secret"):
        read_rules([{"match": {"header.x-toy-key": "*"}, "lane": "batch"}], "rules")


async def test_its_prices_are_those_that_it_names() -> None:
    async with serve_toy() as (url, _), proxied(providers(url), policy=QUICK) as house, client() as http:
        for model, paid in (("toy-free-1", 0), ("toy-1", None)):
            sent = await http.post(house.url + ENDPOINT, json=BODY | {"model": model}, headers=KEY | BATCH)
            (entry,) = await house.engine._context.store.entries(ticket_number(sent.headers["x-carpool-ticket"]))
            assert (entry.paid, entry.would_have_paid) == (paid, paid)


async def test_its_models_take_the_lanes_that_it_lists() -> None:
    async with serve_toy() as (url, provider), proxied(providers(url), policy=QUICK) as house, client() as http:
        refused = await http.post(house.url + ENDPOINT, json=BODY | {"model": "toy-live-1"}, headers=KEY | BATCH)
        assert (refused.status_code, provider.jobs) == (400, {})
        assert "toy-live-1 is not offered on the lane batch" in refused.json()["fault"]


@pytest.mark.parametrize("lane", ["now", "batch"])
async def test_the_library_serves_it(lane: str) -> None:
    async with serve_toy() as (url, provider):
        transport = carpool.transport(policy=QUICK, lane=lane, close_timeout=0.0)
        async with httpx2.AsyncClient(transport=transport, timeout=20) as http:
            answer = await soon(http.post(url + ENDPOINT, json=BODY, headers=KEY))
            assert (answer.status_code, answer.json()) == (200, said(BODY))
            assert transport.stats.batched_calls == len(provider.jobs) == (lane == "batch")
            assert len(provider.calls) == (lane == "now")


@pytest.mark.parametrize("asked", [{"path": ENDPOINT, "headers": KEY, "body": BODY}, BODY], ids=["request", "body"])
def test_check_explains_it(
    asked: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("carpool.yaml").write_text(
        "providers:\n  anthropic: {}\n  toy: {base_url: 'http://127.0.0.1:9'}\n"
        "routing: {rules: [{match: {dialect: toy}, lane: batch}]}\n"
    )
    Path("request.json").write_text(json.dumps(asked))
    arguments = ["carpool", "serve", "--check", "--port", "0", "--json", "--config", "carpool.yaml", "request.json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    document = json.loads(capsys.readouterr().out)
    assert (ended.value.code or 0, document["ok"]) == (0, True), document
    assert (document["request"]["provider"], document["request"]["lane"]) == ("toy", "batch")


def client() -> httpx2.AsyncClient:
    return httpx2.AsyncClient(timeout=20)
