"""A conversation that is warm on `now` stays there, over real HTTP."""

from typing import Any

MARK = {"cache_control": {"type": "ephemeral"}}
WARM = "Its conversation is warm on now."


def turns(body: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The opening of a conversation and its next turn; the mark moves along."""
    first, second = body(), body()
    said = {"type": "text", "text": name}
    first["messages"] = [{"role": "user", "content": [said | MARK]}]
    second["messages"] = [
        {"role": "user", "content": [said]},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "Go on."} | MARK]},
    ]
    return first, second


def way(answer: Any) -> tuple[str, bool]:
    assert answer.status_code == 200, answer.text
    return answer.headers["x-carpool-lane"], answer.headers["x-carpool-reason"] == WARM


async def test_a_warm_conversation_stays_on_now(stage_with: Any, body: Any) -> None:
    async with stage_with() as stage:
        first, second = turns(body, "warm")
        assert way(await stage.post(first)) == ("now", False)
        assert way(await stage.post(second, x_carpool_budget="30m")) == ("now", True)
        assert way(await stage.post(second, x_carpool_budget="30m", x_api_key="other")) == ("batch", False)
        assert way(await stage.post(second, x_carpool_lane="batch")) == ("batch", False)
        assert way(await stage.post(turns(body, "another")[1], x_carpool_budget="30m")) == ("batch", False)


async def test_a_conversation_that_began_in_a_batch_goes_on_there(stage_with: Any, body: Any) -> None:
    async with stage_with() as stage:
        for turn in turns(body, "cold"):
            assert way(await stage.post(turn, x_carpool_budget="30m")) == ("batch", False)
