"""A response that is pushed to its client: how it ends, and what the ledger learns of it."""

from __future__ import annotations

from unittest.mock import Mock

from carpool.core.errors import ConnectionBroken, NotConnected, TooBusy
from carpool.dialects import OPENAI
from carpool.engine.now.relay import Purchase, local_refusal


def purchase() -> Purchase:
    return Purchase(Mock(), Mock(), Mock(), OPENAI, Mock(), Mock(), Mock())


def test_a_response_passes_through_and_is_entered_at_its_end() -> None:
    bought = purchase()
    bought.answered(200, (("content-type", "application/json"),))
    bought.add(b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}')
    bought.finish()
    bought.receiver.add.assert_called_once()  # type: ignore[attr-defined]
    [call] = bought.record.call_args_list  # type: ignore[attr-defined]
    attempt, status, dialect, seen = call.args
    assert (attempt, status, dialect) == (bought.attempt, 200, OPENAI)
    assert seen.final
    assert seen.usage.input_tokens == 3
    bought.receiver.finish.assert_called_once_with()  # type: ignore[attr-defined]
    assert bought.entry is bought.record.return_value  # type: ignore[attr-defined]


def test_a_request_that_was_never_sent_is_void() -> None:
    bought, error = purchase(), NotConnected("refused")
    bought.fail(error)
    bought.record_unsent.assert_called_once_with(bought.attempt)  # type: ignore[attr-defined]
    bought.slot.failed.assert_called_once_with(error)  # type: ignore[attr-defined]
    bought.receiver.fail.assert_called_once_with(error)  # type: ignore[attr-defined]
    assert bought.entry is None


def test_a_response_that_breaks_off_has_no_final_usage() -> None:
    bought, error = purchase(), ConnectionBroken("cut")
    bought.answered(200, ())
    bought.add(b'{"usage":')
    bought.fail(error)
    assert not bought.record.call_args.args[3].final  # type: ignore[attr-defined]
    assert not bought.complete
    bought.receiver.fail.assert_called_once_with(error)  # type: ignore[attr-defined]
    assert bought.entry is bought.record.return_value  # type: ignore[attr-defined]


def test_what_is_given_up_before_its_answer_has_no_entry() -> None:
    bought = purchase()
    bought.request_handle = Mock()
    bought.give_up()
    assert bought.entry is None
    bought.request_handle.give_up.assert_called_once_with()
    bought.record.assert_not_called()  # type: ignore[attr-defined]
    bought.lost.assert_called_once_with(bought.attempt)  # type: ignore[attr-defined]


async def test_a_local_refusal_has_the_providers_format_and_says_when_to_come_back() -> None:
    refusal = local_refusal(TooBusy("The account's rate limit is reached.", 2.2), OPENAI)
    body = await refusal.read()
    assert dict(refusal.headers) == {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "retry-after": "3",
    }
    assert refusal.status == 429
    assert b"rate limit" in body
    assert [chunk async for chunk in refusal.chunks()] == [body]
