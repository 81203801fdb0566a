"""What is understood of a Messages request, and what is left alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.errors import BadCall
from carpool.core.ports import Parsed, RawRequest
from carpool.dialects import ANTHROPIC, Anthropic, json_object
from tests.support.dialect_cases import canonical

VERSION = ("anthropic-version", "2026-10-21")
PARAMS = {"model": "claude-opus-5", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}
REST = b'"model":"m","max_tokens":1,"messages":[]'


def parse(body: bytes | dict = PARAMS, *headers: tuple[str, str], query: str = "", version: bool = True) -> Parsed:
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    return ANTHROPIC.parse(RawRequest("POST", "/v1/messages", query, (*([VERSION] if version else []), *headers), body))


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("given_", "kept"),
    [
        (b'{"stream":true,%b}', b"{%b}"),
        (b'{ "stream" : true , %b }', b"{ %b }"),
        (b'{%b,"stream":false}', b"{%b}"),
        (b'{%b , "stream":null\n}', b"{%b\n}"),
        (b'\n{%b,\t"stream":\ttrue ,"z": 1e5, "y":1.0}\n', b'\n{%b ,"z": 1e5, "y":1.0}\n'),
        (rb'{"str\u0065am":true,%b}', b"{%b}"),
        (b'{%b,"a":{"stream":true}}', b'{%b,"a":{"stream":true}}'),
        (rb'{"a\"}{\\":"}",%b,"stream":true,"b":[ "\u00e9\/" ]}', rb'{"a\"}{\\":"}",%b,"b":[ "\u00e9\/" ]}'),
        (b'{%b,"n":12345678901234567890123,"stream":true}', b'{%b,"n":12345678901234567890123}'),
        ('{%b,"ü":"🚗 é","stream":true}'.encode(), '{%b,"ü":"🚗 é"}'.encode()),
    ],
)
def test_only_the_stream_member_is_cut_out(given_: bytes, kept: bytes) -> None:
    assert parse(given_ % REST).body == kept % REST


def test_stream_alone_leaves_an_empty_object() -> None:
    assert json_object.read(b'{ "stream" : true }').without("stream") == b"{  }"
    assert json_object.read(b" { } ").without("stream") == b" { } "


@pytest.mark.parametrize(
    "twice",
    [
        b'"a":1,"a":1',
        b'"a":1,"a":100',
        b'"a":100,"a":1',
        b'"a":"}","a":"}}"',
        rb'"a":1,"\u0061":2',
        b'"a":1,"b":2,"a":[3]',
        b'"stream":true,"stream":false',
        b'"a":1,"a":1,"a":1',
        b'"max_tokens":9',
    ],
)
def test_a_field_twice_is_ambiguous(twice: bytes) -> None:
    for body in (b"{%b,%b}" % (REST, twice), b"{%b,%b}" % (twice, REST)):
        with pytest.raises(BadCall, match="twice"):
            parse(body)


NAMES = st.sampled_from(["a", "b", "stream", 'q"', "\\", "}", "é", ""])
SCALARS = st.sampled_from(["1", "10", "1.0", '"}"', '"\\""', "[1]", "{}", '{"a":1,"a":2}', "null", '"a\\":1"', "1e5"])


@given(members=st.lists(st.tuples(NAMES, SCALARS), max_size=5), gaps=st.sampled_from(["", " ", "\n\t "]))
def test_members_are_found_or_told_to_be_double(members: list[tuple[str, str]], gaps: str) -> None:
    told = [f"{gaps}{json.dumps(name)}{gaps}:{gaps}{value}{gaps}" for name, value in members]
    body = f"{gaps}{{{','.join(told) or gaps}}}{gaps}".encode()
    names = [name for name, _ in members]
    if len(set(names)) < len(names):
        with pytest.raises(BadCall, match="twice"):
            json_object.read(body)
        return
    document = json_object.read(body)
    for name, (start, end) in document.spans.items():
        assert json.loads(b"{" + body[start:end] + b"}") == {name: document.values[name]}
    for name in ("stream", "a", "b"):
        rest = json.loads(document.without(name))
        assert rest == {key: value for key, value in json.loads(body).items() if key != name}


NESTED = st.sampled_from(['"1"', '{"a": 1, "b": 2}', '{"b": 2}', '", \\"b\\": 2"', "[1, 2]"])
STYLES = st.sampled_from([(",", ":"), (", ", ": ")])


@given(members=st.lists(st.tuples(NAMES, SCALARS | NESTED, STYLES), min_size=1, max_size=6))
def test_a_field_twice_is_found_however_python_or_others_write_it(
    members: list[tuple[str, str, tuple[str, str]]],
) -> None:
    told = [f"{comma}{json.dumps(name, ensure_ascii=False)}{colon}{value}" for name, value, (comma, colon) in members]
    body = f"{{{''.join(told).lstrip(', ')}}}".encode()
    names = [name for name, _, _ in members]
    if len(set(names)) < len(names):
        with pytest.raises(BadCall, match="twice"):
            json_object.read(body)
    else:
        assert json_object.read(body).values == json.loads(body)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":"\xff"}', "not JSON in UTF-8"),
        (b'{%b,"a":"\xed\xa0\x80"}' % REST, "not JSON in UTF-8"),
        (rb'{%b,"a":"\ud800"}' % REST, "not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"1e400", "must be a JSON object"),
        (b'{"a":%b}' % (b"[" * 9000 + b"]" * 9000), "nested too deeply"),
        (b'{"max_tokens":1,"messages":[]}', "`model` is missing"),
        (b'{"model":7,"max_tokens":1,"messages":[]}', "`model` must be a string"),
        (b'{"model":"m","messages":[]}', "`max_tokens` is missing"),
        (b'{"model":"m","max_tokens":true,"messages":[]}', "`max_tokens` must be an integer"),
        (b'{"model":"m","max_tokens":1.5,"messages":[]}', "`max_tokens` must be an integer"),
        (b'{"model":"m","max_tokens":1}', "`messages` is missing"),
        (b'{"model":"m","max_tokens":1,"messages":null}', "`messages` must be a list"),
        (b'{%b,"stream":1}' % REST, "`stream` must be true or false"),
    ],
)
def test_mistakes_are_told_in_sentences(body: bytes, says: str) -> None:
    with pytest.raises(BadCall, match=says) as caught:
        parse(body)
    assert str(caught.value).endswith(".")


def test_what_routing_does_not_need_is_the_providers_to_judge() -> None:
    odd = {"temperature": "hot", "tools": 7, "of_the_future": [None], "max_tokens": -5, "messages": [3]}
    assert parse(PARAMS | odd).max_output_tokens == 0
    assert parse(PARAMS | {"max_tokens": 10**30}).max_output_tokens == 2**31 - 1


@pytest.mark.parametrize("number", [b"1e400", b"9" * 5000, b"-1e999"])
def test_numbers_beyond_measure_travel_untouched(number: bytes) -> None:
    body = b'{"model":"m","max_tokens":1,"messages":[%b],"n":%b,"stream":true}' % (number, number)
    parsed = parse(body)
    assert parsed.body == body.replace(b',"stream":true', b"")
    assert canonical(parsed) == parsed.body
    assert parsed.stream


def test_canonical_bodies_tell_different_requests_apart() -> None:
    bodies = [
        b'{%b,"a":%b}' % (REST, value) for value in (b"1", b"1.0", b'"1"', b"true", b"null", b"[1]", b'"\\u0031 "')
    ]
    assert len({canonical(parse(body)) for body in bodies}) == len(bodies)
    assert canonical(parse(rb'{%b,"a":"\u00e9"}' % REST)) == canonical(parse('{%b,"a": "é"}'.encode() % REST))


def test_compressed_bodies_are_not_read_yet() -> None:
    with pytest.raises(BadCall, match="content-encoding 'zstd'"):
        parse(PARAMS, ("content-encoding", "zstd"))
    assert parse(PARAMS, ("content-encoding", "identity")).model == "claude-opus-5"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/messages/count_tokens"), ("GET", "/v1/messages"), ("POST", "/")]
)
def test_other_endpoints_are_not_batched(method: str, path: str) -> None:
    assert not Anthropic().handles(method, path)
    with pytest.raises(BadCall, match="carpool does not batch"):
        ANTHROPIC.parse(RawRequest(method, path, "", (VERSION,), b"{}"))


# ---------------------------------------------------------------- what may not ride


@pytest.mark.parametrize(
    "field", ["speed", "store", "previous_thread_event_id", "cache_hint", "context_hint", "research_preview_2026_02"]
)
def test_forbidden_fields(field: str) -> None:
    parsed = parse(PARAMS | {field: None})
    assert parsed.unbatchable == f"A batch may not carry `{field}`."


def test_other_reasons_to_travel_alone() -> None:
    assert "max_tokens: 0" in str(parse(PARAMS | {"max_tokens": 0}).unbatchable)
    assert "fast-mode" in str(parse(PARAMS, ("anthropic-beta", "a,fast-mode-2026-02-01")).unbatchable)
    assert "query" in str(parse(PARAMS, query="beta=true&trace=1").unbatchable)
    assert "anthropic-version" in str(parse(PARAMS, version=False).unbatchable)
    both = str(parse(PARAMS | {"speed": "fast", "store": True}).unbatchable)
    assert "speed" in both
    assert "store" in both


@pytest.mark.parametrize("query", ["", "beta=true", "?beta=true", "&beta=true"])
def test_the_beta_query_is_ignored(query: str) -> None:
    assert parse(PARAMS | {"stream": True}, query=query).unbatchable is None


# ---------------------------------------------------------------- headers


def test_betas_become_one_header_in_the_clients_order() -> None:
    parsed = parse(PARAMS, ("anthropic-beta", "b, a,,b"), ("x-a", "1"), ("anthropic-beta", " c ,a"))
    assert parsed.headers == (("anthropic-beta", "b,a,c"), VERSION, ("x-a", "1"))


def test_claude_codes_headers_leave_what_matters() -> None:
    parsed = parse(
        PARAMS,
        ("host", "127.0.0.1:8787"),
        ("x-api-key", "k1"),
        ("authorization", "Bearer k2"),
        ("proxy-authorization", "Basic x"),
        ("x-claude-code-session-id", "s"),
        ("x-app", "cli"),
        ("anthropic-dangerous-direct-browser-access", "true"),
        ("x-stainless-retry-count", "0"),
        ("x-stainless-timeout", "NOT_GIVEN"),
        ("accept-encoding", "gzip, br"),
        ("connection", "keep-alive, X-Hop"),
        ("x-hop", "1"),
        ("x-forwarded-for", "10.0.0.1"),
        ("sec-fetch-mode", "cors"),
        ("cookie", "a=b"),
        ("x-carpool-budget", "10m"),
        ("anthropic-user-profile-id", "u"),
        ("anthropic-workspace-id", "w"),
        ("x-tenant", " red "),
        ("x-tenant", "blue"),
    )
    assert parsed.secret == (("x-api-key", "k1"), ("authorization", "Bearer k2"))
    assert parsed.headers == (
        ("anthropic-user-profile-id", "u"),
        VERSION,
        ("anthropic-workspace-id", "w"),
        ("x-tenant", "red"),
        ("x-tenant", "blue"),
    )


@pytest.mark.parametrize(
    ("text", "retry"), [("0", False), ("1", True), ("NOT_GIVEN", False), ("", False), ("-1", False)]
)
def test_the_sdk_marks_its_retries(text: str, retry: bool) -> None:
    assert parse(PARAMS, ("x-stainless-retry-count", text)).retry is retry
