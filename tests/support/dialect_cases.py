"""Every dialect that the contract suite runs over, with samples of its provider's words."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.core.ports import Dialect, Parsed, RawRequest
from carpool.dialects import ANTHROPIC, COMPATIBLE_PROVIDERS, OPENAI, OpenAI
from tests.support.toy import TOY


@dataclass(frozen=True)
class Case:
    """One dialect. `lines` are result lines by result; `spoken` decodes what a replayed stream adds up to."""

    dialect: Dialect
    path: str
    headers: tuple[tuple[str, str], ...]
    params: dict[str, Any]
    answer: dict[str, Any]
    lines: dict[str, bytes]
    batch: dict[str, Any]
    errors: dict[int, dict[str, Any]]
    text_of_event: str  # what every event of a replayed answer begins with
    secrets: tuple[str, ...] = field(default=())
    upload: dict[str, Any] | None = None  # what the provider says of an upload, where there is one
    ended: dict[str, Any] = field(default_factory=dict)  # what changes of `batch` when all is done
    places: int = 1  # how many files of results that makes
    id_field: str = "id"
    paged: Callable[[list[dict[str, Any]], tuple[str, ...], bool], Any] = lambda data, ids, more: {
        "data": data,
        "has_more": more,
        "last_id": ids[-1] if ids else None,
    }
    counted: int = 3  # of the calls in `batch`, as it says
    expires: bool = True  # the batch says when
    next_page: str | None = "a"  # the cursor behind a page that ends with batch `a`
    unrun: bool = True  # lines tell of calls that never ran
    leaves_files: bool = True  # which the batch names
    stream_options: str = ""  # with which a stream tells its usage

    def raw(self, body: bytes | None = None, extra: tuple[tuple[str, str], ...] = ()) -> RawRequest:
        body = json.dumps(self.params).encode() if body is None else body
        return RawRequest("POST", self.path, "", (*self.headers, *extra), body)

    def named(self, name: str) -> dict[str, Any]:
        """The batch under another id."""
        return self.batch | {self.id_field: name}

    def page(self, *ids: str, more: bool = False) -> bytes:
        return json.dumps(self.paged([self.named(name) for name in ids], ids, more)).encode()


def line(result: dict[str, Any], custom_id: str = "nonce-1") -> bytes:
    return json.dumps({"custom_id": custom_id, "result": result}).encode()


def error(kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": "No."}, "request_id": "req_1"}


_ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-opus-5",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 6, "service_tier": "batch"},
}

_ANTHROPIC = Case(
    dialect=ANTHROPIC,
    path="/v1/messages",
    headers=(("anthropic-version", "2026-10-21"), ("authorization", "Bearer key-of-the-client"), ("host", "here")),
    params={"model": "claude-opus-5", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]},
    answer=_ANSWER,
    lines={
        "succeeded": line({"type": "succeeded", "message": _ANSWER}),
        "errored": line({"type": "errored", "error": error("invalid_request_error")}),
        "expired": line({"type": "expired"}),
        "canceled": line({"type": "canceled"}),
    },
    batch={
        "id": "msgbatch_1",
        "type": "message_batch",
        "processing_status": "in_progress",
        "request_counts": {"processing": 3, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
        "created_at": "2026-11-15T10:00:00Z",
        "expires_at": "2026-11-16T10:00:00Z",
        "ended_at": None,
        "cancel_initiated_at": None,
        "archived_at": None,
        "results_url": None,
    },
    errors={
        400: error("invalid_request_error"),
        401: error("authentication_error"),
        403: error("permission_error"),
        404: error("not_found_error"),
        413: error("request_too_large"),
        429: error("rate_limit_error"),
        500: error("api_error"),
        529: error("overloaded_error"),
    },
    text_of_event="event: ",
    secrets=("authorization", "x-api-key"),
    ended={
        "processing_status": "ended",
        "ended_at": "2026-11-15T11:00:00Z",
        "results_url": "https://api.example/v1/messages/batches/msgbatch_1/results",
    },
)

_RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1_795_000_000,
    "status": "completed",
    "model": "gpt-6-luna",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
        }
    ],
    "usage": {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 18,
    },
}


def openai_error(code: str | None) -> dict[str, Any]:
    return {"error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": code}}


def openai_line(status: int | None, body: dict[str, Any] | None = None, error: dict[str, Any] | None = None) -> bytes:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": body}
    return json.dumps({"id": "batch_req_1", "custom_id": "nonce-1", "response": response, "error": error}).encode()


_OPENAI = Case(
    dialect=OPENAI,
    path="/v1/responses",
    headers=(("authorization", "Bearer key-of-the-client"), ("openai-project", "proj_1"), ("host", "here")),
    params={"model": "gpt-6-luna", "input": "Hi", "max_output_tokens": 64},
    answer=_RESPONSE,
    lines={
        "succeeded": openai_line(200, _RESPONSE),
        "errored": openai_line(400, openai_error(None)),
        "expired": openai_line(None, error={"code": "batch_expired", "message": "Too late."}),
        "canceled": openai_line(None, error={"code": "batch_cancelled", "message": "Stopped."}),
    },
    batch={
        "id": "batch_1",
        "object": "batch",
        "endpoint": "/v1/responses",
        "errors": None,
        "input_file_id": "file-in",
        "completion_window": "24h",
        "status": "in_progress",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": 1_795_000_000,
        "in_progress_at": 1_795_000_010,
        "expires_at": 1_795_086_400,
        "completed_at": None,
        "request_counts": {"total": 3, "completed": 0, "failed": 0},
        "metadata": {"carpool_nonce": "n" * 10},
    },
    errors={
        400: openai_error(None),
        401: openai_error("invalid_api_key"),
        403: openai_error("unsupported_country_region_territory"),
        404: openai_error("model_not_found"),
        413: openai_error(None),
        429: openai_error("rate_limit_exceeded"),
        500: openai_error(None),
        529: openai_error("server_is_overloaded"),
    },
    text_of_event="event: ",
    secrets=("authorization", "openai-organization", "openai-project"),
    upload={"id": "file-in", "object": "file", "bytes": 1, "filename": "carpool-n.jsonl", "purpose": "batch"},
    ended={"status": "completed", "output_file_id": "file-out", "error_file_id": "file-err"},
    places=2,
)

CASES = {case.dialect.name: case for case in (_ANTHROPIC, _OPENAI)}

# ---------------------------------------------------------------- OpenAI-compatible providers

_CHAT = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_795_000_000,
    "model": "gpt-6-luna",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 6, "total_tokens": 18},
}
_NONCE = "n" * 10


def _compatible(name: str, **more: Any) -> Case:
    lines = {**_OPENAI.lines, "succeeded": openai_line(200, _CHAT)} | more.pop("lines", {})
    return replace(
        _OPENAI,
        dialect=OpenAI(COMPATIBLE_PROVIDERS[name]),
        path="/v1/chat/completions",
        params={"model": "gpt-6-luna", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64},
        answer=_CHAT,
        lines=lines,
        text_of_event="data: ",
        stream_options="usage",
        **more,
    )


def _flat(code: str | None) -> dict[str, Any]:
    return {"object": "error", **openai_error(code)["error"]}


def _xai_line(result: dict[str, Any]) -> bytes:
    return json.dumps({"batch_request_id": "nonce-1", "batch_result": result}).encode()


_TOGETHER = {
    "id": "7c9a0000-0000-4000-8000-000000000001",
    "status": "IN_PROGRESS",
    "progress": 0.0,
    "model_id": "m",
    "input_file_id": "file-in",
    "output_file_id": None,
    "error_file_id": None,
    "error": None,
    "created_at": "2026-11-15T10:00:00Z",
    "job_deadline": "2026-11-16T10:00:00Z",
}
_JOB = {
    "id": "job-1",
    "object": "batch",
    "input_files": ["file-in"],
    "endpoint": "/v1/chat/completions",
    "model": "m",
    "metadata": {"carpool_nonce": _NONCE},
    "errors": [],
    "status": "RUNNING",
    "created_at": 1_795_000_000,
    "total_requests": 3,
    "completed_requests": 0,
    "output_file": None,
    "error_file": None,
}
_COUNTED = {
    "batch_id": "batch_1",
    "name": f"carpool-{_NONCE}",
    "create_time": "2026-11-15T10:00:00Z",
    "expire_time": "2026-12-15T10:00:00Z",
    "cancel_time": None,
    "state": {"num_requests": 3, "num_pending": 3, "num_success": 0, "num_error": 0, "num_cancelled": 0},
}
COMPATIBLE_CASES = {
    "azure": _compatible(
        "azure",
        batch=_OPENAI.batch
        | {
            "status": "In_progress",
            "created_at": "2026-11-15T10:00:00Z",
            "expires_at": "2026-11-16T10:00:00Z",
            "request_counts": None,
            "output_file_id": "",
        },
        ended={"status": "Completed", "output_file_id": "file-out", "error_file_id": "file-err"},
        counted=0,
    ),
    "groq": _compatible("groq"),
    "together": _compatible(
        "together",
        batch=_TOGETHER,
        ended={"status": "COMPLETED", "output_file_id": "file-out", "error_file_id": "file-err"},
        paged=lambda data, ids, more: data,
        counted=0,
        next_page=None,
        lines={
            "succeeded": json.dumps(
                {"id": "br_1", "custom_id": "nonce-1", "response": {"status_code": 200, "body": _CHAT}}
            ).encode(),
            "errored": json.dumps(
                {"id": "br_1", "custom_id": "nonce-1", "error": {"code": "batch_client_error", "message": "No."}}
            ).encode(),
        },
    ),
    "mistral": _compatible(
        "mistral",
        batch=_JOB,
        ended={"status": "SUCCESS", "output_file": "file-out", "error_file": "file-err"},
        paged=lambda data, ids, more: {"object": "list", "data": data, "total": len(data)},
        expires=False,
        next_page=None,
        lines={"errored": openai_line(400, _flat(None))},
        errors={status: {"object": "error", **said["error"]} for status, said in _OPENAI.errors.items()},
    ),
    "xai": _compatible(
        "xai",
        batch=_COUNTED,
        ended={"state": {"num_requests": 3, "num_pending": 0, "num_success": 2, "num_error": 1, "num_cancelled": 0}},
        places=1,
        id_field="batch_id",
        paged=lambda data, ids, more: {"batches": data, "pagination_token": ids[-1] if more else None},
        expires=False,
        unrun=False,
        leaves_files=False,
        lines={
            "succeeded": _xai_line({"response": {"chat_get_completion": _CHAT}}),
            "errored": _xai_line({"error": {"code": 400, "message": "No."}}),
        },
        errors={status: {"code": "c", "error": said["error"]["message"]} for status, said in _OPENAI.errors.items()},
    ),
}

# ---------------------------------------------------------------- a dialect from outside

_SAID = {"model": "toy-1", "said": "Hello.", "tokens": [12, 6]}
_TOY = Case(
    dialect=TOY,
    path="/v1/toys",
    headers=(("x-toy-key", "key-of-the-client"), ("host", "here")),
    params={"model": "toy-1", "text": "Hi"},
    answer=_SAID,
    lines={
        "succeeded": json.dumps({"id": "nonce-1", "answer": _SAID}).encode(),
        "errored": json.dumps({"id": "nonce-1", "fault": "No."}).encode(),
    },
    batch={"id": "job-1", "nonce": _NONCE, "count": 3, "at": 1_795_000_000, "over": False},
    ended={"over": True},
    errors={status: {"fault": "No."} for status in _OPENAI.errors},
    text_of_event="data: ",
    secrets=("x-toy-key",),
    paged=lambda data, ids, more: data,
    next_page=None,
    unrun=False,
    leaves_files=False,
)
ALL = CASES | COMPATIBLE_CASES | {"toy": _TOY}


def canonical(parsed: Parsed) -> bytes:
    return parsed.document.canonical(without="stream")
