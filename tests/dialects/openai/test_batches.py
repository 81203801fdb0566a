"""OpenAI's files and batches, as far as they differ from every provider's."""

from __future__ import annotations

import json
from email.parser import BytesParser
from typing import Any

import pytest
from openai.types import Batch, FileObject

from carpool.core.errors import MalformedResponse
from carpool.core.model import Usage, custom_id
from carpool.core.ports import BatchReport
from carpool.dialects import OPENAI
from carpool.dialects.openai.providers import OPENAI as PROVIDER
from carpool.dialects.openai.uploads import OpenAIUploads

NONCE = "0123456789"
UPLOADS = OpenAIUploads(PROVIDER)
CHAT = "/v1/chat/completions"
BATCH: dict[str, Any] = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": CHAT,
    "errors": None,
    "input_file_id": "file-in",
    "completion_window": "24h",
    "status": "validating",
    "output_file_id": None,
    "error_file_id": None,
    "created_at": 1_795_000_000,
    "expires_at": 1_795_086_400,
    "request_counts": {"total": 0, "completed": 0, "failed": 0},
    "metadata": {"carpool_nonce": NONCE},
}


def report(**more: Any) -> BatchReport:
    Batch.model_validate(BATCH | more)  # what is tested here is what the SDK knows
    return OPENAI.report(json.dumps(BATCH | more).encode())


def line(response: Any = None, error: Any = None) -> bytes:
    return json.dumps({"id": "batch_req_1", "custom_id": "n-1", "response": response, "error": error}).encode()


# ---------------------------------------------------------------- to the provider


def test_the_upload_is_a_form_with_one_call_in_a_line() -> None:
    bodies = [b'{"model":"m",\r\n "messages":[]}', b'{"text":"a\\nb"}']
    head, between, tail = OPENAI.frame(NONCE)
    lines = [OPENAI.line(CHAT, custom_id(NONCE, at), body) for at, body in enumerate(bodies)]
    upload = UPLOADS.upload((("x", "y"),), NONCE)
    assert upload is not None
    kind = dict(upload.headers)["content-type"]
    form = BytesParser().parsebytes(b"Content-Type: %b\r\n\r\n" % kind.encode() + head + between.join(lines) + tail)
    purpose, file = form.get_payload()
    assert purpose.get_param("name", header="content-disposition") == "purpose"
    assert purpose.get_payload() == "batch"
    assert file.get_filename() == f"carpool-{NONCE}.jsonl"
    sent = file.get_payload(decode=True).splitlines()
    assert [json.loads(one)["body"] for one in sent] == [json.loads(body) for body in bodies]
    assert json.loads(sent[1]) == {
        "custom_id": custom_id(NONCE, 1),
        "method": "POST",
        "url": CHAT,
        "body": {"text": "a\nb"},
    }


def test_no_body_can_end_the_form() -> None:
    _, _, tail = OPENAI.frame(NONCE)
    evil = b'{"a":1\r\n%b}' % tail.strip()
    assert b"\r\n" not in OPENAI.line(CHAT, custom_id(NONCE, 1), evil)
    assert b"\n" not in OPENAI.line(CHAT, custom_id(NONCE, 1), evil)


def test_the_create_names_file_endpoint_and_nonce() -> None:
    ask = OPENAI.create((("x", "y"),), "/v1/embeddings", NONCE, "file-1")
    assert (ask.method, ask.path) == ("POST", "/v1/batches")
    assert json.loads(ask.body) == {
        "input_file_id": "file-1",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
        "metadata": {"carpool_nonce": NONCE},
    }


def test_lists_are_never_longer_than_the_provider_allows() -> None:
    assert OPENAI.listing((), None, 1000).path == "/v1/batches?limit=100"
    assert OPENAI.listing((), "a&b", 5).path == "/v1/batches?limit=5&after=a%26b"


def test_a_file_is_what_the_sdk_takes_for_one() -> None:
    told = {"id": "file-1", "object": "file", "bytes": 1, "created_at": 1, "filename": "a", "purpose": "batch"}
    FileObject.model_validate(told | {"status": "processed"})
    assert UPLOADS.file_id(json.dumps(told).encode()) == "file-1"


# ---------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("status", "ended", "cancelling"),
    [
        ("validating", False, False),
        ("in_progress", False, False),
        ("finalizing", False, False),
        ("cancelling", False, True),
        ("completed", True, False),
        ("expired", True, False),
        ("cancelled", True, False),
        ("failed", True, False),
    ],
)
def test_every_state(status: str, ended: bool, cancelling: bool) -> None:
    told = report(status=status)
    assert (told.ended, told.cancelling) == (ended, cancelling)
    assert (told.results is not None) is ended
    assert (told.failure is not None) is (status == "failed")


def test_a_state_from_the_future_is_neither_the_end_nor_polled_for_ever() -> None:
    odd = BATCH | {"status": "pondering"}
    assert not OPENAI.report(json.dumps(odd).encode()).ended
    assert OPENAI.report(json.dumps(odd | {"completed_at": 1_795_000_100}).encode()).ended


def test_output_comes_before_errors_and_all_three_files_are_the_batchs_own() -> None:
    told = report(status="completed", output_file_id="file-out", error_file_id="file-err")
    assert told.results == ("/v1/files/file-out/content", "/v1/files/file-err/content")
    assert told.files == ("file-in", "file-out", "file-err")
    assert report(status="completed", error_file_id="file-err").results == ("/v1/files/file-err/content",)
    assert report(status="cancelled").results == ()


def test_a_completed_batch_whose_files_are_not_named_yet_is_not_done() -> None:
    counts = {"total": 2, "completed": 2, "failed": 0}
    assert not report(status="completed", request_counts=counts).ended
    assert report(status="cancelled", request_counts=counts).ended  # there the counts can't be trusted


def test_partial_results_of_an_expired_batch_are_kept() -> None:
    told = report(status="expired", output_file_id="file-out", error_file_id="file-err", expired_at=1_795_086_401)
    assert told.ended
    assert len(told.results or ()) == 2
    assert told.ended_at == 1_795_086_401


def test_nonces_tell_ours_from_strangers() -> None:
    assert report().nonce == NONCE
    assert report(metadata=None).nonce == ""
    assert report(metadata={"other": "x"}).nonce == ""
    odd = OPENAI.report(json.dumps(BATCH | {"metadata": {"carpool_nonce": 7}}).encode())
    assert odd.nonce == ""


def test_the_quirks_of_relatives_are_understood() -> None:
    odd = BATCH | {
        "status": "Completed",
        "created_at": "2026-11-15T10:00:00Z",
        "request_counts": None,
        "output_file_id": "",
        "error_file_id": "file-err",
    }
    told = OPENAI.report(json.dumps(odd).encode())
    assert (told.ended, told.count, told.results) == (True, 0, ("/v1/files/file-err/content",))
    assert told.created_at == 1_794_736_800.0


# ---------------------------------------------------------------- batches that failed as a whole


def failed(code: str, message: str = "No.") -> BatchReport:
    problem = {"code": code, "message": message, "line": None, "param": None}
    return report(status="failed", errors={"object": "list", "data": [problem]}, failed_at=1_795_000_001)


def test_a_full_queue_means_later_and_not_bad_input() -> None:
    said = (
        "Enqueued token limit reached for gpt-4o in organization org-1. Limit: 90,000 enqueued tokens. Please try "
        "again once some in_progress batches have been completed."
    )
    failure = failed("token_limit_exceeded", said).failure
    assert failure is not None
    assert (failure.queue_full, failure.retryable, failure.queue_tokens) == (True, True, 90_000)
    failure = failed("token_limit_exceeded").failure
    assert failure is not None
    assert (failure.queue_full, failure.queue_tokens) == (True, None)


@pytest.mark.parametrize("code", ["mismatched_model", "invalid_json_line", "duplicate_custom_id", "invalid_url", ""])
def test_bad_input_is_not_tried_again(code: str) -> None:
    failure = failed(code).failure
    assert failure is not None
    assert not failure.retryable
    assert not failure.queue_full
    assert not failure.cannot_batch


def test_a_model_without_batches_is_known_as_such() -> None:
    failure = failed("model_not_found").failure
    assert failure is not None
    assert failure.cannot_batch
    assert failure.of_model


def test_a_failed_batch_without_reasons_is_still_one() -> None:
    failure = report(status="failed", errors=None).failure
    assert failure is not None
    assert failure.message.endswith(".")


def test_a_batch_that_failed_with_results_was_bought() -> None:
    told = report(status="failed", output_file_id="file-out")
    assert told.failure is None
    assert told.results == ("/v1/files/file-out/content",)


# ---------------------------------------------------------------- lines


def test_an_answered_error_keeps_the_providers_words() -> None:
    body = {"error": {"message": "Bad tool.", "type": "invalid_request_error", "param": "tools", "code": None}}
    read = OPENAI.result_line(line({"status_code": 400, "request_id": "r", "body": body}))
    assert (read.result, read.status, read.retryable) == ("errored", 400, False)
    assert json.loads(read.body) == body


@pytest.mark.parametrize(
    ("status", "code", "again"), [(500, None, True), (429, None, True), (429, "insufficient_quota", False)]
)
def test_passing_trouble_is_tried_again(status: int, code: str | None, again: bool) -> None:
    body = {"error": {"message": "No.", "type": "x", "param": None, "code": code}}
    assert OPENAI.result_line(line({"status_code": status, "request_id": "r", "body": body})).retryable is again


def test_what_never_ran_may_run_elsewhere() -> None:
    expired = OPENAI.result_line(line(error={"code": "batch_expired", "message": "This request could not be run."}))
    assert (expired.result, expired.status, expired.retryable) == ("expired", 504, True)
    assert "could not be run" in json.loads(expired.body)["error"]["message"]
    other = OPENAI.result_line(line(error={"code": "who_knows", "message": "Hm."}))
    assert (other.result, other.status, other.retryable) == ("errored", 500, True)


def test_an_error_without_words_is_still_json() -> None:
    read = OPENAI.result_line(line({"status_code": 502, "request_id": "r", "body": "<html>"}))
    assert (read.status, read.retryable) == (502, True)
    assert "502" in json.loads(read.body)["error"]["message"]


@pytest.mark.parametrize("response", [{"status_code": 200, "body": "x"}, {"status_code": 200}, {"status_code": 302}])
def test_an_answer_that_is_none_is_garbled(response: dict[str, Any]) -> None:
    with pytest.raises(MalformedResponse):
        OPENAI.result_line(line(response))


def test_embeddings_have_usage_too() -> None:
    body = {
        "object": "list",
        "data": [],
        "model": "text-embedding-3-small",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    read = OPENAI.result_line(line({"status_code": 200, "request_id": "r", "body": body}))
    assert (read.model, read.usage) == ("text-embedding-3-small", Usage(input_tokens=5))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("status", [400, 404])
def test_a_file_that_is_not_there_yet_is_no_verdict_on_batches(status: int) -> None:
    said = "Cannot find file file-1, or project proj_1 does not have access to it."
    body = json.dumps({"error": {"message": said, "type": "invalid_request_error", "code": None}}).encode()
    refusal = OPENAI.refusal(status, (), body)
    assert (refusal.file_not_ready, refusal.cannot_batch, refusal.retryable) == (True, False, True)


def test_a_refused_tier_is_told_from_a_refused_call() -> None:
    error = {"message": "Invalid service_tier.", "type": "invalid_request_error", "param": "service_tier", "code": None}
    assert OPENAI.refusal(400, (), json.dumps({"error": error}).encode()).of_tier
    assert not OPENAI.refusal(400, (), json.dumps({"error": error | {"param": "tools"}}).encode()).of_tier
