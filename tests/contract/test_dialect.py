"""What every dialect promises, whatever its provider."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import dialects
from carpool.core.errors import BadCall, CarpoolError, ConfigError, MalformedResponse, Misuse
from carpool.core.model import custom_id
from carpool.core.ports import BatchReport, ResponseEnd
from tests.support.dialect_cases import ALL, CASES, COMPATIBLE_CASES, Case, canonical

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(params=sorted(ALL))
def case(request: pytest.FixtureRequest) -> Case:
    return ALL[request.param]


def test_every_dialect_is_under_contract() -> None:
    assert set(CASES) == set(dialects.DIALECTS)
    assert {*COMPATIBLE_CASES, "openai"} == set(dialects.COMPATIBLE_PROVIDERS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_dialects_are_found_by_name(name: str) -> None:
    assert dialects.get(name) is CASES[name].dialect


def test_an_unknown_name_is_a_mistake_in_the_config() -> None:
    with pytest.raises(ConfigError, match="anthropic"):
        dialects.get("esperanto")


# ---------------------------------------------------------------- from clients


def test_a_body_without_stream_stays_as_it_came(case: Case) -> None:
    body = json.dumps(case.params, indent=3).encode()
    parsed = case.dialect.parse(case.raw(body))
    assert parsed.body == body
    assert parsed.model == case.params["model"]
    assert not parsed.stream
    assert not parsed.retry
    assert parsed.unbatchable is None


@pytest.mark.parametrize("stream", [True, False])
def test_only_stream_is_taken_out(case: Case, stream: bool) -> None:
    parsed = case.dialect.parse(case.raw(json.dumps(case.params | {"stream": stream, "later": 1.0}).encode()))
    assert parsed.stream is stream
    assert parsed.body == json.dumps(case.params | {"later": 1.0}).encode()


@settings(max_examples=60)
@given(extra=st.dictionaries(st.text(), JSON, max_size=4), stream=st.booleans() | st.none(), ascii_only=st.booleans())
@pytest.mark.parametrize("name", sorted(ALL))
def test_what_was_parsed_parses_to_the_same(name: str, extra: dict, stream: bool | None, ascii_only: bool) -> None:
    case = ALL[name]
    params = extra | case.params | ({} if stream is None else {"stream": stream})
    first = case.dialect.parse(case.raw(json.dumps(params, ensure_ascii=ascii_only).encode()))
    again = case.dialect.parse(case.raw(first.body))
    assert (again.body, canonical(again), again.stream) == (first.body, canonical(first), False)
    assert json.loads(first.body) == {key: value for key, value in params.items() if key != "stream"}
    line = case.dialect.line(case.path, custom_id("n" * 10, 7), first.body)
    assert first.body in line


def test_equal_requests_have_equal_canonical_bodies(case: Case) -> None:
    turned = dict(reversed(case.params.items())) | {"stream": True}
    assert canonical(case.dialect.parse(case.raw(json.dumps(turned, indent=1).encode()))) == canonical(
        case.dialect.parse(case.raw())
    )
    other = case.params | {"later": 1}
    assert canonical(case.dialect.parse(case.raw(json.dumps(other).encode()))) != canonical(
        case.dialect.parse(case.raw())
    )


def test_secrets_travel_apart(case: Case) -> None:
    parsed = case.dialect.parse(case.raw())
    assert parsed.secret
    assert {name for name, _ in parsed.secret} <= set(case.secrets)
    assert not {name for name, _ in parsed.headers} & set(case.secrets)
    assert "key-of-the-client" not in str(parsed.headers)


def test_unknown_headers_keep_calls_apart_and_noise_does_not(case: Case) -> None:
    plain = case.dialect.parse(case.raw()).headers
    noisy = (("user-agent", "x"), ("traceparent", "00-1"), ("x-carpool-budget", "1m"), ("x-stainless-lang", "js"))
    assert case.dialect.parse(case.raw(extra=noisy)).headers == plain
    assert case.dialect.parse(case.raw(extra=(("x-my-tenant", "blue"),))).headers != plain


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":"\xff"}', b'{"a":NaN}']
)
def test_what_is_no_request_is_the_callers_fault(case: Case, body: bytes) -> None:
    with pytest.raises(BadCall) as caught:
        case.dialect.parse(case.raw(body))
    assert str(caught.value).endswith(".")


@settings(max_examples=150)
@given(body=st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ud8e0-+1.null stream', max_size=60).map(str.encode))
@pytest.mark.parametrize("name", sorted(ALL))
def test_no_foreign_exception_escapes_from_any_bytes(name: str, body: bytes) -> None:
    case = ALL[name]
    asked = (
        lambda: case.dialect.parse(case.raw(body)),
        lambda: case.dialect.report(body),
        lambda: case.dialect.page(body),
        lambda: case.dialect.uploads and case.dialect.uploads.file_id(body),
        lambda: case.dialect.upload_names and case.dialect.upload_names.nonces(body),
        lambda: case.dialect.result_pages and case.dialect.result_pages.lines("/v1/results?limit=1", body),
        lambda: case.dialect.result_line(body),
        lambda: list(case.dialect.replay(body)),
    )
    for ask in asked:
        try:
            ask()
        except CarpoolError:
            continue
    case.dialect.usage(body)
    case.dialect.refusal(500, (), body)
    case.dialect.stream_error(body)
    tap = case.dialect.usage_tap()
    tap.feed(body)
    tap.usage()
    tap.end(whole=False)


# ---------------------------------------------------------------- to the provider


def test_a_create_is_sound_and_its_overhead_is_told(case: Case) -> None:
    body = case.dialect.parse(case.raw()).body
    before, between, after = case.dialect.frame("n" * 10)
    lines = [case.dialect.line(case.path, custom_id("n" * 10, ticket), body) for ticket in range(3)]
    create = before + between.join(lines) + after
    assert all(custom_id("n" * 10, ticket).encode() in create for ticket in range(3))
    cost = 3 * (len(body) + case.dialect.line_overhead(case.path))
    assert 0 <= cost - len(between.join(lines)) <= 3


def test_every_line_costs_the_same_whatever_its_body(case: Case) -> None:
    name = custom_id("n" * 10, 1)
    body = json.dumps(case.params, indent=2).replace("\n", "\r\n").encode()
    assert len(case.dialect.line(case.path, name, body)) == len(case.dialect.line(case.path, name, b"")) + len(body)
    assert case.params.items() <= _nested(json.loads(case.dialect.line(case.path, name, body))).items()


def _nested(line: dict) -> dict:
    return next(part for part in line.values() if isinstance(part, dict))


def test_lines_are_uploaded_where_a_create_does_not_carry_them(case: Case) -> None:
    uploads = case.dialect.uploads
    assert (uploads is None) is (case.upload is None)
    if uploads is None or case.upload is None:
        return
    upload = uploads.upload((), "n" * 10)
    assert (upload.method, upload.body) == ("POST", b"")
    assert uploads.file_id(json.dumps(case.upload).encode()) == case.upload["id"]
    create = case.dialect.create((), case.path, "n" * 10, case.upload["id"])
    assert case.upload["id"].encode() in create.body
    assert b"n" * 10 in create.body or case.dialect.upload_names is not None
    assert b"n" * 10 in case.dialect.frame("n" * 10)[0]
    for garbled in (b"", b"{}", b'{"id":"../batches"}', b'{"id":".."}'):
        with pytest.raises(MalformedResponse):
            uploads.file_id(garbled)
    with pytest.raises(Misuse):
        case.dialect.create((), case.path, "n" * 10, None)


def test_limits_are_told(case: Case) -> None:
    limits = case.dialect.limits
    assert min(limits.max_count, limits.max_bytes, limits.window, limits.retention) > 0


def test_own_requests_carry_the_pools_headers_and_no_compression(case: Case) -> None:
    headers = case.dialect.parse(case.raw()).headers
    asks = [
        case.dialect.send(case.path, headers, b"{}"),
        case.dialect.create(headers, case.path, "n" * 10, "file-1"),
        case.dialect.listing(headers, None, 100),
        case.dialect.retrieve(headers, "msgbatch_1"),
        case.dialect.cancel(headers, "msgbatch_1"),
        *(case.dialect.results(headers, place) for place in _done(case).results or ()),
    ]
    if (uploads := case.dialect.uploads) is not None:
        asks += [uploads.upload(headers, "n" * 10), uploads.delete(headers, "file-1")]
    if (names := case.dialect.upload_names) is not None:
        asks.append(names.list_files(headers))
    for ask in asks:
        assert ask.path.startswith("/")
        assert set(headers) < set(ask.headers)
        assert ("accept-encoding", "identity") in ask.headers


def _done(case: Case, **more: object) -> BatchReport:
    return case.dialect.report(json.dumps(case.batch | case.ended | more).encode())


def test_calls_on_now_carry_their_headers_and_no_compression(case: Case) -> None:
    headers = case.dialect.parse(case.raw(extra=(("x-my-tenant", "blue"),))).headers
    ask = case.dialect.send(case.path, headers, b"{}")
    assert (ask.method, ask.path, ask.body) == ("POST", case.path, b"{}")
    assert set(headers) < set(ask.headers)
    assert ("accept-encoding", "identity") in ask.headers


# ---------------------------------------------------------------- from the provider


@pytest.mark.parametrize(
    ("result", "status", "retryable"),
    [("succeeded", 200, False), ("errored", 400, False), ("expired", 504, True), ("canceled", 409, True)],
)
def test_every_kind_of_line(case: Case, result: str, status: int, retryable: bool) -> None:
    if not case.unrun and result in ("expired", "canceled"):
        return  # such a call is simply not among the results
    line = case.dialect.result_line(case.lines[result])
    assert (line.custom_id, line.result, line.status, line.retryable) == ("nonce-1", result, status, retryable)
    assert isinstance(json.loads(line.body), dict)


def test_an_answer_comes_back_as_it_was(case: Case) -> None:
    line = case.dialect.result_line(case.lines["succeeded"])
    assert line.body == json.dumps(case.answer).encode()
    assert line.body in case.lines["succeeded"]
    assert line.model == case.answer["model"]
    assert line.usage == case.dialect.usage(line.body)
    assert line.usage is not None
    assert (line.usage.input_tokens, line.usage.output_tokens) == (12, 6)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"custom_id":"a"}', b"<html>"])
def test_a_garbled_line_is_said_to_be_so(case: Case, text: bytes) -> None:
    with pytest.raises(MalformedResponse):
        case.dialect.result_line(text)


def test_reports_and_pages(case: Case) -> None:
    report = case.dialect.report(json.dumps(case.batch).encode())
    assert (report.ended, report.cancelling, report.count, report.archived) == (False, False, case.counted, False)
    if case.expires:
        assert report.expires_at == report.created_at + case.dialect.limits.window
    assert case.dialect.page(case.page("b", "a")) == (
        [case.dialect.report(json.dumps(case.named(name)).encode()) for name in "ba"],
        None,
    )
    assert case.dialect.page(case.page("b", "a", more=True))[1] == case.next_page


def test_an_ended_batch_says_where_its_results_are(case: Case) -> None:
    running, done = case.dialect.report(json.dumps(case.batch).encode()), _done(case)
    assert (running.results, running.failure) == (None, None)
    assert done.ended
    assert done.failure is None
    assert len(done.results or ()) == case.places
    told = case.dialect.results_at(case.batch[case.id_field])
    assert told in (None, done.results)
    assert (done.nonce is not None) is case.dialect.shows_nonces
    assert bool(done.files) is (case.upload is not None and case.leaves_files)
    if (uploads := case.dialect.uploads) is not None:
        assert all(uploads.delete((), name).method == "DELETE" for name in done.files)


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", "a?b", "a b", "x" * 300])
def test_no_id_turns_a_request_elsewhere(case: Case, name: str) -> None:
    for ask in (case.dialect.retrieve, case.dialect.cancel):
        with pytest.raises(Misuse):
            ask((), name)
    with pytest.raises(MalformedResponse):
        _done(case, **{case.id_field: name})


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 429, 500, 529])
def test_refusals(case: Case, status: int) -> None:
    refusal = case.dialect.refusal(status, (("retry-after", "3"),), json.dumps(case.errors[status]).encode())
    assert (refusal.status, refusal.message, refusal.retry_after) == (status, "No.", 3.0)
    assert refusal.retryable is (status == 429 or status >= 500)
    assert refusal.cannot_batch is (status in (401, 403, 404))
    assert refusal.too_large is (status == 413)


def test_a_refusal_without_words_is_still_one(case: Case) -> None:
    refusal = case.dialect.refusal(503, (), b"<html>down</html>")
    assert refusal.retryable
    assert "503" in refusal.message


# ---------------------------------------------------------------- to clients


def test_errors_are_json_and_can_be_read_back(case: Case) -> None:
    body = case.dialect.error(400, "invalid_request_error", 'Half a pair \ud800 and a "quote".')
    assert case.dialect.refusal(400, (), body).message.startswith("Half a pair")
    frame = case.dialect.stream_error(body)
    assert frame.endswith(b"\n\n")
    assert body in frame


def test_a_replay_is_a_stream_of_whole_events_with_the_same_usage(case: Case) -> None:
    body = json.dumps(case.answer, indent=2).encode()
    events = list(case.dialect.replay(body, case.stream_options))
    assert all(event.startswith(case.text_of_event.encode()) and event.endswith(b"\n\n") for event in events)
    assert all(b"\n\n" not in event[:-2] for event in events)
    tap = case.dialect.usage_tap()
    for event in [case.dialect.keep_alive, *events]:
        tap.feed(event)
    assert tap.usage() == case.dialect.usage(body)
    assert tap.end(whole=False) == ResponseEnd(case.dialect.usage(body), answered=True, final=True)


def test_what_is_no_answer_can_not_be_replayed(case: Case) -> None:
    with pytest.raises(MalformedResponse):
        case.dialect.replay(b'{"type":"error"}')


def test_tokens_are_estimated_upwards(case: Case) -> None:
    assert case.dialect.estimate_tokens(b"") == 0
    assert case.dialect.estimate_tokens(b"12345") >= 2
