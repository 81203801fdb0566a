"""Builds the answers of the OpenAI mock. Pure functions of the request, the usage and the ids."""

from typing import Any

from carpool.mock.core.bill import Usage
from carpool.mock.openai.cache import CacheUse
from carpool.mock.openai.digest import Asked
from carpool.mock.openai.providers import TABLE

Answer = dict[str, Any]

_REFUSAL = "I can't help with that."
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "store", "temperature", "text", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "truncation", "user"),
)
_DEFAULTS: Answer = {
    "metadata": {},
    "parallel_tool_calls": True,
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}


def usage_of(asked: Asked, cached: CacheUse) -> Usage:
    return Usage(
        input=asked.input_tokens - cached.read - cached.written,
        output=asked.output_tokens,
        write_5m=cached.written,
        read=cached.read,
        thinking=asked.output_tokens // 2 if asked.directive == "think" else 0,
    )


# ---------------------------------------------------------------- chat completions


def completion(asked: Asked, usage: Usage, completion_id: str, created: int) -> Answer:
    apart = usage.thinking if TABLE[asked.spec.house].reasoning_apart else 0
    choice = {"index": 0, "message": _message(asked), "logprobs": None, "finish_reason": _finish(asked)}
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": asked.model,
        "choices": [choice] + [{**choice, "index": n} for n in range(1, asked.body.get("n") or 1)],
        "usage": {
            "prompt_tokens": usage.total_input,
            "completion_tokens": usage.output - apart,
            "total_tokens": usage.total_input + usage.output,
            "prompt_tokens_details": {
                "cached_tokens": usage.read,
                "cache_write_tokens": usage.write_5m,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": usage.thinking,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "service_tier": asked.tier,
        "system_fingerprint": "fp_mock",
    }


def _message(asked: Asked) -> Answer:
    refused = asked.directive == "refuse"
    message: Answer = {
        "role": "assistant",
        "content": None if refused or asked.tool else asked.text,
        "refusal": _REFUSAL if refused else None,
        "annotations": [],
    }
    if asked.tool is not None:
        field = "arguments" if asked.tool.kind == "function" else "input"
        called = {"name": asked.tool.name, field: asked.tool.argument}
        message["tool_calls"] = [{"id": f"call_{asked.fingerprint}", "type": asked.tool.kind, asked.tool.kind: called}]
    return message


def _finish(asked: Asked) -> str:
    if asked.directive == "max":
        return "length"
    return "tool_calls" if asked.tool is not None else "stop"


# ---------------------------------------------------------------- responses


def response(asked: Asked, usage: Usage, response_id: str, created: int) -> Answer:
    cut = asked.directive == "max"
    echoed = {name: asked.body.get(name) for name in _ECHOED}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "incomplete" if cut else "completed",
        "background": False,
        "completed_at": None if cut else created,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **echoed,
        **{name: value for name, value in _DEFAULTS.items() if echoed[name] is None},
        "model": asked.model,
        "output": _output(asked),
        "service_tier": asked.tier,
        "usage": {
            "input_tokens": usage.total_input,
            "input_tokens_details": {"cached_tokens": usage.read, "cache_write_tokens": usage.write_5m},
            "output_tokens": usage.output,
            "output_tokens_details": {"reasoning_tokens": usage.thinking},
            "total_tokens": usage.total_input + usage.output,
        },
    }


def _output(asked: Asked) -> list[Answer]:
    thought = [_reasoning(asked)] if asked.directive == "think" else []
    return [*thought, _called(asked) if asked.tool is not None else _spoken(asked)]


def _spoken(asked: Asked) -> Answer:
    part: Answer = {"type": "output_text", "text": asked.text, "annotations": [], "logprobs": []}
    if asked.directive == "refuse":
        part = {"type": "refusal", "refusal": _REFUSAL}
    return {
        "id": f"msg_{asked.fingerprint}",
        "type": "message",
        "status": "incomplete" if asked.directive == "max" else "completed",
        "role": "assistant",
        "content": [part],
    }


def _called(asked: Asked) -> Answer:
    tool = asked.tool
    assert tool is not None
    call = {"call_id": f"call_{asked.fingerprint}", "name": tool.name, "status": "completed"}
    if tool.kind == "custom":
        return {"id": f"ctc_{asked.fingerprint}", "type": "custom_tool_call", **call, "input": tool.argument}
    return {"id": f"fc_{asked.fingerprint}", "type": "function_call", **call, "arguments": tool.argument}


def _reasoning(asked: Asked) -> Answer:
    # The hidden part ends in padding and holds a slash and a plus: which careless re-encoding would break.
    sealed = "reasoning.encrypted_content" in (asked.body.get("include") or ())
    hidden = {"encrypted_content": f"gAAAA/{asked.fingerprint}+aB=="} if sealed else {}
    summary = [{"type": "summary_text", "text": "Let me think. Yes."}]
    return {"id": f"rs_{asked.fingerprint}", "type": "reasoning", "summary": summary, **hidden}
