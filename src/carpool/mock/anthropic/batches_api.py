"""The endpoints under /v1/messages/batches."""

import asyncio
from collections.abc import AsyncIterator
from itertools import islice

from carpool.mock.anthropic.intake import digest_all, read_envelope
from carpool.mock.anthropic.message_batch import MessageBatch
from carpool.mock.anthropic.results import chunks
from carpool.mock.core.errors import ApiError, ConnectionCut, invalid
from carpool.mock.core.faults import AFTER_CANCEL, AFTER_CREATE, BEFORE_CANCEL, BEFORE_CREATE, POLL, RESULTS
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.state import GARBAGE, Caller, State


async def create(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    raw = await request.body(state.config.max_batch_bytes)
    await state.box.strike(BEFORE_CREATE, accepted=False)
    members = read_envelope(raw, state.config.max_batch_requests)
    _check_queue(state, caller, len(members))
    requests = await digest_all(members, state.config.mean_output_tokens)
    if state.box.roll("create_slow"):
        await asyncio.sleep(state.config.faults.create_slow_s)
    batch = state.accept(caller, [member.custom_id for member in members], requests)
    await state.box.strike(AFTER_CREATE, accepted=True)
    return json_reply(batch.view(state.now(), request.base_url))


async def retrieve(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    if state.box.roll("poll_garbage"):
        return GARBAGE
    now = state.now()
    return json_reply(_find(caller, batch_id, now).view(now, request.base_url))


async def listing(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    if state.box.roll("poll_garbage"):
        return GARBAGE
    now, limit = state.now(), _limit(request)
    caller.workspace.advance(now)
    page, more = _page(caller, request, limit, now)
    data = [batch.view(now, request.base_url) for batch in page]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_reply({"data": data, "has_more": more, "first_id": first, "last_id": last})


async def cancel(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(BEFORE_CANCEL, accepted=False)
    now = state.now()
    batch = _find(caller, batch_id, now)
    if batch.closed:
        raise invalid(f"Message batch {batch_id} has already ended and cannot be canceled.")
    takes = state.config.cancel_latency.draw(state.dice.control)
    if state.box.roll("cancel_slow"):
        takes += state.config.faults.cancel_slow_s
    batch.cancel(now, takes)
    state.canceled.append(batch_id)
    # Not yet closed, so that the answer says `canceling` even where nothing is left to wait for.
    view = batch.view(now, request.base_url)
    await state.box.strike(AFTER_CANCEL, accepted=True)
    return json_reply(view)


async def delete(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    batch = _find(caller, batch_id, state.now())
    if not batch.closed:
        raise invalid(f"Message batch {batch_id} cannot be deleted while it is processing.")
    batch.discard()
    return json_reply({"id": batch_id, "type": "message_batch_deleted"})


async def results(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(RESULTS, accepted=False)
    now = state.now()
    batch = _find(caller, batch_id, now)
    if not batch.closed or now >= batch.archives:
        raise ApiError("not_found_error", f"Message batch {batch_id} has no available results.")
    cut = state.dice.faults.randrange(batch.size) if state.box.roll("results_cut_midway") else None
    return Reply(200, _stream(batch, cut), {"content-type": "application/binary"})


async def _stream(batch: MessageBatch, cut: int | None) -> AsyncIterator[bytes]:
    if cut is None:
        for part in chunks(batch):
            yield part
            await asyncio.sleep(0)
        return
    for position, line in enumerate(chunks(batch, size=1)):
        if position >= cut:
            yield line[: len(line) // 2]
            break
        yield line
    raise ConnectionCut(after_acceptance=False)


def _check_queue(state: State, caller: Caller, count: int) -> None:
    limit = state.config.queue_limit
    caller.workspace.advance(state.now())
    if limit is not None and caller.workspace.waiting() + count > limit:
        raise ApiError("rate_limit_error", f"This batch would exceed your limit of {limit} requests in the queue.")


def _find(caller: Caller, batch_id: str, now: float) -> MessageBatch:
    """The caller's batch, advanced to the current time."""
    caller.workspace.advance(now)
    batch = caller.workspace.find(batch_id)
    if batch is None:
        raise ApiError("not_found_error", f"Message batch {batch_id} not found.")
    return batch


def _limit(request: Request) -> int:
    text = request.query.get("limit", "20")
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise invalid("limit: Input should be between 1 and 1000")
    return int(text)


def _page(caller: Caller, request: Request, limit: int, now: float) -> tuple[list[MessageBatch], bool]:
    """Newest first, also when paging towards the newer ones."""
    before = request.query.get("before_id")
    found = caller.workspace.newer(before) if before else caller.workspace.older(request.query.get("after_id"))
    page = list(islice((batch for batch in found if batch.listed_from <= now), limit + 1))
    more, page = len(page) > limit, page[:limit]
    return (page[::-1] if before else page), more
