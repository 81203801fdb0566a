"""How OpenAI-compatible providers show the same batch, the list of batches, and a result."""

from typing import Any

from carpool.mock.core.clock import rfc3339

View = dict[str, Any]

_AZURE_CODES = {"invalid_url": "url_mismatch", "mismatched_model": "model_mismatch"}
_MISTRAL_STATES = {
    "validating": "QUEUED",
    "in_progress": "RUNNING",
    "finalizing": "RUNNING",
    "completed": "SUCCESS",
    "failed": "FAILED",
    "expired": "TIMEOUT_EXCEEDED",
    "cancelling": "CANCELLATION_REQUESTED",
    "cancelled": "CANCELLED",
}
_TOGETHER_STATES = {"finalizing": "IN_PROGRESS", "cancelling": "CANCELING"}
_MINE = range(400, 500)
_MONTH = 30 * 86_400


# ---------------------------------------------------------------- a batch


def openai(view: View) -> View:
    return {name: value for name, value in view.items() if name != "name"}


def azure(view: View) -> View:
    """States with a capital, times as text, no counts, and its own codes."""
    told = {name: _text(value) if name.endswith("_at") else value for name, value in openai(view).items()}
    if view["errors"] is not None:
        data = [{**one, "code": _AZURE_CODES.get(one["code"], one["code"])} for one in view["errors"]["data"]]
        told["errors"] = {"object": "list", "data": data}
    return {**told, "status": str(view["status"]).capitalize(), "request_counts": None}


def mistral(view: View) -> View:
    counts = view["request_counts"]
    return {
        "id": view["id"],
        "object": "batch",
        "input_files": [view["input_file_id"]],
        "endpoint": view["endpoint"],
        "model": view["model"],
        "agent_id": None,
        "metadata": view["metadata"],
        "errors": [{"message": message, "count": 1} for message in _complaints(view)],
        "status": _MISTRAL_STATES[view["status"]],
        "created_at": view["created_at"],
        "started_at": view["in_progress_at"],
        "completed_at": _ended_at(view),
        "total_requests": counts["total"],
        "completed_requests": counts["completed"] + counts["failed"],
        "succeeded_requests": counts["completed"],
        "failed_requests": counts["failed"],
        "output_file": view["output_file_id"],
        "error_file": view["error_file_id"],
        "outputs": None,
    }


def together(view: View) -> View:
    """No counts and no metadata."""
    status = view["status"]
    return {
        "id": view["id"],
        "user_id": "user-mock",
        "status": _TOGETHER_STATES.get(status, status.upper()),
        "progress": 100.0 if status == "completed" else 0.0,
        "model_id": view["model"],
        "endpoint": view["endpoint"],
        "input_file_id": view["input_file_id"],
        "output_file_id": view["output_file_id"],
        "error_file_id": view["error_file_id"],
        "error": next(iter(_complaints(view)), None),
        "created_at": _text(view["created_at"]),
        "completed_at": _text(_ended_at(view)),
        "job_deadline": _text(view["expires_at"]),
        "file_size_bytes": 1,
    }


def xai(view: View) -> View:
    """No status: counters. Times are dates here. A batch with an invalid file is cancelled."""
    counts, over = view["request_counts"], _ended_at(view) is not None
    done = counts["completed"] + counts["failed"]
    ended = view["cancelling_at"] or view["failed_at"]
    return {
        "batch_id": view["id"],
        "name": view["name"] or "",
        "create_time": _day(view["created_at"]),
        "expire_time": _day(view["created_at"] + _MONTH),
        "cancel_time": _day(ended),
        "cancel_by_xai_message": next(iter(_complaints(view)), None),
        "state": {
            "num_requests": counts["total"],
            "num_pending": 0 if over else counts["total"] - done,
            "num_success": counts["completed"],
            "num_error": counts["failed"],
            "num_cancelled": counts["total"] - done if over else 0,
        },
    }


# ---------------------------------------------------------------- the answer to a create, and lists


def bare(view: View) -> tuple[View, int]:
    return view, 200


def wrapped(view: View) -> tuple[View, int]:
    return {"job": view, "warning": None}, 201


def page(data: list[View], more: bool, token: str | None) -> View:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}


def array(data: list[View], more: bool, token: str | None) -> list[View]:
    return data


def numbered(data: list[View], more: bool, token: str | None) -> View:
    return {"object": "list", "data": data, "total": len(data)}


def tokened(data: list[View], more: bool, token: str | None) -> View:
    return {"batches": data, "pagination_token": token if more else None}


# ---------------------------------------------------------------- a result


def line(unique: str, custom_id: str, response: Any, error: Any) -> View | None:
    return {"id": f"batch_req_{unique}", "custom_id": custom_id, "response": response, "error": error}


def ran_line(unique: str, custom_id: str, response: Any, error: Any) -> View | None:
    """Requests that never ran are not mentioned."""
    return None if response is None else {**(line(unique, custom_id, response, None) or {}), "id": f"batch-{unique}"}


def together_line(unique: str, custom_id: str, response: Any, error: Any) -> View | None:
    told: View = {"id": f"br_{unique}", "custom_id": custom_id}
    if response is None:
        return None
    status = response["status_code"]
    if status < 400:
        return {**told, "response": {"status_code": status, "body": response["body"]}}
    code = "batch_client_error" if status in _MINE else "batch_server_error"
    return {**told, "error": {"code": code, "message": response["body"]["error"]["message"]}}


def xai_line(unique: str, custom_id: str, response: Any, error: Any) -> View | None:
    if response is None:
        return None
    if response["status_code"] < 400:
        return {
            "batch_request_id": custom_id,
            "batch_result": {"response": {"chat_get_completion": response["body"]}},
        }
    return {"batch_request_id": custom_id, "batch_result": {"error": response["body"]["error"]}}


# ---------------------------------------------------------------- parts


def _complaints(view: View) -> list[str]:
    return [one["message"] for one in (view["errors"] or {"data": ()})["data"]]


def _ended_at(view: View) -> int | None:
    return next(
        (view[f"{how}_at"] for how in ("completed", "failed", "expired", "cancelled") if view[f"{how}_at"]), None
    )


def _text(at: int | None) -> str | None:
    return None if at is None else rfc3339(at)


def _day(at: int | None) -> str | None:
    return None if at is None else rfc3339(at)[:10]
