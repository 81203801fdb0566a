"""The endpoints under /v1/batches."""

import asyncio
from collections.abc import Mapping
from itertools import islice
from typing import Any

from carpool.mock.faults import AFTER_CANCEL, AFTER_CREATE, BEFORE_CANCEL, BEFORE_CREATE, POLL
from carpool.mock.http import Reply, Request, json_reply
from carpool.mock.limits import retry_after
from carpool.mock.openai_azure import as_azure
from carpool.mock.openai_batch import OpenAIBatch
from carpool.mock.openai_errors import OpenAIError, missing, wrong_type
from carpool.mock.openai_files import StoredFile
from carpool.mock.openai_files_api import kept, limit_of, listed
from carpool.mock.openai_intake import read_file
from carpool.mock.openai_sale import PATHS
from carpool.mock.state import GARBAGE, Caller, State

_MB = 1_000_000
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


async def create(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    _limit_creates(state, caller)
    body, _ = await request.json(_MB)
    await state.box.strike(BEFORE_CREATE, accepted=False)
    _check(body, state.config.openai.windows)
    file = _input(state, caller, body["input_file_id"])
    data = b"".join(file.lines())
    contents = await read_file(data, body["endpoint"], state.config.mean_output_tokens, state.config.openai)
    if state.box.roll("create_slow"):
        await asyncio.sleep(state.config.faults.create_slow_s)
    batch = state.accept_openai(
        caller,
        contents,
        body["endpoint"],
        file.id,
        window=body["completion_window"],
        metadata=body.get("metadata"),
        keep_files_s=_keep(body),
    )
    view = _shown(state, batch)  # before anything happens to it: always `validating`
    await state.box.strike(AFTER_CREATE, accepted=True)
    return json_reply(view)


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
    now, limit, project = state.now(), limit_of(request, 20, 100), state.project(caller)
    project.advance(now)
    found = project.older(request.query.get("after"))
    page = list(islice((batch for batch in found if batch.listed_from <= now), limit + 1))
    return json_reply(listed([_shown(state, batch) for batch in page[:limit]], len(page) > limit))


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
    view = batch.view()
    return as_azure(view) if state.config.openai.azure else view


def _limit_creates(state: State, caller: Caller) -> None:
    wait = state.project(caller).creates.take(state.now())
    if wait > 0:
        error = OpenAIError(
            "You have created too many batches this hour.", None, "rate_limit_exceeded", "rate_limit_error"
        )
        error.headers["retry-after"] = retry_after(wait)
        raise error


def _check(body: Any, windows: frozenset[str]) -> None:
    if not isinstance(body, dict):
        raise OpenAIError("We could not parse the JSON body of your request: it is not an object.")
    for name in ("input_file_id", "endpoint", "completion_window"):
        if body.get(name) is None:
            raise missing(name)
        if not isinstance(body[name], str):
            raise wrong_type(name, "a string", body[name])
    if body["endpoint"] not in PATHS:
        supported = ", ".join(f"'{path}'" for path in PATHS)
        message = f"Invalid value: '{body['endpoint']}'. Supported values are: {supported}."
        raise OpenAIError(message, "endpoint", "invalid_value")
    if body["completion_window"] not in windows:
        message = (
            f"Invalid value: '{body['completion_window']}'. Value must be {' or '.join(map(repr, sorted(windows)))}."
        )
        raise OpenAIError(message, "completion_window", "invalid_value")
    metadata = body.get("metadata")
    if metadata is not None:
        _check_metadata(metadata)


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Mapping):
        raise wrong_type("metadata", "an object", metadata)
    if len(metadata) > _MOST_METADATA:
        raise OpenAIError("Invalid 'metadata': too many properties.", "metadata", "object_above_max_properties")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{name}", "a string", value)
        if len(name) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise OpenAIError("Invalid 'metadata': string too long.", "metadata", "string_above_max_length")


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
    if file.purpose != "batch":
        raise OpenAIError(f"File {file_id} has the purpose '{file.purpose}', not 'batch'.", "file_id")
    return file


def _find(state: State, caller: Caller, batch_id: str) -> OpenAIBatch:
    """The caller's batch, caught up with the time."""
    project = state.project(caller)
    project.advance(state.now())
    batch = project.find(batch_id)
    if batch is None:
        raise OpenAIError(f"No batch found with id '{batch_id}'.", None, None, "not_found_error")
    return batch
