"""OpenAI's synchronous endpoints: chat completions, responses, embeddings, completions, moderations, models."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from carpool.mock.core.bill import Charge, Usage
from carpool.mock.core.errors import ConnectionCut
from carpool.mock.core.faults import AFTER_SYNC
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.state import Arrival, Caller, State
from carpool.mock.openai.answers import Answer
from carpool.mock.openai.bill import price_nano
from carpool.mock.openai.digest import Asked, Endpoint
from carpool.mock.openai.errors import Full, OpenAIError
from carpool.mock.openai.models import CATALOGUE, COMPATIBLE_CATALOGUE, OpenAISpec, find_model, model_info
from carpool.mock.openai.providers import TABLE
from carpool.mock.openai.sale import PATHS, answer, name_of, read, use
from carpool.mock.openai.sse import chunks, data, event, events

_FULL = "Resource unavailable: there is no capacity left in the flex tier right now. Please try again later."


@dataclass(frozen=True, slots=True)
class _Bought:
    """A purchase that is billed, whether or not its client waits for the answer."""

    asked: Asked
    answer: Answer
    took: float


async def call(state: State, caller: Caller, request: Request) -> Reply:
    bought = await _buy(state, PATHS[request.path], caller, request)
    if not bought.asked.stream:
        return await _whole(state, bought)
    if bought.asked.endpoint == "chat":
        habits = TABLE[bought.asked.spec.house]
        told = list(chunks(bought.answer, bought.asked.include_usage, habits.whole_calls, habits.closing))
        broken = data({"error": {"message": "Overloaded", "type": "server_error", "param": None, "code": None}})
        return _stream(state, told, bought.took, broken)
    parts = list(events(bought.answer))
    failed = {**bought.answer, "status": "failed", "output": [], "usage": None, "incomplete_details": None}
    failed["error"] = {"code": "server_error", "message": "Overloaded"}
    return _stream(state, parts, bought.took, event("response.failed", len(parts) // 2, response=failed))


async def models(state: State, caller: Caller, request: Request) -> Reply:
    sold = [spec for spec in (*CATALOGUE.values(), *COMPATIBLE_CATALOGUE.values()) if _sells(state, spec)]
    return json_reply({"object": "list", "data": [model_info(spec) for spec in sold]})


def _sells(state: State, spec: OpenAISpec) -> bool:
    """Azure offers OpenAI's models."""
    vendor = state.config.openai.vendor
    return spec.house == ("openai" if vendor == "azure" else vendor)


async def model(state: State, caller: Caller, request: Request, name: str) -> Reply:
    spec = find_model(name)
    if spec is None:
        message = f"The model '{name}' does not exist"
        raise OpenAIError(message, "model", "model_not_found", "not_found_error")
    return json_reply(model_info(spec))


# ---------------------------------------------------------------- what is sold


async def _buy(state: State, endpoint: Endpoint, caller: Caller, request: Request) -> _Bought:
    config = state.config
    arrival = await state.arrive(caller)
    body, _ = await request.json(config.max_message_bytes)
    asked = read(endpoint, body, config.mean_output_tokens)
    _make_room(state, asked, arrival)
    now = state.now()
    usage = use(asked, state.project(caller).sync_cache, now)
    answer_id = name_of(asked, state.new_id("").removeprefix("_"))
    _charge(state, caller, request, asked, usage, answer_id)
    await state.box.strike(AFTER_SYNC, accepted=True)
    latency = config.openai.flex_latency if asked.tier == "flex" else None
    took = state.sync_s(asked.fingerprint, latency or config.sync_latency)
    return _Bought(asked, answer(asked, usage, answer_id, int(now)), took)


def _make_room(state: State, asked: Asked, arrival: Arrival) -> None:
    """The flex tier accepts calls while it has capacity; a refused call costs nothing.

    The status is documented, the body's particulars are not: clients should not lean on them.
    """
    if asked.tier == "flex" and state.box.roll("flex_429"):
        arrival.status = TABLE[asked.spec.house].flex_full
        if arrival.status != 429:
            raise Full("The flex tier has no capacity left.", None, "capacity_exceeded")
        raise OpenAIError(_FULL, None, "resource_unavailable", "rate_limit_error")


def _charge(state: State, caller: Caller, request: Request, asked: Asked, usage: Usage, answer_id: str) -> None:
    state.bill.add(
        Charge(
            workspace=caller.workspace.id,
            credential=caller.credential,
            kind="sync",
            batch_id=None,
            custom_id=None,
            request_id=request.request_id,
            message_id=answer_id,
            model=asked.model,
            usage=usage,
            nano_usd=price_nano(asked.spec, usage, asked.tier),
            at=state.now(),
            fingerprint=asked.fingerprint,
            tier=asked.tier,
        )
    )


# ---------------------------------------------------------------- how it is told


async def _whole(state: State, bought: _Bought) -> Reply:
    await asyncio.sleep(bought.took)
    reply = json_reply(bought.answer, headers={"openai-processing-ms": str(int(bought.took * 1000))})
    if isinstance(reply.body, bytes) and state.box.roll("sync_cut_midway"):
        return Reply(200, _half(reply.body), {**reply.headers, "content-length": str(len(reply.body))})
    return reply


def _stream(state: State, parts: Sequence[bytes], took: float, broken: bytes) -> Reply:
    cut, fails = state.box.roll("sync_cut_midway"), state.box.roll("sync_stream_error")
    first = took * state.config.first_token_share
    told = _told(parts, first, (took - first) / len(parts), cut, broken if fails else None)
    return Reply(200, told, {"content-type": "text/event-stream; charset=utf-8"})


async def _told(
    parts: Sequence[bytes], first: float, pause: float, cut: bool, broken: bytes | None
) -> AsyncIterator[bytes]:
    await asyncio.sleep(first)
    for position, part in enumerate(parts):
        if position == len(parts) // 2:
            if cut:
                raise ConnectionCut(after_acceptance=True)
            if broken is not None:
                yield broken
                return
        yield part
        if pause > 0:
            await asyncio.sleep(pause)


async def _half(body: bytes) -> AsyncIterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionCut(after_acceptance=True)
