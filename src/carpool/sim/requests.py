"""The request of a simulated turn, and the response that the provider must have given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from carpool.core.ports import RawRequest
from carpool.mock import expected_openai_text, expected_text, fingerprint, openai_fingerprint
from carpool.mock.openai.embeddings import embeddings
from carpool.mock.openai.models import find_model
from carpool.sim.openai import CHAT
from carpool.sim.plan import MESSAGES, AgentPlan, TurnPlan

Body = dict[str, Any]
_MARK = "cache_control"


def body_of(turn: TurnPlan) -> Body:
    message: Body = {"role": "user", "content": turn.text}
    if turn.endpoint == MESSAGES and len(turn.text) % 3 == 0:
        message["content"] = [{"type": "text", "text": turn.text, _MARK: {"type": "ephemeral"}}]
    match turn.endpoint:
        case "/v1/messages":
            return {"model": turn.model, "max_tokens": turn.max_tokens, "messages": [message]}
        case "/v1/chat/completions":
            return {"model": turn.model, "max_completion_tokens": turn.max_tokens, "messages": [message]}
        case "/v1/responses":
            return {"model": turn.model, "max_output_tokens": turn.max_tokens, "input": turn.text}
        case "/v1/completions":
            return {"model": turn.model, "prompt": turn.text, "max_tokens": turn.max_tokens}
        case "/v1/moderations":
            return {"model": turn.model, "input": turn.text + (" [flag]" if len(turn.text) % 2 else "")}
        case _:
            return {"model": turn.model, "input": turn.text, "dimensions": 8}


def request(agent: AgentPlan, turn: TurnPlan, body: Body, retries: int = 0) -> RawRequest:
    """The request of a turn. `retries` is the retry count that the client states."""
    mark = (("x-stainless-retry-count", str(retries)),) if retries else ()
    return RawRequest("POST", turn.endpoint, "", (*agent.secret, *agent.headers, *mark), msgspec.json.encode(body))


def names(turn: TurnPlan, body: Body) -> Sequence[tuple[str, bool]]:
    """The names of this purchase in the provider's bill, each with whether it was bought on flex."""
    if turn.endpoint == MESSAGES:
        return tuple((name, False) for name in {fingerprint(body), fingerprint(_extended(body))})
    return ((openai_fingerprint(body), False), (openai_fingerprint(_flexed(body)), True))


def is_its_answer(turn: TurnPlan, body: Body, answer: bytes) -> bool:
    response = msgspec.json.decode(answer)
    match turn.endpoint:
        case "/v1/messages":
            said = "".join(block.get("text", "") for block in response["content"])
            return "[tool]" in turn.text or said in (expected_text(body), expected_text(_extended(body)))
        case "/v1/embeddings":
            spec = find_model(turn.model)
            return spec is not None and bool(response["data"] == embeddings(body, spec)["data"])
        case "/v1/completions":
            return bool(response["choices"][0]["text"] == f"echo:{openai_fingerprint(body)} {turn.text}")
        case "/v1/moderations":
            return bool(response["results"][0]["flagged"] == ("[flag]" in body["input"]))
        case _:
            return _text_of(turn.endpoint, response) in (
                expected_openai_text(body),
                expected_openai_text(_flexed(body)),
            )


def _text_of(endpoint: str, response: Body) -> str:
    if endpoint == CHAT:
        return str(response["choices"][0]["message"]["content"])
    parts = [part for item in response["output"] for part in item.get("content") or ()]
    return "".join(part.get("text", "") for part in parts if part["type"] == "output_text")


def _flexed(body: Body) -> Body:
    return {**body, "service_tier": "flex"}


def _extended(body: Body) -> Body:
    """With marks that live for an hour: the only edit that a plan for the prompt cache makes of these bodies."""
    messages = []
    for message in body["messages"]:
        content = message["content"]
        if isinstance(content, list):
            content = [{**block, _MARK: {**block[_MARK], "ttl": "1h"}} for block in content]
        messages.append({**message, "content": content})
    return {**body, "messages": messages}
