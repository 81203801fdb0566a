"""The ASGI app: finds the endpoint, and puts the provider's headers on every answer."""

from carpool.mock.anthropic import batches_api, messages_api, models_api
from carpool.mock.core import bill_api
from carpool.mock.core.clock import http_date
from carpool.mock.core.errors import ApiError
from carpool.mock.core.http import Receive, Reply, Request, Scope, Send, json_reply, read_request
from carpool.mock.core.routes import find_route, route
from carpool.mock.core.state import State, credential_of
from carpool.mock.openai.api import answer_openai, speaks_openai

_BATCHES = "/v1/messages/batches"
ROUTES = (
    route("messages", "POST", "/v1/messages", messages_api.create_message),
    route("count_tokens", "POST", "/v1/messages/count_tokens", messages_api.count),
    route("create", "POST", _BATCHES, batches_api.create, "batch"),
    route("list", "GET", _BATCHES, batches_api.listing, "batch"),
    route("retrieve", "GET", f"{_BATCHES}/{{id}}", batches_api.retrieve, "batch"),
    route("cancel", "POST", f"{_BATCHES}/{{id}}/cancel", batches_api.cancel, "batch"),
    route("delete", "DELETE", f"{_BATCHES}/{{id}}", batches_api.delete, "batch"),
    route("results", "GET", f"{_BATCHES}/{{id}}/results", batches_api.results, "batch"),
    route("models", "GET", "/v1/models", models_api.listing),
    route("model", "GET", "/v1/models/{id}", models_api.retrieve),
)
_OPEN = {("HEAD", "/"), ("HEAD", "/api/hello"), ("GET", "/"), ("GET", "/api/hello")}


class App:
    def __init__(self, state: State) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request. Raises ConnectionCut if the connection is to be closed instead."""
        if scope["type"] != "http":
            raise ValueError(f"this app speaks HTTP only, not {scope['type']}")
        request = read_request(scope, receive, self._state.new_id("req"))
        headers: dict[str, str] = {}
        try:
            reply = await self._answer(request, headers)
        except ApiError as error:
            reply = json_reply(error.body(request.request_id), error.status, error.headers)
        headers |= self._common_headers(request)
        await reply.send(send, headers, head_only=request.method == "HEAD")

    def _common_headers(self, request: Request) -> dict[str, str]:
        config = self._state.config
        date = http_date(self._state.now() + config.faults.clock_offset_s)
        if speaks_openai(request):
            return {"date": date}
        return {
            "date": date,
            "request-id": request.request_id,
            "anthropic-organization-id": config.organization,
        }

    async def _answer(self, request: Request, headers: dict[str, str]) -> Reply:
        """The endpoint's response; the headers of the caller's limits are put into `headers`, also if it fails."""
        if (request.method, request.path) in _OPEN:
            return Reply(200)
        if (request.method, request.path) == ("GET", bill_api.PATH):
            self._state.advance()
            return bill_api.show(self._state.bill)
        if speaks_openai(request):
            return await answer_openai(self._state, request, headers)
        found = find_route(ROUTES, request)
        if found is None:
            raise ApiError("not_found_error", f"{request.method} {request.path} is not an endpoint")
        way, parts = found
        self._state.seen.add(way.name, credential_of(request))
        caller = self._state.caller(request)
        try:
            return await way.handler(self._state, caller, request, *parts)
        finally:
            headers |= self._state.limit_headers(caller, way.kind)
