"""OpenAI's endpoints beside Anthropic's: chat completions, responses, embeddings, models."""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from carpool.mock.bill import Charge, Usage
from carpool.mock.errors import ApiError, ConnectionCut
from carpool.mock.faults import AFTER_SYNC
from carpool.mock.http import Reply, Request, json_reply
from carpool.mock.openai_answers import Answer, completion, response, usage_of
from carpool.mock.openai_bill import price_nano
from carpool.mock.openai_cache import OpenAICache
from carpool.mock.openai_digest import Asked, Endpoint, digest, openai_fingerprint
from carpool.mock.openai_embeddings import embeddings
from carpool.mock.openai_errors import OpenAIError, error_body, status_of
from carpool.mock.openai_models import CATALOGUE, OpenAISpec, find_model, model_info
from carpool.mock.openai_sse import chunks, data, event, events
from carpool.mock.openai_validate import check_embeddings
from carpool.mock.state import Caller, State, credential_of

_OWN = re.compile(r"/v1/(chat|responses|embeddings|completions|moderations|files|batches)(/.*)?")
_MODELS = re.compile(r"/v1/models(?:/([^/]+))?")
_NO_KEY = (
    "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer auth "
    "(i.e. Authorization: Bearer YOUR_KEY)."
)


def speaks_openai(request: Request) -> bool:
    """Whose wire this is: by its path, and where both have it, by Anthropic's headers."""
    if _MODELS.fullmatch(request.path):
        return not {"anthropic-version", "x-api-key"} & request.headers.keys()
    return _OWN.fullmatch(request.path) is not None


@dataclass(frozen=True, slots=True)
class _Bought:
    """A purchase that stands on the bill, whether or not its client stays to hear the answer."""

    answer: Answer
    took: float


class OpenAIDesk:
    def __init__(self, state: State) -> None:
        self._state = state
        self._caches: defaultdict[str, OpenAICache] = defaultdict(OpenAICache)
        self._posts: dict[str, tuple[str, Callable[[Caller, Request], Awaitable[Reply]]]] = {
            "/v1/chat/completions": ("chat", self._chat),
            "/v1/responses": ("responses", self._responses),
            "/v1/embeddings": ("embeddings", self._embeddings),
        }

    async def answer(self, request: Request, headers: dict[str, str]) -> Reply:
        """The endpoint's reply, errors included; what it owes to the caller's limits goes into `headers`."""
        headers |= {"x-request-id": request.request_id, "openai-version": "2020-10-01"}
        headers["openai-organization"] = self._state.config.organization
        try:
            return await self._find(request, headers)
        except ApiError as error:
            return json_reply(error_body(error), status_of(error), error.headers)

    async def _find(self, request: Request, headers: dict[str, str]) -> Reply:
        if request.method == "GET" and "upgrade" in request.headers and request.path == "/v1/responses":
            return Reply(426, b"", {"upgrade": "websocket"})  # no WebSocket here: Codex then posts
        listed = _MODELS.fullmatch(request.path)
        name, handler = self._posts.get(request.path, ("", None))
        if listed is not None and request.method == "GET":
            self._caller("models", request)
            return _models(listed[1])
        if handler is None or request.method != "POST":
            message = f"Invalid URL ({request.method} {request.path})"
            raise OpenAIError(message, kind="not_found_error")
        caller = self._caller(name, request)
        try:
            return await handler(caller, request)
        finally:
            headers |= self._limits(caller)

    def _caller(self, name: str, request: Request) -> Caller:
        state, credential = self._state, credential_of(request)
        state.seen.add(name, credential)
        if not credential:
            raise OpenAIError(_NO_KEY, kind="authentication_error")
        if state.config.keys is not None and credential not in state.config.keys:
            raise OpenAIError("Incorrect API key provided.", None, "invalid_api_key", "authentication_error")
        return Caller(credential, state.workspace(credential))

    def _limits(self, caller: Caller) -> dict[str, str]:
        bucket, now = self._state.bucket(caller, "sync"), self._state.now()
        return {
            "x-ratelimit-limit-requests": str(bucket.limit),
            "x-ratelimit-remaining-requests": str(bucket.remaining(now)),
            "x-ratelimit-reset-requests": f"{bucket.full_at(now) - now:.3f}s",
            "x-ratelimit-limit-tokens": "40000000",
            "x-ratelimit-remaining-tokens": "40000000",
            "x-ratelimit-reset-tokens": "0s",
        }

    # -- what is sold

    async def _chat(self, caller: Caller, request: Request) -> Reply:
        asked, bought = await self._talk("chat", caller, request)
        if asked.stream:
            broken = data({"error": {"message": "Overloaded", "type": "server_error", "param": None, "code": None}})
            return self._stream(list(chunks(bought.answer, asked.include_usage)), bought.took, broken)
        return await self._whole(bought)

    async def _responses(self, caller: Caller, request: Request) -> Reply:
        asked, bought = await self._talk("responses", caller, request)
        if asked.stream:
            parts = list(events(bought.answer))
            failed = {**bought.answer, "status": "failed", "output": [], "usage": None, "incomplete_details": None}
            failed["error"] = {"code": "server_error", "message": "Overloaded"}
            return self._stream(parts, bought.took, event("response.failed", len(parts) // 2, response=failed))
        return await self._whole(bought)

    async def _embeddings(self, caller: Caller, request: Request) -> Reply:
        state = self._state
        await state.arrive(caller)
        body, _ = await request.json(state.config.max_message_bytes)
        spec = check_embeddings(body)
        answer = embeddings(body, spec)
        usage = Usage(answer["usage"]["prompt_tokens"], 0)
        name = openai_fingerprint(body)
        self._charge(caller, request, spec, body["model"], usage, f"emb_{name}", name)
        await state.box.strike(AFTER_SYNC, accepted=True)
        return await self._whole(_Bought(answer, state.config.sync_latency.draw(state.dice.sync)))

    async def _talk(self, endpoint: Endpoint, caller: Caller, request: Request) -> tuple[Asked, _Bought]:
        state = self._state
        await state.arrive(caller)
        body, _ = await request.json(state.config.max_message_bytes)
        asked = digest(endpoint, body, state.config.mean_output_tokens)
        now = state.now()
        usage = usage_of(asked, self._caches[caller.workspace.id].use(asked.prefixes, asked.spec, now))
        build, prefix = (completion, "chatcmpl") if endpoint == "chat" else (response, "resp")
        answer = build(asked, usage, state.new_id(prefix), int(now))
        self._charge(caller, request, asked.spec, asked.model, usage, answer["id"], asked.fingerprint, asked.tier)
        await state.box.strike(AFTER_SYNC, accepted=True)
        return asked, _Bought(answer, state.config.sync_latency.draw(state.dice.sync))

    def _charge(
        self,
        caller: Caller,
        request: Request,
        spec: OpenAISpec,
        model: str,
        usage: Usage,
        answer_id: str,
        fingerprint: str,
        tier: str = "default",
    ) -> None:
        self._state.bill.add(
            Charge(
                workspace=caller.workspace.id,
                credential=caller.credential,
                kind="sync",
                batch_id=None,
                custom_id=None,
                request_id=request.request_id,
                message_id=answer_id,
                model=model,
                usage=usage,
                nano_usd=price_nano(spec, usage, tier),
                at=self._state.now(),
                fingerprint=fingerprint,
            )
        )

    # -- how it is told

    async def _whole(self, bought: _Bought) -> Reply:
        await asyncio.sleep(bought.took)
        reply = json_reply(bought.answer, headers={"openai-processing-ms": str(int(bought.took * 1000))})
        if isinstance(reply.body, bytes) and self._state.box.roll("sync_cut_midway"):
            return Reply(200, _half(reply.body), {**reply.headers, "content-length": str(len(reply.body))})
        return reply

    def _stream(self, parts: Sequence[bytes], took: float, broken: bytes) -> Reply:
        box = self._state.box
        cut, fails = box.roll("sync_cut_midway"), box.roll("sync_stream_error")
        first = took * self._state.config.first_token_share
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


def _models(name: str | None) -> Reply:
    if name is None:
        return json_reply({"object": "list", "data": [model_info(spec) for spec in CATALOGUE.values()]})
    spec = find_model(name)
    if spec is None:
        message = f"The model '{name}' does not exist"
        raise OpenAIError(message, "model", "model_not_found", "not_found_error")
    return json_reply(model_info(spec))
