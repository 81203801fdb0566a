"""A conversation that is warm on `now` stays there, over real HTTP."""

from typing import Any

MARK = {"cache_control": {"type": "ephemeral"}}
TEXT = "Read this first. " * 1000  # long enough to be cached


def turns(body: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The opening of a conversation and its next turn; the mark moves along."""
    first, second = body(), body()
    said = {"type": "text", "text": f"{name}. {TEXT}"}
    first["messages"] = [{"role": "user", "content": [said | MARK]}]
    second["messages"] = [
        {"role": "user", "content": [said]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "Go on."} | MARK]},
    ]
    return first, second


def way(answer: Any) -> tuple[str, bool]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-carpool-lane"], answer.headers["x-carpool-reason"].startswith("Now is cheapest")


async def test_a_warm_conversation_stays_on_now(stage_with: Any, body: Any) -> None:
    async with stage_with() as stage:
        first, second = turns(body, "warm")
        assert way(await stage.post(first)) == ("now", False)
        assert way(await stage.post(second, x_carpool_budget="30m")) == ("now", True)
        assert way(await stage.post(second, x_carpool_lane="batch")) == ("batch", False)
