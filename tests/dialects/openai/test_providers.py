"""The differences of OpenAI-compatible providers, each as its documentation has it."""

from __future__ import annotations

import json
from email.parser import BytesParser
from typing import Any

import pytest

from carpool.core.errors import ConfigError, MalformedResponse
from carpool.core.model import Usage, custom_id
from carpool.core.ports import BatchReport, RawRequest
from carpool.dialects import COMPATIBLE_PROVIDERS, OpenAI, compatible_provider, configured_dialect
from carpool.dialects.openai.results import XaiResultPages

NONCE = "0123456789"
PAGES = XaiResultPages()
CHAT = "/v1/chat/completions"


def dialect(name: str) -> OpenAI:
    return OpenAI(COMPATIBLE_PROVIDERS[name])


def created(name: str) -> tuple[str, dict[str, Any]]:
    ask = dialect(name).create((), CHAT, NONCE, "file-1", "the-model")
    return ask.path, json.loads(ask.body)


def report(vendor: str, /, **said: Any) -> BatchReport:
    return dialect(vendor).report(json.dumps(said).encode())


# ---------------------------------------------------------------- who is who


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://api.groq.com/openai/v1", "groq"),
        ("https://API.GROQ.com", "groq"),
        ("https://my-resource.openai.azure.com/openai/v1", "azure"),
        ("https://x.services.ai.azure.com", "azure"),
        ("https://api.mistral.ai", "mistral"),
        ("https://api.together.xyz/v1", "together"),
        ("https://api.together.ai/v1", "together"),
        ("https://api.x.ai/v1", "xai"),
        ("http://127.0.0.1:8000/v1", "openai"),
        ("https://api.groq.com.evil.example/v1", "openai"),
        ("https://notapi.x.ai/v1", "openai"),
    ],
)
def test_a_vendor_is_known_by_its_host(url: str, name: str) -> None:
    assert compatible_provider(url).name == name


def test_a_name_wins_over_the_host() -> None:
    assert compatible_provider("https://api.groq.com", "openai").name == "openai"
    with pytest.raises(ConfigError, match="groq"):
        compatible_provider("https://api.groq.com", "cousin")


def test_a_dialect_without_relatives_stays_itself() -> None:
    assert configured_dialect("anthropic", "https://api.anthropic.com").name == "anthropic"


# ---------------------------------------------------------------- creates


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        (
            "groq",
            "/v1/batches",
            {
                "input_file_id": "file-1",
                "endpoint": CHAT,
                "completion_window": "24h",
                "metadata": {"carpool_nonce": NONCE},
            },
        ),
        ("together", "/v1/batches", {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}),
        (
            "mistral",
            "/v1/batch/jobs",
            {
                "input_files": ["file-1"],
                "endpoint": CHAT,
                "model": "the-model",
                "metadata": {"carpool_nonce": NONCE},
                "timeout_hours": 24,
            },
        ),
        ("xai", "/v1/batches", {"name": f"carpool-{NONCE}", "input_file_id": "file-1"}),
    ],
)
def test_each_has_words_of_its_own_for_a_create(name: str, path: str, body: dict[str, Any]) -> None:
    assert created(name) == (path, body)


@pytest.mark.parametrize(
    ("seconds", "said"), [(86_400.0, "24h"), (129_600.0, "36h"), (172_800.0, "2d"), (604_800.0, "7d")]
)
def test_a_longer_window_is_asked_for(seconds: float, said: str) -> None:
    longer = OpenAI(COMPATIBLE_PROVIDERS["groq"].with_window(seconds))
    assert json.loads(longer.create((), CHAT, NONCE, "file-1").body)["completion_window"] == said
    assert longer.limits.window == seconds
    job = OpenAI(COMPATIBLE_PROVIDERS["mistral"].with_window(seconds)).create((), CHAT, NONCE, "file-1", "m")
    assert json.loads(job.body)["timeout_hours"] == seconds / 3600


def form_of(name: str) -> dict[str, str]:
    one = dialect(name)
    head, _, tail = one.frame(NONCE)
    upload = one.uploads.upload((), NONCE)
    assert upload is not None
    kind = dict(upload.headers)["content-type"].encode()
    body = head + one.line(CHAT, custom_id(NONCE, 1), b'{"model":"m"}') + tail
    form = BytesParser().parsebytes(b"Content-Type: %b\r\n\r\n" % kind + body)
    return {
        str(part.get_param("name", header="content-disposition")): part.get_payload() for part in form.get_payload()
    }


def test_forms_differ() -> None:
    assert form_of("openai").keys() == {"purpose", "file"}
    together = form_of("together")
    assert (together["purpose"], together["file_name"]) == ("batch-api", f"carpool-{NONCE}.jsonl")
    assert form_of("azure")["expires_after[seconds]"] == "1209600"


@pytest.mark.parametrize(("name", "plain"), [("openai", False), ("groq", False), ("together", True), ("mistral", True)])
def test_lines_differ(name: str, plain: bool) -> None:
    line = json.loads(dialect(name).line(CHAT, custom_id(NONCE, 1), b'{"model":"m"}'))
    assert line.keys() == ({"custom_id", "body"} if plain else {"custom_id", "method", "url", "body"})


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("groq", "/v1/batches", "/v1/batches?after=c"),
        ("together", "/v1/batches", "/v1/batches"),
        (
            "mistral",
            "/v1/batch/jobs?page_size=100&order_by=-created",
            "/v1/batch/jobs?page_size=100&order_by=-created&page=c",
        ),
        ("xai", "/v1/batches?limit=7", "/v1/batches?limit=7&pagination_token=c"),
    ],
)
def test_lists_are_asked_for_as_each_has_them(name: str, first: str, second: str) -> None:
    assert dialect(name).listing((), None, 7).path == first
    assert dialect(name).listing((), "c", 7).path == second


def test_cancels() -> None:
    assert dialect("xai").cancel((), "batch_1").path == "/v1/batches/batch_1:cancel"
    assert dialect("mistral").cancel((), "job-1").path == "/v1/batch/jobs/job-1/cancel"


def test_only_together_is_asked_for_the_names_of_files() -> None:
    assert [name for name in COMPATIBLE_PROVIDERS if dialect(name).upload_names is not None] == ["together"]
    files = [{"id": "file-1", "filename": f"carpool-{NONCE}.jsonl"}, {"id": "file-2", "filename": "theirs.jsonl"}]
    assert dialect("together").uploads.nonces(json.dumps({"data": files}).encode()) == {"file-1": NONCE}
    with pytest.raises(MalformedResponse):
        dialect("together").uploads.nonces(b"[]")


def test_together_is_met_as_a_browser() -> None:
    one = dialect("together")
    uploads = one.uploads
    asks = [uploads.upload((), NONCE), uploads.list_files(()), one.listing((), None, 1), one.send(CHAT, (), b"{}")]
    assert all(dict(ask.headers)["user-agent"].startswith("Mozilla/") for ask in asks)


# ---------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("status", "ended", "cancelling"),
    [
        ("QUEUED", False, False),
        ("RUNNING", False, False),
        ("CANCELLATION_REQUESTED", False, True),
        ("SUCCESS", True, False),
        ("FAILED", True, False),
        ("TIMEOUT_EXCEEDED", True, False),
        ("CANCELLED", True, False),
    ],
)
def test_every_state_of_a_job_of_mistral(status: str, ended: bool, cancelling: bool) -> None:
    told = report("mistral", id="j", status=status, created_at=1, errors=[{"message": "Bad file.", "count": 1}])
    assert (told.ended, told.cancelling) == (ended, cancelling)
    if status == "FAILED":
        assert told.failure is not None
        assert told.failure.message == "Bad file."


@pytest.mark.parametrize(
    ("status", "ended", "cancelling"),
    [
        ("VALIDATING", False, False),
        ("IN_PROGRESS", False, False),
        ("CANCELING", False, True),
        ("COMPLETED", True, False),
        ("FAILED", True, False),
        ("EXPIRED", True, False),
        ("CANCELLED", True, False),
    ],
)
def test_every_state_of_a_job_of_together(status: str, ended: bool, cancelling: bool) -> None:
    told = report("together", id="u", status=status, created_at="2026-11-15T10:00:00Z", input_file_id="file-1")
    assert (told.ended, told.cancelling, told.source) == (ended, cancelling, "file-1")


@pytest.mark.parametrize(
    ("counts", "more", "ended", "cancelling", "failed"),
    [
        ((0, 0, 0, 0), {}, False, False, False),  # still being read
        ((3, 3, 0, 0), {}, False, False, False),
        ((3, 1, 2, 0), {}, False, False, False),
        ((3, 0, 2, 1), {}, True, False, False),
        ((3, 1, 2, 0), {"cancel_time": "2026-11-15"}, False, True, False),
        ((3, 0, 2, 0), {"cancel_time": "2026-11-15"}, True, False, False),
        ((0, 0, 0, 0), {"cancel_time": "2026-11-15", "cancel_by_xai_message": "Bad line."}, True, False, True),
        ((3, 0, 1, 0), {"cancel_time": "2026-11-15", "cancel_by_xai_message": "Enough."}, True, False, False),
    ],
)
def test_counters_tell_the_state_at_xai(
    counts: tuple[int, int, int, int], more: dict[str, Any], ended: bool, cancelling: bool, failed: bool
) -> None:
    names = ("num_requests", "num_pending", "num_success", "num_error")
    state = dict(zip(names, counts, strict=True))
    told = report("xai", batch_id="b", name=f"carpool-{NONCE}", create_time="2026-11-15", state=state, **more)
    assert (told.ended, told.cancelling, told.failure is not None) == (ended, cancelling, failed)
    assert told.nonce == NONCE
    assert told.results == (("/v1/batches/b/results?limit=250",) if ended else None)
    assert (told.ended_at is None) or ended  # a cancel that is under way is no end


def test_a_bare_date_never_seems_older_than_it_is() -> None:
    told = report("xai", batch_id="b", create_time="2026-11-15")
    assert told.created_at == report("xai", batch_id="b", create_time="2026-11-15T23:59:59Z").created_at


def test_a_strangers_name_is_no_nonce() -> None:
    for name in ("", "nightly", "carpool-", "carpool-../x", f"my-carpool-{NONCE}"):
        assert report("xai", batch_id="b", name=name).nonce == ""


def test_together_wraps_the_answer_to_a_create_only() -> None:
    job = {"id": "u", "status": "VALIDATING", "created_at": "2026-11-15T10:00:00Z", "input_file_id": "file-1"}
    assert report("together", job=job, warning=None) == report("together", **job)


def test_pages_are_counted_at_mistral() -> None:
    job = {"id": "j", "status": "RUNNING", "created_at": 1}
    full = json.dumps({"data": [job] * 100, "total": 250}).encode()
    assert dialect("mistral").page(full)[1] == "1"
    assert dialect("mistral").page(full, "1")[1] == "2"
    assert dialect("mistral").page(json.dumps({"data": [job] * 50}).encode(), "2")[1] is None


# ---------------------------------------------------------------- results


def test_pages_of_results() -> None:
    place = "/v1/batches/b/results?limit=250"
    body = json.dumps({"results": [{"a": 1}, {"b": 2}], "pagination_token": "t&1"}).encode()
    lines, following = PAGES.lines(place, body)
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"b": 2}]
    assert following == f"{place}&pagination_token=t%261"
    assert PAGES.lines(following, body)[1] == following  # the first token is not kept
    assert PAGES.lines(place, b'{"results":[],"pagination_token":"t"}') == ([], None)


def test_errors_in_results_at_xai() -> None:
    def line(error: Any) -> Any:
        said = {"batch_request_id": "n-1", "batch_result": {"error": error}}
        return dialect("xai").result_line(json.dumps(said).encode())

    assert (line("Went wrong.").status, line("Went wrong.").retryable) == (500, True)
    assert (line({"code": 400, "message": "Bad."}).status, line({"code": 400, "message": "Bad."}).retryable) == (
        400,
        False,
    )
    assert line({"code": 429, "message": "Later."}).retryable
    assert line({"code": 3, "message": "Odd."}).retryable
    assert "Went wrong." in line("Went wrong.").body.decode()


@pytest.mark.parametrize(
    ("code", "status", "again"), [("batch_client_error", 400, False), ("batch_server_error", 500, True)]
)
def test_errors_in_results_at_together(code: str, status: int, again: bool) -> None:
    said = {"id": "br_1", "custom_id": "n-1", "error": {"code": code, "message": "No."}}
    line = dialect("together").result_line(json.dumps(said).encode())
    assert (line.status, line.retryable) == (status, again)
    assert json.loads(line.body)["error"]["message"] == "No."


# ---------------------------------------------------------------- answers


def test_what_was_thought_is_paid_for_beside_the_completion_at_xai() -> None:
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 22,
        "completion_tokens_details": {"reasoning_tokens": 7},
    }
    body = json.dumps({"model": "grok-4.3", "usage": usage}).encode()
    assert dialect("xai").usage(body) == Usage(10, 12)
    assert dialect("openai").usage(body) == Usage(10, 5)
    tap = dialect("xai").usage_tap()
    tap.feed(b"data: %b\n\n" % body)
    assert tap.usage() == Usage(10, 12)


def test_usage_stands_elsewhere_in_groqs_streams() -> None:
    tap = dialect("groq").usage_tap()
    tap.feed(b'data: {"choices":[],"x_groq":{"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}}\n\n')
    assert tap.usage() == Usage(3, 4)


ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "x" * 5000}}],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}


def chunks(name: str) -> list[dict[str, Any]]:
    told = dialect(name).replay(json.dumps(ANSWER).encode())
    return [json.loads(event[6:]) for event in told if event.startswith(b"data: {")]


def test_a_stream_is_told_again_as_its_own_sdk_wants_it() -> None:
    calls = [part for chunk in chunks("mistral") for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": "x" * 5000}]
    assert len([1 for chunk in chunks("groq") for _ in chunk["choices"][0]["delta"].get("tool_calls", ())]) > 1
    assert [chunk.get("usage") for chunk in chunks("mistral")][-1] == ANSWER["usage"]
    assert chunks("groq")[-1]["x_groq"] == {"usage": ANSWER["usage"]}
    assert all("usage" not in chunk and "x_groq" not in chunk for chunk in chunks("openai"))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"object": "error", "message": "No.", "type": "invalid_request_error", "param": None, "code": 1}, "No."),
        (
            {"detail": [{"loc": ["body", "model"], "msg": "Field required"}, {"msg": "And this."}]},
            "Field required; And this.",
        ),
        ({"detail": "Not here."}, "Not here."),
        ({"code": "invalid-argument", "error": "Bad thing."}, "Bad thing."),
        ({"error": {"message": "As usual."}}, "As usual."),
    ],
)
def test_errors_are_read_in_every_shape(body: dict[str, Any], said: str) -> None:
    assert dialect("mistral").refusal(422, (), json.dumps(body).encode()).message == said


def test_groq_has_a_status_of_its_own_for_no_room() -> None:
    body = json.dumps({"error": {"message": "Full.", "type": "server_error", "code": "capacity_exceeded"}}).encode()
    assert dialect("groq").refusal(498, (), body).retryable
    assert not dialect("openai").refusal(498, (), body).retryable


def test_a_wrong_key_is_a_bad_request_at_xai() -> None:
    body = json.dumps({"code": "c", "error": "Incorrect API key provided."}).encode()
    assert dialect("xai").refusal(400, (), body).cannot_batch
    assert not dialect("groq").refusal(400, (), body).cannot_batch
    assert not dialect("xai").refusal(400, (), json.dumps({"error": "Bad temperature."}).encode()).cannot_batch


@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_road_that_is_not_there(status: int) -> None:
    refusal = dialect("openai").refusal(status, (), b"<html>")
    assert refusal.cannot_batch
    assert not refusal.retryable


# ---------------------------------------------------------------- what may ride


@pytest.mark.parametrize(
    ("name", "path", "rides"),
    [
        ("openai", "/v1/embeddings", True),
        ("azure", "/v1/responses", True),
        ("azure", "/v1/embeddings", False),
        ("groq", "/v1/responses", False),
        ("mistral", "/v1/embeddings", True),
        ("mistral", "/v1/completions", False),
        ("xai", "/v1/responses", False),
    ],
)
def test_endpoints(name: str, path: str, rides: bool) -> None:
    body = json.dumps({"model": "m", "input": "x", "prompt": "x"}).encode()
    parsed = dialect(name).parse(RawRequest("POST", path, "", (("authorization", "Bearer k"),), body))
    assert (parsed.unbatchable is None) is rides
    assert rides or COMPATIBLE_PROVIDERS[name].display_name in str(parsed.unbatchable)
