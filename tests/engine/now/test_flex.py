"""The lane `flex` is tried once. If it has no room, the call takes another lane."""

from __future__ import annotations

import json

import pytest

from carpool.core.model import Call, EntryKind, Lane
from carpool.engine.context import EngineContext
from carpool.engine.now.flex import FlexRefused, FlexSender
from carpool.engine.now.send import Sender
from carpool.engine.recording import CallRecorder
from tests.support.engine_context import AlikeClient, engine_context
from tests.support.stores import admission

BODY = b'{"model":"gpt-5","messages":[]}'


def scene(client: AlikeClient) -> tuple[EngineContext, FlexSender, Call]:
    context, credential = engine_context(client)
    call = admission(1).call
    changes = {"provider": "openai", "credential": credential, "payer": "", "model": "gpt-5", "body": BODY}
    values = {name: getattr(call, name) for name in call.__struct_fields__} | changes
    return (
        context,
        FlexSender(context, Sender(context, CallRecorder(context))),
        Call(**values | {"endpoint": "/v1/chat/completions"}),
    )


async def test_an_answer_is_bought_on_flex() -> None:
    client = AlikeClient()
    context, flex, call = scene(client)
    response = await flex.respond(call, "cheap")
    assert not isinstance(response, FlexRefused)
    reply = await flex._sender.read_reply(*response)
    assert (reply.outcome.status, reply.outcome.lane, reply.entry and reply.entry.lane) == (200, Lane.FLEX, Lane.FLEX)
    [request] = client.requests
    assert isinstance(request.body, bytes)
    assert json.loads(request.body)["service_tier"] == "flex"
    assert context.stats.flex_refused == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_without_room_nothing_is_billed_and_the_next_purchase_is_the_second_attempt(status: int) -> None:
    client = AlikeClient(status)
    context, flex, call = scene(client)
    refused = await flex.respond(call, "cheap")
    assert refused == FlexRefused(EntryKind.PURCHASE, tried=1)
    assert len(client.requests) == 1  # one attempt, no retry
    [entry] = context.store.record.call_args.args  # type: ignore[attr-defined]
    assert (entry.paid, entry.reason) == (0, "flex had no room")
    assert context.stats.flex_refused == 1


async def test_an_error_of_the_call_itself_is_its_answer() -> None:
    context, flex, call = scene(AlikeClient(400, (), b'{"error":{"message":"messages: required","code":"bad"}}'))
    response = await flex.respond(call, "cheap")
    assert not isinstance(response, FlexRefused)
    assert response[1].status == 400
    assert context.stats.flex_refused == 0
