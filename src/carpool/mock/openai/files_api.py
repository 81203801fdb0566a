"""The endpoints under /v1/files."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import islice

from carpool.mock.core.errors import ConnectionCut
from carpool.mock.core.faults import AFTER_UPLOAD, BEFORE_UPLOAD, POLL, RESULTS
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.state import Caller, State
from carpool.mock.openai.errors import OpenAIError, missing
from carpool.mock.openai.files import StoredFile
from carpool.mock.openai.multipart import FormError, Part, boundary_of, read_form

_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
SHORTEST_S, LONGEST_S = 3_600, 2_592_000
_ROOM_FOR_THE_FORM = 65_536


async def upload(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    limit = state.config.openai.max_upload_bytes
    try:
        boundary = boundary_of(request.headers.get("content-type", ""))
        form = await read_form(_bounded(request, limit + _ROOM_FOR_THE_FORM), boundary)
    except FormError as error:
        raise OpenAIError(f"The form can't be read: {error}.") from error
    await state.box.strike(BEFORE_UPLOAD, accepted=False)
    file = _store(state, caller, form)
    await state.box.strike(AFTER_UPLOAD, accepted=True)
    return json_reply(file.view(state.config.faults.clock_offset_s))


async def listing(state: State, caller: Caller, request: Request) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    purpose, after = request.query.get("purpose"), request.query.get("after")
    limit = limit_of(request, 10_000, 10_000)
    files = [file for file in _files(state, caller) if purpose in (None, file.purpose)]
    start = next((n for n, file in enumerate(files, 1) if file.id == after), 0)
    page = list(islice(files, start, start + limit))
    offset = state.config.faults.clock_offset_s
    return json_reply(listed([file.view(offset) for file in page], len(files) > start + limit))


async def retrieve(state: State, caller: Caller, request: Request, file_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(POLL, accepted=False)
    return json_reply(_find(state, caller, file_id).view(state.config.faults.clock_offset_s))


async def delete(state: State, caller: Caller, request: Request, file_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(("delete_500",), accepted=False)
    state.project(caller).forget(_find(state, caller, file_id))
    return json_reply({"id": file_id, "object": "file", "deleted": True})


async def content(state: State, caller: Caller, request: Request, file_id: str) -> Reply:
    await state.enter(caller)
    await state.box.strike(RESULTS, accepted=False)
    file = _find(state, caller, file_id)
    cut = file.batch_id is not None and state.box.roll("results_cut_midway")
    lines = sum(1 for _ in file.lines()) if cut else 0
    pieces = _stream(file, state.dice.faults.randrange(lines) if cut else None)
    return Reply(200, pieces, {"content-type": "application/octet-stream"})


async def _stream(file: StoredFile, cut: int | None) -> AsyncIterator[bytes]:
    if cut is None:
        for piece in file.pieces():
            yield piece
            await asyncio.sleep(0)
        return
    for position, line in enumerate(file.lines()):
        if position >= cut:
            yield line[: len(line) // 2]
            break
        yield line
    raise ConnectionCut(after_acceptance=False)


# ---------------------------------------------------------------- uploading


async def _bounded(request: Request, limit: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise OpenAIError("File is too large.")
    size = 0
    async for piece in request.pieces():
        size += len(piece)
        if size > limit:
            raise OpenAIError("File is too large.")
        yield piece


def _store(state: State, caller: Caller, form: dict[str, Part]) -> StoredFile:
    file, purpose = form.get("file"), _field(form, "purpose")
    habits = state.config.openai.habits
    if file is None or file.filename is None:
        raise missing("file")
    named = _field(form, "file_name") if habits.asks_file_name else file.filename
    if purpose not in _PURPOSES and purpose != habits.purpose:
        raise OpenAIError(f"'{purpose}' is not one of {list(_PURPOSES)} - 'purpose'", "purpose")
    if purpose == habits.purpose and not named.endswith(".jsonl"):
        raise OpenAIError("Invalid file format for Batch API. Must be .jsonl")
    if len(file.content) > state.config.openai.max_upload_bytes:
        raise OpenAIError("File is too large.")
    now, data = state.now(), bytes(file.content)
    stored = StoredFile(
        id=state.new_file_id(),
        filename=named,
        purpose=purpose,
        created=now,
        expires=now + _kept(form, state.config.openai.keep_files_s),
        lines=lambda: iter((data,)),
        usable_from=now + state.config.faults.file_lag_s if state.box.roll("file_lag") else now,
    )
    state.project(caller).files.add(stored)
    return stored


def _field(form: dict[str, Part], name: str) -> str:
    if name not in form:
        raise missing(name)
    return form[name].content.decode("utf-8", "replace")


def _kept(form: dict[str, Part], default: float) -> float:
    if "expires_after[seconds]" not in form and "expires_after[anchor]" not in form:
        return default
    return kept(_field(form, "expires_after[anchor]"), _field(form, "expires_after[seconds]"), "expires_after")


def kept(anchor: object, seconds: object, name: str) -> float:
    """How long a client wants a file kept."""
    if anchor != "created_at":
        raise OpenAIError(f"Invalid value for '{name}[anchor]': it must be 'created_at'.", f"{name}[anchor]")
    text = str(seconds)
    if not text.isdigit() or not SHORTEST_S <= int(text) <= LONGEST_S:
        message = f"Invalid value for '{name}[seconds]': it must be between {SHORTEST_S} and {LONGEST_S}."
        raise OpenAIError(message, f"{name}[seconds]")
    return float(text)


# ---------------------------------------------------------------- finding


def _files(state: State, caller: Caller) -> list[StoredFile]:
    now, project = state.now(), state.project(caller)
    project.advance(now)
    return list(project.files.newest_first(now))


def _find(state: State, caller: Caller, file_id: str) -> StoredFile:
    now, project = state.now(), state.project(caller)
    project.advance(now)
    file = project.files.find(file_id, now)
    if file is None:
        raise OpenAIError(f"No such File object: {file_id}", "id", None, "not_found_error")
    return file


def limit_of(request: Request, default: int, most: int) -> int:
    text = request.query.get("limit") or request.query.get("page_size") or str(default)
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise OpenAIError(f"Invalid 'limit': it must be between 1 and {most}.", "limit")
    return int(text)


def listed(data: Sequence[Mapping[str, object]], more: bool) -> dict[str, object]:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
