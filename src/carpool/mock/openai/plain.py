"""Legacy completions and moderations: no tools, no cache, one short answer."""

from typing import Any

from carpool.mock.anthropic.digest import SNIPPET
from carpool.mock.core.bill import Usage
from carpool.mock.openai.digest import Asked, openai_fingerprint
from carpool.mock.openai.validate import Body, check_completions, check_moderations

_CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm"),
    *("self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic"),
)
_SIXTEEN = 16  # default length of a completion


def read_completion(body: Any, mean_output: int) -> Asked:
    spec = check_completions(body)
    name, prompt = openai_fingerprint(body), body["prompt"]
    most = body.get("max_tokens") or _SIXTEEN
    return Asked(
        spec=spec,
        model=body["model"],
        fingerprint=name,
        text=f"echo:{name} {prompt[:SNIPPET]}".rstrip(),
        input_tokens=_tokens(prompt),
        output_tokens=1 + int(name, 16) % min(most, 2 * mean_output - 1),
        body=body,
        endpoint="completions",
    )


def read_moderation(body: Any) -> Asked:
    spec = check_moderations(body)
    return Asked(
        spec=spec,
        model=body.get("model", spec.id),
        fingerprint=openai_fingerprint(body),
        text="",
        input_tokens=sum(map(_tokens, _inputs(body))),
        output_tokens=0,
        body=body,
        endpoint="moderations",
    )


def text_completion(asked: Asked, usage: Usage, completion_id: str, created: int) -> Body:
    return {
        "id": completion_id,
        "object": "text_completion",
        "created": created,
        "model": asked.model,
        "choices": [{"text": asked.text, "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": usage.total_input,
            "completion_tokens": usage.output,
            "total_tokens": usage.total_input + usage.output,
        },
    }


def moderation(asked: Asked, moderation_id: str) -> Body:
    """Flags inputs that ask for it."""
    return {
        "id": moderation_id,
        "model": asked.model,
        "results": [_judged("[flag]" in _text(one)) for one in _inputs(asked.body)],
    }


def _judged(flagged: bool) -> Body:
    return {
        "flagged": flagged,
        "categories": {name: flagged and name == "violence" for name in _CATEGORIES},
        "category_scores": {name: 0.9 if flagged and name == "violence" else 0.001 for name in _CATEGORIES},
        "category_applied_input_types": {name: ["text"] for name in _CATEGORIES},
    }


def _inputs(body: Body) -> list[Any]:
    given = body["input"]
    return given if isinstance(given, list) else [given]


def _text(one: Any) -> str:
    return one if isinstance(one, str) else str(one.get("text", ""))


def _tokens(one: Any) -> int:
    return 1 + len(_text(one).encode()) // 4
