"""What every dialect promises, whatever its provider."""

from __future__ import annotations

import json

import pytest
from dialects import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import dialects
from carpool.errors import BadCall, CarpoolError, ConfigError, Garbled, Misuse
from carpool.model import custom_id

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


BATCHING = sorted(name for name, case in CASES.items() if case.closed is None)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=BATCHING)
def batching(request: pytest.FixtureRequest) -> Case:
    """A dialect that speaks of batches."""
    return CASES[request.param]


def test_every_dialect_is_under_contract() -> None:
    assert set(CASES) == set(dialects.DIALECTS)


def test_dialects_are_found_by_name(case: Case) -> None:
    assert dialects.get(case.dialect.name) is case.dialect


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
    assert parsed.unbatchable == case.closed


@pytest.mark.parametrize("stream", [True, False])
def test_only_stream_is_taken_out(case: Case, stream: bool) -> None:
    parsed = case.dialect.parse(case.raw(json.dumps(case.params | {"stream": stream, "later": 1.0}).encode()))
    assert parsed.stream is stream
    assert parsed.body == json.dumps(case.params | {"later": 1.0}).encode()


@settings(max_examples=60)
@given(extra=st.dictionaries(st.text(), JSON, max_size=4), stream=st.booleans() | st.none(), ascii_only=st.booleans())
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_was_parsed_parses_to_the_same(name: str, extra: dict, stream: bool | None, ascii_only: bool) -> None:
    case = CASES[name]
    params = extra | case.params | ({} if stream is None else {"stream": stream})
    first = case.dialect.parse(case.raw(json.dumps(params, ensure_ascii=ascii_only).encode()))
    again = case.dialect.parse(case.raw(first.body))
    assert (again.body, again.canonical, again.stream) == (first.body, first.canonical, False)
    assert json.loads(first.body) == {key: value for key, value in params.items() if key != "stream"}
    if case.closed is None:
        line = case.dialect.line(custom_id("n" * 10, 7), first.body)
        assert first.body in line


def test_equal_requests_have_equal_canonical_bodies(case: Case) -> None:
    turned = dict(reversed(case.params.items())) | {"stream": True}
    assert (
        case.dialect.parse(case.raw(json.dumps(turned, indent=1).encode())).canonical
        == case.dialect.parse(case.raw()).canonical
    )
    other = case.params | {"later": 1}
    assert (
        case.dialect.parse(case.raw(json.dumps(other).encode())).canonical != case.dialect.parse(case.raw()).canonical
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
@pytest.mark.parametrize("name", sorted(CASES))
def test_no_foreign_exception_escapes_from_any_bytes(name: str, body: bytes) -> None:
    case = CASES[name]
    asked = (
        lambda: case.dialect.parse(case.raw(body)),
        lambda: case.dialect.report(body),
        lambda: case.dialect.page(body),
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


# ---------------------------------------------------------------- to the provider


def test_a_create_is_sound_and_its_overhead_is_told(batching: Case) -> None:
    body = batching.dialect.parse(batching.raw()).body
    before, between, after = batching.dialect.create_frame()
    lines = [batching.dialect.line(custom_id("n" * 10, ticket), body) for ticket in range(3)]
    create = before + between.join(lines) + after
    assert all(custom_id("n" * 10, ticket).encode() in create for ticket in range(3))
    cost = 3 * (len(body) + batching.dialect.line_overhead())
    assert 0 <= cost - len(between.join(lines)) <= 3


def test_limits_are_told(case: Case) -> None:
    limits = case.dialect.limits
    assert min(limits.max_count, limits.max_bytes, limits.window, limits.retention) > 0


def test_own_requests_carry_the_pools_headers_and_no_compression(batching: Case) -> None:
    headers = batching.dialect.parse(batching.raw()).headers
    asks = [
        batching.dialect.send(batching.path, headers, b"{}"),
        batching.dialect.create(headers),
        batching.dialect.listing(headers, None, 100),
        batching.dialect.retrieve(headers, "msgbatch_1"),
        batching.dialect.cancel(headers, "msgbatch_1"),
        batching.dialect.results(headers, "msgbatch_1"),
    ]
    for ask in asks:
        assert ask.path.startswith("/")
        assert set(headers) < set(ask.headers)
        assert ("accept-encoding", "identity") in ask.headers


def test_calls_on_now_carry_their_headers_and_no_compression(case: Case) -> None:
    headers = case.dialect.parse(case.raw(extra=(("x-my-tenant", "blue"),))).headers
    ask = case.dialect.send(case.path, headers, b"{}")
    assert (ask.method, ask.path, ask.body) == ("POST", case.path, b"{}")
    assert set(headers) < set(ask.headers)
    assert ("accept-encoding", "identity") in ask.headers


@pytest.mark.parametrize("name", sorted(set(CASES) - set(BATCHING)))
def test_a_dialect_without_batches_says_so_to_whoever_asks(name: str) -> None:
    dialect, why = CASES[name].dialect, CASES[name].closed
    asked = (
        lambda: dialect.line("n-1", b"{}"),
        lambda: dialect.line_overhead(),
        lambda: dialect.create(()),
        lambda: dialect.create_frame(),
        lambda: dialect.listing((), None, 10),
        lambda: dialect.retrieve((), "b"),
        lambda: dialect.cancel((), "b"),
        lambda: dialect.results((), "b"),
        lambda: dialect.report(b"{}"),
        lambda: dialect.page(b"{}"),
        lambda: dialect.result_line(b"{}"),
    )
    for ask in asked:
        with pytest.raises(Misuse, match=str(why)):
            ask()


# ---------------------------------------------------------------- from the provider


@pytest.mark.parametrize(
    ("result", "status", "retryable"),
    [("succeeded", 200, False), ("errored", 400, False), ("expired", 504, True), ("canceled", 409, True)],
)
def test_every_kind_of_line(batching: Case, result: str, status: int, retryable: bool) -> None:
    line = batching.dialect.result_line(batching.lines[result])
    assert (line.custom_id, line.result, line.status, line.retryable) == ("nonce-1", result, status, retryable)
    assert isinstance(json.loads(line.body), dict)


def test_an_answer_comes_back_as_it_was(batching: Case) -> None:
    line = batching.dialect.result_line(batching.lines["succeeded"])
    assert line.body == json.dumps(batching.answer).encode()
    assert line.body in batching.lines["succeeded"]
    assert line.model == batching.answer["model"]
    assert line.usage == batching.dialect.usage(line.body)
    assert line.usage is not None
    assert (line.usage.input_tokens, line.usage.output_tokens) == (12, 6)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"custom_id":"a"}', b"<html>"])
def test_a_garbled_line_is_said_to_be_so(batching: Case, text: bytes) -> None:
    with pytest.raises(Garbled):
        batching.dialect.result_line(text)


def test_reports_and_pages(batching: Case) -> None:
    report = batching.dialect.report(json.dumps(batching.batch).encode())
    assert (report.ended, report.cancelling, report.count, report.archived) == (False, False, 3, False)
    assert report.expires_at == report.created_at + batching.dialect.limits.window
    assert batching.dialect.page(batching.page("b", "a")) == (
        [batching.dialect.report(json.dumps(batching.batch | {"id": name}).encode()) for name in "ba"],
        None,
    )
    assert batching.dialect.page(batching.page("b", "a", more=True))[1] == "a"


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
    events = list(case.dialect.replay(body))
    assert all(event.startswith(case.text_of_event.encode()) and event.endswith(b"\n\n") for event in events)
    assert all(b"\n\n" not in event[:-2] for event in events)
    tap = case.dialect.usage_tap()
    for event in [case.dialect.keep_alive(), *events]:
        tap.feed(event)
    assert tap.usage() == case.dialect.usage(body)


def test_what_is_no_answer_can_not_be_replayed(case: Case) -> None:
    with pytest.raises(Garbled):
        case.dialect.replay(b'{"type":"error"}')


def test_tokens_are_estimated_upwards(case: Case) -> None:
    assert case.dialect.estimate_tokens(b"") == 0
    assert case.dialect.estimate_tokens(b"12345") >= 2
