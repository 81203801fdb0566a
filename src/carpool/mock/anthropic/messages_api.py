"""POST /v1/messages and /v1/messages/count_tokens."""

import asyncio
from collections.abc import AsyncIterator

from carpool.mock.anthropic.answers import Message, message
from carpool.mock.anthropic.digest import Digest, digest
from carpool.mock.anthropic.sse import PING, event, events
from carpool.mock.anthropic.validate import check_prompt
from carpool.mock.core.blocks import count_tokens
from carpool.mock.core.errors import ConnectionCut, invalid
from carpool.mock.core.faults import AFTER_SYNC
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.state import Caller, State


async def create_message(state: State, caller: Caller, request: Request) -> Reply:
    await state.arrive(caller)
    body, raw = await request.json(state.config.max_message_bytes)
    asked = digest(body, raw, state.config.mean_output_tokens, in_batch=False)
    took = state.sync_s(asked.fingerprint, state.config.sync_latency)
    answer = _accept(state, caller, request.request_id, asked, took)
    await state.box.strike(AFTER_SYNC, accepted=True)
    if asked.stream:
        return Reply(200, _stream(state, answer, took), {"content-type": "text/event-stream; charset=utf-8"})
    await asyncio.sleep(took)
    reply = json_reply(answer)
    if isinstance(reply.body, bytes) and state.box.roll("sync_cut_midway"):
        headers = {**reply.headers, "content-length": str(len(reply.body))}
        return Reply(200, _half(reply.body), headers)
    return reply


def _accept(state: State, caller: Caller, request_id: str, asked: Digest, took: float) -> Message:
    """From here on the call is billed, whether or not its client waits for the answer."""
    now = state.now()
    message_id = state.new_id("msg")
    usage = caller.workspace.use(asked, "sync", now, now + took)
    caller.workspace.charge_sync(caller.credential, request_id, message_id, asked, usage, now)
    return message(asked, usage, message_id, "sync")


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionCut(after_acceptance=True)


async def _stream(state: State, answer: Message, took: float) -> AsyncIterator[bytes]:
    parts = list(events(answer))
    first = took * state.config.first_token_share
    pause = (took - first) / (len(parts) - 2)  # none before the last event, which follows at once
    middle = len(parts) // 2
    cut = state.box.roll("sync_cut_midway")
    broken = state.box.roll("sync_stream_error")
    await asyncio.sleep(first)
    yield parts[0]
    yield PING
    for position, part in enumerate(parts[1:], start=1):
        async for ping in _pings(pause if position < len(parts) - 1 else 0.0, state.config.ping_s):
            yield ping
        if cut and position == middle:
            raise ConnectionCut(after_acceptance=True)
        if broken and position == middle:
            yield event("error", error={"type": "overloaded_error", "message": "Overloaded"})
            return
        yield part


async def _pings(pause: float, every: float) -> AsyncIterator[bytes]:
    """Waits, and sends pings during a long wait."""
    while pause > every:
        await asyncio.sleep(every)
        pause -= every
        yield PING
    if pause > 0:
        await asyncio.sleep(pause)


async def count(state: State, caller: Caller, request: Request) -> Reply:
    body, _ = await request.json(state.config.max_message_bytes)
    if not isinstance(body, dict):
        raise invalid("The request body must be an object.")
    check_prompt(body)
    return json_reply({"input_tokens": count_tokens(body)})
