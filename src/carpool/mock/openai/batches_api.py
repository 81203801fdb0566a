"""The endpoints under /v1/batches."""

import asyncio
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from typing import Any

from carpool.mock.core.faults import AFTER_CANCEL, AFTER_CREATE, BEFORE_CANCEL, BEFORE_CREATE, POLL, RESULTS
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.limits import retry_after
from carpool.mock.core.state import GARBAGE, Caller, State
from carpool.mock.openai.batch import OpenAIBatch
from carpool.mock.openai.errors import OpenAIError, wrong_type
from carpool.mock.openai.files import StoredFile
from carpool.mock.openai.files_api import kept, limit_of
from carpool.mock.openai.intake import read_file
from carpool.mock.openai.results import all_results
from carpool.mock.openai.views import array

_MB = 1_000_000


async def create(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    _limit_creates(state, caller)
    body, _ = await request.json(_MB)
    await state.box.strike(BEFORE_CREATE, accepted=False)
    own = state.config.openai
    order = own.habits.order(body, own.habits.endpoints, own.windows or own.habits.windows)
    file = _input(state, caller, order.file_id)
    data = b"".join(file.lines())
    contents = await read_file(data, order, state.config.mean_output_tokens, own)
    if state.box.roll("create_slow"):
        await asyncio.sleep(state.config.faults.create_slow_s)
    batch = state.accept_openai(
        caller,
        contents,
        order,
        keep_files_s=_keep(body),
    )
    view = _shown(state, batch)  # before anything happens to it: always `validating`
    await state.box.strike(AFTER_CREATE, accepted=True)
    return json_reply(*own.habits.created(view))


async def retrieve(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    if state.box.roll("poll_garbage"):
        return GARBAGE
    return json_reply(_shown(state, _find(state, caller, batch_id)))


async def listing(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    if state.box.roll("poll_garbage"):
        return GARBAGE
    now, project, habits = state.now(), state.project(caller), state.config.openai.habits
    project.advance(now)
    asked = request.query
    limit = limit_of(request, 20, 100)
    found = project.older(asked.get("after") or asked.get("pagination_token"))
    visible = (batch for batch in found if batch.listed_from <= now)
    page = list(islice(visible, int(asked.get("page", 0)) * limit, None))
    if "page" not in asked and habits.listed is array:
        limit = len(page)
    more, page = len(page) > limit, page[:limit]
    token = page[-1].id if page else None
    return json_reply(habits.listed([_shown(state, batch) for batch in page], more, token))


async def results(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    """Results without files: sorted by id, in pages."""
    await state.enter(caller)
    await state.box.strike(RESULTS, accepted=False)
    batch, limit = _find(state, caller, batch_id), limit_of(request, 100, 1000)
    after = request.query.get("pagination_token", "")
    rows = sorted(all_results(batch), key=itemgetter("batch_request_id")) if batch.closed else []
    left = [row for row in rows if row["batch_request_id"] > after]
    page, more = left[:limit], len(left) > limit
    return json_reply({"results": page, "pagination_token": page[-1]["batch_request_id"] if more else None})


async def cancel(state: State, caller: Caller, request: Request, batch_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(BEFORE_CANCEL, accepted=False)
    batch = _find(state, caller, batch_id)
    if batch.closed:
        raise OpenAIError(f"Cannot cancel a batch with status '{batch.status}'.", kind="conflict_error")
    takes = state.config.cancel_latency.draw(state.dice.control)
    if state.box.roll("cancel_slow"):
        takes += state.config.faults.cancel_slow_s
    batch.forgets = state.box.roll("cancel_forgets")
    batch.cancel(state.now(), takes)
    state.canceled.append(batch_id)
    state.hooks.stir()
    view = _shown(state, batch)
    await state.box.strike(AFTER_CANCEL, accepted=True)
    return json_reply(view)


def _shown(state: State, batch: OpenAIBatch) -> dict[str, Any]:
    return state.config.openai.habits.view(batch.view())


def _limit_creates(state: State, caller: Caller) -> None:
    wait = state.project(caller).creates.take(state.now())
    if wait > 0:
        error = OpenAIError(
            "You have created too many batches this hour.", None, "rate_limit_exceeded", "rate_limit_error"
        )
        error.headers["retry-after"] = retry_after(wait)
        raise error


def _keep(body: Mapping[str, Any]) -> float | None:
    wanted = body.get("output_expires_after")
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping):
        raise wrong_type("output_expires_after", "an object", wanted)
    return kept(wanted.get("anchor"), wanted.get("seconds"), "output_expires_after")


def _input(state: State, caller: Caller, file_id: str) -> StoredFile:
    now, project = state.now(), state.project(caller)
    file = project.files.find(file_id, now)
    if file is None or now < file.usable_from:
        message = f"Cannot find file {file_id}, or project {project.id} does not have access to it."
        raise OpenAIError(message, "file_id")
    wanted = state.config.openai.habits.purpose
    if file.purpose != wanted:
        raise OpenAIError(f"File {file_id} has the purpose '{file.purpose}', not '{wanted}'.", "file_id")
    return file


def _find(state: State, caller: Caller, batch_id: str) -> OpenAIBatch:
    """The caller's batch, advanced to the current time."""
    project = state.project(caller)
    project.advance(state.now())
    batch = project.find(batch_id)
    if batch is None:
        raise OpenAIError(f"No batch found with id '{batch_id}'.", None, None, "not_found_error")
    return batch
