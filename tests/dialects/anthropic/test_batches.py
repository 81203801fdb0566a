"""Requests to the batch endpoints, their reports, and their result lines."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from carpool.core.errors import MalformedResponse, Misuse
from carpool.core.model import Usage, custom_id
from carpool.core.ports import BatchReport
from carpool.dialects import ANTHROPIC

POOL = (("anthropic-beta", "a,b"), ("anthropic-version", "2026-10-21"), ("x-tenant", "blue"))
BATCH = {
    "id": "msgbatch_01HkcTjaV5uDC8jWR4ZsDV8d",
    "type": "message_batch",
    "processing_status": "in_progress",
    "request_counts": {"processing": 100, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0},
    "created_at": "2026-11-15T18:37:24.100435Z",
    "expires_at": "2026-11-16T18:37:24.100435Z",
    "ended_at": None,
    "cancel_initiated_at": None,
    "archived_at": None,
    "results_url": None,
    "of_the_future": {"a": 1},
}
CREATED = datetime(2026, 11, 15, 18, 37, 24, 100435, tzinfo=UTC).timestamp()


def report(**fields: Any) -> BatchReport:
    return ANTHROPIC.report(json.dumps(BATCH | fields).encode())


# ---------------------------------------------------------------- requests


def test_the_requests_of_a_batchs_life() -> None:
    name = BATCH["id"]
    create = ANTHROPIC.create(POOL, "/v1/messages", "n", None)
    assert (create.method, create.path) == ("POST", "/v1/messages/batches")
    assert create.headers == (*POOL, ("content-type", "application/json"), ("accept-encoding", "identity"))
    bare = (*POOL, ("accept-encoding", "identity"))
    asks = {
        ANTHROPIC.listing(POOL, None, 1000): ("GET", "?limit=1000"),
        ANTHROPIC.listing(POOL, "m&x", 5000): ("GET", "?limit=1000&after_id=m%26x"),
        ANTHROPIC.listing(POOL, None, 0): ("GET", "?limit=1"),
        ANTHROPIC.retrieve(POOL, name): ("GET", f"/{name}"),
        ANTHROPIC.cancel(POOL, name): ("POST", f"/{name}/cancel"),
        ANTHROPIC.results(POOL, *ANTHROPIC.results_at(name)): ("GET", f"/{name}/results"),
    }
    for ask, (method, tail) in asks.items():
        assert (ask.method, ask.path, ask.headers, ask.body) == (method, f"/v1/messages/batches{tail}", bare, b"")


def test_a_create_is_what_the_provider_expects() -> None:
    bodies = [b'{"model": "m", "n":1.0}', b' {"model":"n"}\n']
    lines = [ANTHROPIC.line("/v1/messages", custom_id("n" * 10, at), body) for at, body in enumerate(bodies)]
    before, between, after = ANTHROPIC.frame("n")
    create = json.loads(before + between.join(lines) + after)
    assert [request["params"]["model"] for request in create["requests"]] == ["m", "n"]
    assert [request["custom_id"] for request in create["requests"]] == [custom_id("n" * 10, at) for at in range(2)]
    assert len(lines[0] + between) == len(bodies[0]) + ANTHROPIC.line_overhead("/v1/messages")


@pytest.mark.parametrize("name", ["", "a" * 65, "a.b", "a/b", 'a"', "ä", "a\n"])
def test_names_that_the_provider_would_refuse(name: str) -> None:
    with pytest.raises(Misuse):
        ANTHROPIC.line("/v1/messages", name, b"{}")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a?b", "a#b", "a%2e", "a\r\nx: y", "@host"])
def test_no_id_can_steer_a_request_elsewhere(name: str) -> None:
    with pytest.raises(Misuse):
        ANTHROPIC.results_at(name)
    with pytest.raises(MalformedResponse):
        report(id=name)


# ---------------------------------------------------------------- reports


def test_a_batch_under_way() -> None:
    assert report() == BatchReport(BATCH["id"], False, False, 100, CREATED, CREATED + 86400, None, None, False)


def test_a_batch_that_ended() -> None:
    told = report(
        processing_status="ended",
        ended_at="2026-11-15T19:37:24.100435+01:00",
        results_url="https://evil.example/steal?key=1",
        archived_at="2026-12-15T00:00:00Z",
        request_counts={"processing": 0, "succeeded": 90, "errored": 5, "canceled": 3, "expired": 2, "paused": 1},
    )
    assert (told.ended, told.count, told.archived) == (True, 101, True)
    assert told.ended_at == CREATED
    assert told.results == (f"/v1/messages/batches/{BATCH['id']}/results",)


def test_states() -> None:
    assert report(processing_status="canceling").cancelling
    assert not report(processing_status="canceling").ended
    assert not report(processing_status="napping").ended
    assert report(processing_status="failed", ended_at=BATCH["created_at"]).ended


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-15T18:37:24.100435000Z",
        "2026-11-15t18:37:24.100435z",
        "2026-11-15T18:37:24.100435",
        BATCH["created_at"],
    ],
)
def test_times(text: str) -> None:
    assert report(created_at=text).created_at == CREATED


@pytest.mark.parametrize(
    "fields",
    [
        {"id": 7},
        {"created_at": "yesterday"},
        {"created_at": None},
        {"request_counts": None},
        {"request_counts": {"processing": -1}},
        {"processing_status": None},
        {"expires_at": "x"},
    ],
    ids=str,
)
def test_reports_that_can_not_be_understood(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedResponse):
        report(**fields)
    with pytest.raises(MalformedResponse):
        ANTHROPIC.page(json.dumps({"data": [BATCH, BATCH | fields], "has_more": False}).encode())


def test_pages() -> None:
    listed = {"data": [BATCH | {"id": "b"}, BATCH | {"id": "a"}], "has_more": True, "first_id": "b", "last_id": "a"}
    reports, after = ANTHROPIC.page(json.dumps(listed).encode())
    assert ([told.provider_id for told in reports], after) == (["b", "a"], "a")
    assert ANTHROPIC.page(json.dumps(listed | {"last_id": None}).encode())[1] == "a"
    assert ANTHROPIC.page(json.dumps(listed | {"has_more": False}).encode())[1] is None
    assert ANTHROPIC.page(b'{"data":[],"has_more":true,"first_id":null,"last_id":null}') == ([], None)


# ---------------------------------------------------------------- result lines


def test_a_success_keeps_its_bytes() -> None:
    message = rb'{ "model":"m", "content":[{"text":"\u00fc", "n":1.0}], "usage":{"input_tokens":3,"output_tokens":4} }'
    line = ANTHROPIC.result_line(
        b'{"result":{"message":%b ,"type":"succeeded"}, "custom_id":"c", "new":1}\r\n' % message
    )
    assert (line.custom_id, line.status, line.body, line.model) == ("c", 200, message, "m")
    assert line.usage == Usage(3, 4)


def test_a_success_without_readable_usage_is_still_one() -> None:
    line = ANTHROPIC.result_line(
        b'{"custom_id":"c","result":{"type":"succeeded","message":{"usage":{"input_tokens":"x"}}}}'
    )
    assert (line.status, line.usage, line.model) == (200, None, "")


@pytest.mark.parametrize(
    ("kind", "status", "retryable"),
    [
        ("invalid_request_error", 400, False),
        ("authentication_error", 401, False),
        ("billing_error", 402, False),
        ("permission_error", 403, False),
        ("not_found_error", 404, False),
        ("conflict_error", 409, False),
        ("request_too_large", 413, False),
        ("rate_limit_error", 429, True),
        ("api_error", 500, True),
        ("timeout_error", 504, True),
        ("overloaded_error", 529, True),
        ("batch_expired", 500, True),
    ],
)
def test_errors_carry_the_providers_words_and_status(kind: str, status: int, retryable: bool) -> None:
    inner = b'{"type":"%b", "message":"No \\u00fc.","details":[1.0]}' % kind.encode()
    error = b'{"type":"error","error":%b,"request_id":"req_1"}' % inner
    line = ANTHROPIC.result_line(b'{"custom_id":"c","result":{"type":"errored","error":%b}}' % error)
    assert (line.result, line.status, line.retryable, line.body, line.usage) == (
        "errored",
        status,
        retryable,
        error,
        None,
    )
    bare = ANTHROPIC.result_line(b'{"custom_id":"c","result":{"type":"errored","error":%b}}' % inner)
    assert (bare.status, bare.body) == (status, b'{"type":"error","error":%b}' % inner)


def test_a_spent_limit_is_not_tried_again() -> None:
    inner = b'{"type":"rate_limit_error","message":"m","details":{"error_code":"enforced_spend_limit_reached"}}'
    error = b'{"type":"error","error":%b}' % inner
    line = ANTHROPIC.result_line(b'{"custom_id":"c","result":{"type":"errored","error":%b}}' % error)
    assert (line.status, line.retryable) == (429, False)


@pytest.mark.parametrize(("result", "kind"), [("expired", "timeout_error"), ("canceled", "conflict_error")])
def test_calls_that_were_never_made(result: str, kind: str) -> None:
    line = ANTHROPIC.result_line(b'{"custom_id":"c","result":{"type":"%b"}}' % result.encode())
    assert json.loads(line.body)["error"]["type"] == kind


@pytest.mark.parametrize(
    "result",
    [
        b'{"type":"napping"}',
        b'{"type":"succeeded"}',
        b'{"type":"succeeded","message":null}',
        b'{"type":"errored"}',
        b'{"type":"errored","error":{}}',
        b'{"type":"errored","error":7}',
        b"{}",
        b"null",
    ],
)
def test_lines_that_can_not_be_understood(result: bytes) -> None:
    with pytest.raises(MalformedResponse):
        ANTHROPIC.result_line(b'{"custom_id":"c","result":%b}' % result)
