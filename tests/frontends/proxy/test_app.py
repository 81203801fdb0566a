"""What is not a call: other paths, other hosts, carpool's own pages."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.stage import staged

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Any]:
    async with staged() as one:
        yield one


async def test_other_endpoints_pass_through(stage: Any, body: Any) -> None:
    async with stage.client() as through:
        models = [model.id async for model in through.models.list()]
        counted = await through.messages.count_tokens(model="claude-haiku-4-5", messages=body()["messages"])
    assert "claude-haiku-4-5" in models
    assert counted.input_tokens > 0


async def test_options_in_the_path_do_not_reach_the_provider(stage: Any) -> None:
    async with stage.client("/@budget=30m") as through:
        assert [model.id async for model in through.models.list()]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/nothing?a=b"), ("HEAD", "/"), ("DELETE", "/v1/models")])
async def test_unknown_paths_are_the_providers_to_answer(stage: Any, method: str, path: str) -> None:
    headers = {"x-api-key": "k"}
    direct = await stage.http.request(method, stage.direct + path, headers=headers)
    through = await stage.http.request(method, stage.url + path, headers=headers)
    assert through.status_code == direct.status_code
    if through.content:
        assert through.json()["error"] == direct.json()["error"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8787", "127.0.0.1.evil.example:80", ""])
@pytest.mark.parametrize("path", ["/carpool/stats", "/v1/models"])
async def test_a_foreign_host_is_refused_on_every_path(stage: Any, host: str, path: str) -> None:
    answer = await stage.http.get(stage.url + path, headers={"host": host, "x-api-key": "k"})
    assert answer.status_code == 421
    assert "does not answer to the name" in answer.text


@pytest.mark.parametrize("host", ["localhost:1", "[::1]:8787", "LOCALHOST", "127.0.0.1"])
async def test_local_names_are_welcome(stage: Any, host: str) -> None:
    answer = await stage.http.get(f"{stage.url}/carpool/healthz", headers={"host": host})
    assert answer.status_code == 200


async def test_own_pages(stage: Any, body: Any) -> None:
    assert (await stage.http.get(f"{stage.url}/carpool/healthz")).json() == {"status": "ok"}
    before = (await stage.http.get(f"{stage.url}/carpool/stats")).json()
    await stage.post(body("counted"))
    after = (await stage.http.get(f"{stage.url}/carpool/stats")).json()
    assert after["carpool.sync_calls"] == before["carpool.sync_calls"] + 1
    missing = await stage.http.get(f"{stage.url}/carpool/nothing")
    assert missing.status_code == 404
    assert missing.json()["error"]["type"] == "not_found_error"


async def test_a_body_over_the_limit_is_refused(stage: Any) -> None:
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    answer = await stage.http.post(f"{stage.url}/v1/messages", content=b" " * 32_000_001, headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "request_too_large"
