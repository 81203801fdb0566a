"""Tasks through the proxy: who belongs together, what their deadline makes of a turn, and what is said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from carpool.mock import Constant, MockConfig
from tests.support.stage import Stage, ask

QUICK = MockConfig(batch_latency=Constant(0.2))
CLAUDE_CODE = {"user_agent": "claude-cli/2.1 (external, cli)"}


def names(stage: Stage) -> list[tuple[str, int, int]]:
    return [(task.name, task.asked, task.answered) for task in stage.engine.tasks._book._tasks.values()]


async def test_a_task_budget_is_enough_for_a_batch(stage_with: Callable[..., Any]) -> None:
    async with stage_with(QUICK) as stage:
        response = await stage.post(ask("hello"), x_carpool_task="essay", x_carpool_task_budget="3h")
        assert (response.status_code, response.headers["x-carpool-lane"]) == (200, "batch")
        assert names(stage) == [("essay", 1, 1)]
        [task] = stage.engine.tasks._book._tasks.values()
        assert list(task.spent) == ["batch"]
        assert not task.open


async def test_the_task_that_is_named_binds_a_call_without_a_budget(stage_with: Callable[..., Any]) -> None:
    async with stage_with(QUICK) as stage:
        await stage.post(ask("hello"), x_carpool_task="essay", x_carpool_task_budget="3h")
        named = await stage.post(ask("go on"), x_carpool_task="essay")
        assert named.headers["x-carpool-lane"] == "batch"
        other = await stage.post(ask("go on"), x_carpool_task="other")
        assert other.headers["x-carpool-lane"] == "now"
        assert names(stage) == [("essay", 2, 2), ("other", 1, 1)]


async def test_a_task_without_slack_says_so(stage_with: Callable[..., Any]) -> None:
    async with stage_with(QUICK) as stage:
        response = await stage.post(ask("hello"), x_carpool_task="essay", x_carpool_task_budget="60s")
        assert response.headers["x-carpool-lane"] == "now"
        assert response.headers["x-carpool-reason"] == "The task essay needs the 60 s that are left on now."


async def test_a_bad_task_budget_is_refused(stage_with: Callable[..., Any]) -> None:
    async with stage_with() as stage:
        response = await stage.post(ask("hello"), x_carpool_task_budget="soon")
        assert response.status_code == 400
        assert "'soon' is not a budget" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"x_claude_code_session_id": "5d0e"}, "5d0e"),
        ({"x_claude_code_session_id": "5d0e", "x_carpool_tags": "run=nightly,team=a"}, "nightly"),
        ({"x_claude_code_session_id": "5d0e", "x_carpool_tags": "run=nightly", "x_carpool_task": "mine"}, "mine"),
    ],
)
async def test_who_names_the_task(stage_with: Callable[..., Any], headers: dict[str, str], name: str) -> None:
    async with stage_with() as stage:
        for text in ("one", "two"):
            response = await stage.post(ask(text), **headers, **CLAUDE_CODE)
            assert response.headers["x-carpool-lane"] == "now"  # a session without a budget is only counted
        assert names(stage) == [(name, 2, 2)]
        [task] = stage.engine.tasks._book._tasks.values()
        assert task.agent == "claude-code"
        assert list(task.spent) == ["now"]


@pytest.mark.parametrize(
    "user",
    [
        "user_1a_account_2b_session_0f6c1e2a-11aa-4b4b-9c9c-123456789abc",
        '{"device_id": "x", "session_id": "0f6c1e2a-11aa-4b4b-9c9c-123456789abc"}',
    ],
)
async def test_a_session_in_the_metadata(stage_with: Callable[..., Any], user: str) -> None:
    async with stage_with() as stage:
        await stage.post(ask("hello", metadata={"user_id": user}))
        assert names(stage) == [("0f6c1e2a-11aa-4b4b-9c9c-123456789abc", 1, 1)]


async def test_a_conversation_is_a_task_whose_name_tells_nothing(stage_with: Callable[..., Any]) -> None:
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    async with stage_with() as stage:
        said = [{"role": "user", "content": "hello"}]
        await stage.post(ask("", system=marked, messages=said))
        said = [*said, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "go on"}]
        await stage.post(ask("", system=marked, messages=said))
        await stage.post(ask("another one", system=marked))
        await stage.post(ask("unmarked"))
        [first, second] = names(stage)
        assert first[0].startswith("conversation ")
        assert (first[1], second[1]) == (2, 1)


async def test_who_leaves_and_who_is_refused_leaves_nothing_open(stage_with: Callable[..., Any]) -> None:
    async with stage_with(MockConfig(sync_latency=Constant(0.3))) as stage:
        await stage.post(ask("[error:invalid_request_error]"), x_carpool_task="essay")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await stage.post(ask("hello"), x_carpool_task="essay")
        [task] = stage.engine.tasks._book._tasks.values()
        await stage.until(lambda: not task.open)
        assert names(stage) == [("essay", 2, 0)]
        assert task.unknown == 1


async def test_the_page_of_tasks(stage_with: Callable[..., Any]) -> None:
    async with stage_with(QUICK) as stage:
        await stage.post(ask("hello"), x_carpool_task="essay", x_carpool_task_budget="3h")
        await stage.http.post(
            stage.url + "/v1/messages",
            json=ask("hello"),
            headers={"x-api-key": "other", "anthropic-version": "2023-06-01", "x-carpool-task": "theirs"},
        )
        every = (await stage.http.get(stage.url + "/carpool/tasks")).json()["tasks"]
        assert [(task["task"], task["state"]) for task in every] == [("theirs", "no deadline"), ("essay", "has slack")]
        mine = await stage.http.get(stage.url + "/carpool/tasks?limit=5", headers={"x-api-key": "k"})
        [task] = mine.json()["tasks"]
        assert (task["task"], task["turns"]["answered"]) == ("essay", 1)
        assert list(task["spent_nano_usd"]) == ["batch"]
        for query in ("limit=0", "since=soon", "state=open"):
            assert (await stage.http.get(f"{stage.url}/carpool/tasks?{query}")).status_code == 400
