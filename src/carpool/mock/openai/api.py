"""OpenAI's endpoints on the same port as Anthropic's: which API a request uses, and what answers it."""

import re
from functools import lru_cache

from carpool.mock.core.errors import ApiError
from carpool.mock.core.http import Reply, Request, json_reply
from carpool.mock.core.routes import Route, find_route, route
from carpool.mock.core.state import Caller, State, credential_of
from carpool.mock.openai import batches_api as openai_batches_api
from carpool.mock.openai import files_api as openai_files_api
from carpool.mock.openai import sync as openai_sync
from carpool.mock.openai.errors import OpenAIError
from carpool.mock.openai.providers import TABLE
from carpool.mock.openai.sale import PATHS

_OWN = re.compile(r"/v1/(chat|responses|embeddings|completions|moderations|files|batch|batches)(/.*)?")
_MODELS = re.compile(r"/v1/models(?:/([^/]+))?")
_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)

_FILES = "/v1/files"
_SYNC = (
    *(route(name, "POST", path, openai_sync.call) for path, name in PATHS.items()),
    route("models", "GET", "/v1/models", openai_sync.models),
    route("models", "GET", "/v1/models/{id}", openai_sync.model),
)


_PAGED = (route("results", "GET", "/v1/batches/{id}/results", openai_batches_api.results, "batch"),)


@lru_cache
def _routes(vendor: str) -> tuple[Route, ...]:
    habits = TABLE[vendor]
    batches = habits.batches
    return (
        *_SYNC,
        route("upload", "POST", habits.uploads, openai_files_api.upload, "batch"),
        route("files", "GET", _FILES, openai_files_api.listing, "batch"),
        route("file", "GET", f"{_FILES}/{{id}}", openai_files_api.retrieve, "batch"),
        route("delete", "DELETE", f"{_FILES}/{{id}}", openai_files_api.delete, "batch"),
        route("results", "GET", f"{_FILES}/{{id}}/content", openai_files_api.content, "batch"),
        route("create", "POST", batches, openai_batches_api.create, "batch"),
        route("list", "GET", batches, openai_batches_api.listing, "batch"),
        route("retrieve", "GET", f"{batches}/{{id}}", openai_batches_api.retrieve, "batch"),
        route("cancel", "POST", f"{batches}/{{id}}{habits.cancel}", openai_batches_api.cancel, "batch"),
        *(
            (route("results", "GET", f"{batches}/{{id}}/results", openai_batches_api.results, "batch"),)
            if habits.pages_results
            else ()
        ),
    )


def speaks_openai(request: Request) -> bool:
    """Which API this is: by its path, and if both have it, by Anthropic's headers."""
    if _MODELS.fullmatch(request.path):
        return not {"anthropic-version", "x-api-key"} & request.headers.keys()
    return _OWN.fullmatch(request.path) is not None


async def answer_openai(state: State, request: Request, headers: dict[str, str]) -> Reply:
    """The endpoint's response, including errors; the headers of the caller's limits are put into `headers`."""
    headers |= {"x-request-id": request.request_id, "openai-version": "2020-10-01"}
    headers["openai-organization"] = state.config.organization
    try:
        return await _answer(state, request, headers)
    except ApiError as error:
        habits = state.config.openai.habits
        return json_reply(habits.error(error), habits.status(error), error.headers)


async def _answer(state: State, request: Request, headers: dict[str, str]) -> Reply:
    if request.method == "GET" and "upgrade" in request.headers and request.path == "/v1/responses":
        return Reply(426, b"", {"upgrade": "websocket"})  # no WebSocket here: Codex then posts
    own = state.config.openai
    found = find_route(_routes(own.vendor), request)
    versioned = own.api_version is None or request.query.get("api-version") == own.api_version
    if found is None or not versioned:
        raise OpenAIError(f"Invalid URL ({request.method} {request.path})", kind="not_found_error")
    way, parts = found
    if way.kind == "batch" and own.no_batches is not None:
        return Reply(own.no_batches, b"There is nothing here.", {"content-type": "text/plain"})
    if (
        way.kind == "batch"
        and own.habits.asks_browser
        and not request.headers.get("user-agent", "").startswith("Mozilla/")
    ):
        return Reply(403, b"error code: 1010", {"content-type": "text/plain"})
    caller = _caller(state, way.name, request)
    try:
        return await way.handler(state, caller, request, *parts)
    finally:
        if way.kind == "sync":  # which headers the batch endpoints send is not known, so they send none
            headers |= _limits(state, caller)


def _caller(state: State, name: str, request: Request) -> Caller:
    credential = credential_of(request)
    state.seen.add(name, credential)
    if not credential:
        raise OpenAIError(_NO_KEY, kind="authentication_error")
    if state.config.keys is not None and credential not in state.config.keys:
        raise OpenAIError("Incorrect API key provided.", None, "invalid_api_key", "authentication_error")
    return Caller(credential, state.workspace(credential))


def _limits(state: State, caller: Caller) -> dict[str, str]:
    bucket, now = state.bucket(caller, "sync"), state.now()
    return {
        "x-ratelimit-limit-requests": str(bucket.limit),
        "x-ratelimit-remaining-requests": str(bucket.remaining(now)),
        "x-ratelimit-reset-requests": f"{bucket.full_at(now) - now:.3f}s",
        "x-ratelimit-limit-tokens": "40000000",
        "x-ratelimit-remaining-tokens": "40000000",
        "x-ratelimit-reset-tokens": "0s",
    }
