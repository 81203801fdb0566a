"""Rules of a config file, at work in `carpool serve` over real HTTP."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from carpool.mock import Constant, MockConfig, MockServer, serve
from tests.support.stage import ask

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUSE_KEY = "sk-house-0123456789"
CLAUDE = {"user-agent": "claude-cli/2.1.325 (external, sdk-cli)", "x-claude-code-session-id": "s"}


def config() -> str:
    now = datetime.now(UTC)
    around = f"{now - timedelta(hours=2):%H:%M}-{now + timedelta(hours=2):%H:%M}"
    later = f"{now + timedelta(hours=3):%H:%M}-{now + timedelta(hours=5):%H:%M}"
    return f"""
providers:
  anthropic: {{api_key_env: CARPOOL_TEST_HOUSE_KEY}}
batching: {{linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}}
limits: {{max_body_mb: 0.5}}
routing:
  rules:
    - {{name: people, match: {{header.x-interactive: true}}, refuse_budget: a person is waiting}}
    - {{name: subagents, match: {{subagent: true}}, budget: 30m, tags: {{kind: subagent}}}}
    - {{name: capped, match: {{tag.team: intern}}, max_budget: 5s}}
    - {{name: not now, match: {{tag.when: window, between: "{later}"}}, lane: now}}
    - {{name: in time, match: {{tag.when: window, between: "{around}"}}, lane: batch, budget: 20m}}
    - {{name: tools, match: {{tool_turn: true, tag.test: tools}}, lane: batch}}
    - {{name: large, match: {{size: ">100kb"}}, lane: batch}}
"""


@dataclass
class House:
    url: str
    upstream: MockServer
    http: httpx2.AsyncClient

    async def post(self, body: Any, headers: dict[str, str], path: str = "/v1/messages") -> Any:
        sent = {"x-api-key": "k", "anthropic-version": "2023-06-01", **headers}
        return await self.http.post(self.url + path, json=body, headers=sent)


@asynccontextmanager
async def opened(folder: Path, text: str, upstream: MockServer) -> AsyncIterator[House]:
    (folder / "carpool.yaml").write_text(text)
    command = ["-m", "carpool", "serve", "--port", "0", "--upstream", upstream.url, "--log-format", "json"]
    command += ["--store", str(folder / "carpool.db"), "--config", str(folder / "carpool.yaml")]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        environ = {**os.environ, "CARPOOL_TEST_HOUSE_KEY": HOUSE_KEY, "PYTHONUNBUFFERED": "1"}
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=out, stderr=err, env=environ)
        try:
            async with asyncio.timeout(20):
                while " listens on " not in (folder / "out").read_text():
                    assert process.returncode is None, (folder / "err").read_text()
                    await asyncio.sleep(0.02)
            url = (folder / "out").read_text().split(" listens on ")[1].split()[0]
            async with httpx2.AsyncClient(timeout=20) as http:
                yield House(url, upstream, http)
        finally:
            process.terminate()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("house")
    async with serve(MockConfig(batch_latency=Constant(0.1))) as upstream, opened(folder, config(), upstream) as one:
        yield one
    said = (folder / "out").read_text() + (folder / "err").read_text()
    assert HOUSE_KEY not in said


def way(answer: Any) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-carpool-lane"], answer.headers.get("x-carpool-reason", "")


@pytest.mark.parametrize("stream", [False, True])
async def test_subagents_ride_and_the_main_loop_does_not(house: House, stream: bool) -> None:
    main, helper = await asyncio.gather(
        house.post(ask("main", stream=stream), CLAUDE),
        house.post(ask("helper", stream=stream), CLAUDE | {"x-claude-code-agent-id": "a1"}),
    )
    assert way(main) == ("now", "No budget was given, so it goes at once.")
    lane, reason = way(helper)
    assert lane == "batch"
    assert reason.startswith("The rule subagents gives a budget.")


async def test_a_client_is_stronger_than_a_rule(house: House) -> None:
    answer = await house.post(ask("quick"), {"x-claude-code-agent-id": "a1", "x-carpool-lane": "now"})
    assert way(answer) == ("now", "The lane now was asked for.")
    through_path = await house.post(ask("path"), {"x-claude-code-agent-id": "a1"}, "/@lane=now/v1/messages")
    assert way(through_path)[0] == "now"


@pytest.mark.parametrize("path", ["/v1/messages", "/@budget=2h/v1/messages"])
async def test_a_cap_binds_the_client(house: House, path: str) -> None:
    budget = {} if "@" in path else {"x-carpool-budget": "2h"}
    lane, reason = way(await house.post(ask("capped"), {"x-carpool-tags": "team=intern", **budget}, path))
    assert lane == "now"
    assert reason.startswith("The rule capped allows a budget of at most 5 s. The budget of 5 s is tight")
    assert way(await house.post(ask("free"), budget, path))[0] == "batch"


@pytest.mark.parametrize("wish", [{"x-carpool-budget": "2h"}, {"x-carpool-lane": "batch"}])
async def test_a_refused_budget_goes_at_once(house: House, wish: dict[str, str]) -> None:
    answer = await house.post(ask("refused"), {"x-interactive": "1", **wish})
    assert way(answer) == ("now", "The rule people lets no budget of a client through: a person is waiting.")


async def test_a_time_window(house: House) -> None:
    answer = await house.post(ask("window"), {"x-carpool-tags": "when=window"})
    assert way(answer) == ("batch", "The rule in time asks for the lane batch.")


async def test_tool_turns_and_sizes(house: House) -> None:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "seen"}
    turn = ask("start", tools=tools)
    turn["messages"] += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tagged = {"x-carpool-tags": "test=tools"}
    assert way(await house.post(turn, tagged))[1] == "The rule tools asks for the lane batch."
    assert way(await house.post(ask("start", tools=tools), tagged))[0] == "now"
    assert way(await house.post(ask("x" * 120_000), {}))[1] == "The rule large asks for the lane batch."


async def test_what_a_rule_wants_batched_and_cannot_be_goes_on_now(house: House) -> None:
    answer = await house.post(ask("x" * 120_000), {"anthropic-beta": "fast-mode-2026-02-01"})
    lane, reason = way(answer)
    assert lane == "now"
    assert reason == "The rule large asks for the lane batch. A batch may not use the beta fast-mode-2026-02-01."


async def test_a_body_over_the_limit_is_refused(house: House) -> None:
    assert (await house.post(ask("x" * 600_000), {})).status_code == 413


# ---------------------------------------------------------------- the key of the house


async def test_a_client_without_a_key_gets_the_one_of_the_house(house: House) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    for more in ({}, {"x-carpool-budget": "30m"}):
        answer = await house.http.post(f"{house.url}/v1/messages", json=ask("keyless"), headers=headers | more)
        assert way(answer)[0] == ("batch" if more else "now")
    models = await house.http.get(f"{house.url}/v1/models", headers=headers)
    assert models.status_code == 200


@pytest.mark.parametrize(
    "page",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1.evil.example"},
    ],
)
async def test_a_web_page_of_another_origin_does_not(house: House, page: dict[str, str]) -> None:
    headers = {"anthropic-version": "2023-06-01", "content-type": "text/plain", **page}
    answer = await house.http.post(f"{house.url}/v1/messages", content=json.dumps(ask("evil")), headers=headers)
    assert answer.status_code == 401


async def test_a_page_of_this_machine_does(house: House) -> None:
    headers = {"anthropic-version": "2023-06-01", "origin": "http://localhost:3000"}
    assert way(await house.http.post(f"{house.url}/v1/messages", json=ask("own page"), headers=headers))[0] == "now"
