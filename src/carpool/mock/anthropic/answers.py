"""Builds the answer to a digested request. A pure function of the request, the usage and the ids."""

from typing import Any

from carpool.mock.anthropic.cache import CacheUse
from carpool.mock.anthropic.digest import Digest, ToolUse, echo
from carpool.mock.core.bill import Kind, Usage
from carpool.mock.core.filler import arguments

Message = dict[str, Any]
NO_CACHE = CacheUse(0, 0, 0)


def usage_of(digest: Digest, cached: CacheUse = NO_CACHE) -> Usage:
    thinking = digest.output_tokens // 2 if digest.directive in ("think", "blocks") else 0
    return Usage(
        input=digest.input_tokens - cached.read - cached.write_5m - cached.write_1h,
        output=digest.output_tokens,
        write_5m=cached.write_5m,
        write_1h=cached.write_1h,
        read=cached.read,
        thinking=thinking,
        searches=1 if digest.directive == "blocks" else 0,
        geo_us=digest.geo_us and digest.spec.geo_priced,
        fast=digest.fast,
    )


def message(digest: Digest, usage: Usage, message_id: str, kind: Kind) -> Message:
    refused = digest.directive == "refuse"
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": digest.model,
        "content": _content(digest) if digest.output_tokens else [],
        "stop_reason": _stop_reason(digest),
        "stop_sequence": None,
        "stop_details": {"type": "refusal", "category": "cyber", "explanation": "Asked to refuse."}
        if refused
        else None,
        "container": None,
        "diagnostics": None,
        "usage": _wire_usage(usage, kind),
    }


def _wire_usage(usage: Usage, kind: Kind) -> dict[str, Any]:
    searched = {"web_search_requests": usage.searches, "web_fetch_requests": 0} if usage.searches else None
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.write_5m + usage.write_1h,
        "cache_read_input_tokens": usage.read,
        "cache_creation": {"ephemeral_5m_input_tokens": usage.write_5m, "ephemeral_1h_input_tokens": usage.write_1h},
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": usage.thinking},
        "server_tool_use": searched,
        "service_tier": "batch" if kind == "batch" else "standard",
        "inference_geo": "us" if usage.geo_us else "global",
        "speed": "fast" if usage.fast else "standard",
    }


def _stop_reason(digest: Digest) -> str:
    if digest.directive == "max" or not digest.output_tokens:
        return "max_tokens"
    if digest.directive == "refuse":
        return "refusal"
    return "tool_use" if digest.tool is not None else "end_turn"


def _content(digest: Digest) -> list[dict[str, Any]]:
    text = _text(digest)
    if digest.tool is not None:
        use = _tool_use(digest, digest.tool)
        return [use] if digest.tool.alone else [text, use]
    if digest.directive == "think":
        return [_thinking(digest), text]
    if digest.directive == "blocks":
        return _every_block(digest)
    return [text]


def _text(digest: Digest) -> dict[str, Any]:
    """Without `citations`, which only a text that cites has: there are clients that refuse a null."""
    return {"type": "text", "text": digest.structured or echo(digest.fingerprint, digest.snippet)}


def _thinking(digest: Digest) -> dict[str, Any]:
    # The signature ends in padding and holds a slash and a plus: which careless re-encoding would break.
    return {"type": "thinking", "thinking": "Let me think. Yes.", "signature": f"EqQB/{digest.fingerprint}+aB=="}


def _tool_use(digest: Digest, tool: ToolUse) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{digest.fingerprint}", "name": tool.name, "input": tool.input}


def _every_block(digest: Digest) -> list[dict[str, Any]]:
    use = f"srvtoolu_{digest.fingerprint}"
    url, title = "https://example.com/a", "A page"
    cited = {
        "type": "web_search_result_location",
        "cited_text": "So",
        "encrypted_index": "Eo8=",
        "title": title,
        "url": url,
    }
    found = {"type": "web_search_result", "encrypted_content": "Ev0D=", "page_age": None, "title": title, "url": url}
    page = {"type": "text", "media_type": "text/plain", "data": "So it is."}
    document = {"type": "document", "source": page, "title": title}
    fetched = {"type": "web_fetch_result", "url": url, "content": document, "retrieved_at": None}
    ran = {"content": [], "return_code": 0, "stderr": "", "stdout": "42\n"}
    view = {"file_type": "text", "content": "x = 1", "num_lines": 1, "start_line": 1, "total_lines": 1}
    tools = [{"type": "tool_reference", "tool_name": "lookup"}]
    return [
        _thinking(digest),
        {"type": "redacted_thinking", "data": f"EmwK/{digest.fingerprint}=="},
        {"type": "server_tool_use", "id": use, "name": "web_search", "input": {"query": digest.snippet}},
        {"type": "web_search_tool_result", "tool_use_id": use, "content": [found]},
        {"type": "web_fetch_tool_result", "tool_use_id": use, "content": fetched},
        _result("code_execution", use, {"type": "code_execution_result", **ran}),
        _result("bash_code_execution", use, {"type": "bash_code_execution_result", **ran}),
        _result("text_editor_code_execution", use, {"type": "text_editor_code_execution_view_result", **view}),
        _result("tool_search", use, {"type": "tool_search_tool_search_result", "tool_references": tools}),
        {"type": "container_upload", "file_id": "file_mock"},
        {**_text(digest), "citations": [cited]},
        _tool_use(digest, ToolUse("lookup", arguments(None, digest.snippet))),
    ]


def _result(tool: str, use: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"{tool}_tool_result", "tool_use_id": use, "content": content}
