"""The parsers, each as a function of bytes that raises when the parser does what it must not.

What may be refused is refused with the error that the caller deals with; anything else that is raised is a bug. Where
two ways of reading must agree, they are compared.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from carpool.config import read_config
from carpool.core.errors import BadCall, CarpoolError, ConfigError, MalformedResponse, NotConnected, WireError
from carpool.core.ports import HttpRequest, RawRequest
from carpool.core.upstream import clock_offset
from carpool.dialects import get, json_object
from carpool.engine.now import decompress
from carpool.frontends.proxy.http.connection import Connection
from carpool.frontends.proxy.parse_head import later
from carpool.http.http1.client import head_of
from carpool.http.http1.connection import Http1Connection, Http1Response
from carpool.planners.access.options import from_headers, split_path
from carpool.planners.access.providers import Hosts
from carpool.planners.policy import MAX_BUDGET, parse_budget

Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {}
DIALECTS = ("anthropic", "openai")
PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")


def target(parser: Target) -> Target:
    TARGETS[parser.__name__] = parser
    return parser


def cut(data: bytes) -> list[bytes]:
    """The data in pieces, as its first byte says."""
    step = data[0] % 7 + 1 if data else 1
    return [data[at : at + step] for at in range(0, len(data), step)] or [b""]


# ---------------------------------------------------------------- from clients


@target
def bodies(data: bytes) -> None:
    """What is understood of a body is what any JSON parser finds, and taking a field out takes out nothing else."""
    try:
        document = json_object.read(data)
    except BadCall:
        return
    plain = json.loads(data)
    assert plain.keys() == document.values.keys() == document.spans.keys()
    for name in plain:
        rest = json.loads(document.without(name))
        expected = {other: value for other, value in plain.items() if other != name}
        assert repr(rest) == repr(expected), name
    if document.exact:
        again = json_object.read(json.dumps(plain).encode()) if _finite(plain) else document
        assert again.canonical("stream") == document.canonical("stream")


def _finite(value: Any) -> bool:
    """Python writes what it reads as infinite in a way that no JSON has; and halves of a pair can't be encoded."""
    text = json.dumps(value)
    return "Infinity" not in text and "NaN" not in text and "\\ud" not in text.lower()


@target
def calls(data: bytes) -> None:
    for name in DIALECTS:
        dialect = get(name)
        for path in PATHS:
            headers = (("x-api-key", "k"), ("authorization", "Bearer k"), ("anthropic-version", "2023-06-01"))
            with suppress(BadCall):
                parsed = dialect.parse(RawRequest("POST", path, "", headers, data))
                assert isinstance(parsed.model, str)
                assert isinstance(parsed.document.canonical("stream"), bytes)
                assert parsed.max_output_tokens >= 0
        assert isinstance(dialect.stream_options(data), str)


@target
def options(data: bytes) -> None:
    text = data.decode("latin-1")
    for read in (_segment, _header, later):
        with suppress(BadCall):
            read(text)
    with suppress(BadCall):
        seconds = parse_budget(text)
        assert math.isfinite(seconds)
        assert 0 < seconds <= MAX_BUDGET


def _segment(text: str) -> None:
    found, path = split_path("/@" + text)
    assert path.startswith("/")
    _check(found.tags, found.key)


def _header(text: str) -> None:
    name, _, value = text.partition(":")
    found = from_headers((("x-carpool-" + name, value), ("x-carpool-tags", value)))
    _check(found.tags, found.key)


def _check(tags: Any, key: str | None) -> None:
    said = "".join([*tags, *tags.values(), key or ""])
    assert not any(ord(letter) < 32 for letter in said)


@target
def hosts(data: bytes) -> None:
    text = data.decode("latin-1")
    checked = Hosts(local=True, allowed=("carpool.example",), trusted=("10.0.0.0/8",))
    for trusted in (False, True):
        with suppress(BadCall):
            checked.check((("host", text), ("x-forwarded-host", text)), trusted=trusted)
    assert isinstance(checked.client(("10.0.0.1", 1), [(b"x-forwarded-for", data)]), str)


@target
def config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "carpool.yaml"
        file.write_bytes(data)
        with suppress(ConfigError):
            read_config(file, {})


@target
def packed(data: bytes) -> None:
    """Reading along gives what reading whole gives, and never much more than is allowed."""
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, br"):
        headers, heard = (("content-encoding", encoding),), _Heard()
        feed = decompress.reading(heard, headers)
        for piece in cut(data):
            feed(piece)
        with suppress(BadCall):
            whole = decompress.read_whole(data, headers, 1_000_000)
            assert len(whole) <= 1_000_000
            assert encoding == "zstd" or heard.data == whole  # frames of zstd may be skipped in one of them


class _Heard:
    def __init__(self) -> None:
        self.data = b""

    def feed(self, chunk: bytes) -> None:
        self.data += chunk

    def usage(self) -> None:
        return None


# ---------------------------------------------------------------- the gate


class _Socket:
    """A transport that nobody is connected to."""

    def __init__(self) -> None:
        self.said = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.said += data

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return _NOBODY if name == "socket" else default

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


_NOBODY = SimpleNamespace(setsockopt=lambda *_: None, fileno=lambda: 0, getpeername=lambda: ("", 1), getsockname=lambda: ("", 1), family=2)  # fmt: skip  # noqa: E501
_LATER = SimpleNamespace(cancel=lambda: None)
_LOOP: Any = SimpleNamespace(call_later=lambda *_: _LATER, create_future=lambda: None)


class _Unanswered(Connection):
    """Takes requests, and never answers."""

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.begun = cycle


def _gate() -> tuple[_Unanswered, _Socket]:
    state = _State()
    settings: Any = SimpleNamespace(
        loaded=True, loaded_app=None, ws_protocol_class=None, root_path="", asgi_version="3.0", limit_concurrency=None,
        timeout_keep_alive=5, reset_contextvars=False,
    )  # fmt: skip
    gate, transport = _Unanswered(settings, state, {}, _LOOP), _Socket()  # type: ignore[arg-type]
    gate.connection_made(transport)  # type: ignore[arg-type]
    return gate, transport


class _State:
    def __init__(self) -> None:
        self.connections: set[Any] = set()
        self.tasks: set[Any] = set()
        self.default_headers: list[Any] = []
        self.total_requests = 0


@target
def requests(data: bytes) -> None:
    """However the bytes are cut, the same requests are read; and what is refused is refused in words."""
    assert _requests([data]) == _requests(cut(data))


def _requests(pieces: list[bytes]) -> Any:
    gate, transport = _gate()
    for piece in pieces:
        if not transport.closing:
            gate.data_received(piece)
    refused = gate._refused
    if refused is not None:
        assert 400 <= refused.status < 500
        words = transport.said or gate._last_words
        assert words is None or words.startswith(b"HTTP/1.1 4")
    first = getattr(gate, "begun", None)
    if first is None:
        return None, refused is not None
    scope = first.scope
    assert b"transfer-encoding" not in dict(scope["headers"]) or b"content-length" not in dict(scope["headers"])
    seen = (scope["method"], scope["raw_path"], tuple(scope["headers"]))
    return seen, refused is not None, bytes(first.body) if not first.more_body else None


# ---------------------------------------------------------------- from providers


@target
def answers(data: bytes) -> None:
    """However an answer is cut, it is the same answer; and its status is one that a client may be given."""
    whole, pieces = _exchange([data]), _exchange(cut(data))
    assert whole[:2] == pieces[:2]
    status, headers, body = whole
    assert status == 0 or 200 <= status <= 599
    assert not any(character in value for _, value in headers for character in "\r\n\0")
    assert not body or status


def _exchange(pieces: list[bytes]) -> tuple[int, Any, bytes]:
    request = HttpRequest("POST", "http://x/", (), b"", 1.0, lambda status, headers: None)
    line = Http1Connection(lambda line: None)
    line.connection_made(_Socket())
    line._poll = None
    response = Http1Response(line, "x", request)
    response.exchange.uploaded = True
    line.begin(response.exchange, b"")
    for piece in pieces:
        if line._exchange is not None:
            line.data_received(piece)
    line.eof_received()
    with suppress(WireError):
        response.check()
    return response.status, response.headers, b"".join(response._held)


@target
def outgoing(data: bytes) -> None:
    """Whatever a client's headers hold, what goes to the provider is one request with one framing."""
    text = data.decode("latin-1")
    name, _, value = text.partition(":")
    request = HttpRequest("POST", "http://x/", ((name, value), ("x-b", text)), b"body", 1.0)
    with suppress(NotConnected):
        head = head_of(request, "x", "/" + value[:50], "x")
        assert head.count(b"\r\n\r\n") == 1
        assert head.endswith(b"\r\n\r\n")
        assert head.lower().count(b"\r\ncontent-length:") == 1
        assert b"\r\ntransfer-encoding:" not in head.lower()
        assert head.count(b"\n") == head.count(b"\r\n") == head.count(b"\r")


@target
def streams(data: bytes) -> None:
    """Events cut anywhere say the same."""
    for name in DIALECTS:
        whole, pieces = get(name).usage_tap(), get(name).usage_tap()
        whole.feed(data)
        for piece in cut(data):
            pieces.feed(piece)
        assert whole.usage() == pieces.usage()
        assert whole.end(whole=False) == pieces.end(whole=False)


@target
def batches(data: bytes) -> None:
    dialect = get("anthropic")
    for read in (dialect.report, dialect.page, dialect.result_line):
        with suppress(MalformedResponse):
            read(data)
    text = data.decode("latin-1")
    headers = tuple((header, text) for header in ("date", "retry-after", "retry-after-ms", "x-should-retry"))
    limits = tuple((f"anthropic-ratelimit-requests-{part}", text) for part in ("limit", "remaining", "reset"))
    clock_offset(headers, 0.0)
    for name in DIALECTS:
        for status in (200, 400, 429, 500):
            get(name).refusal(status, headers + limits, data)
        get(name).requests_per_minute(headers + limits)
        get(name).allowances(headers + limits)


@target
def replays(data: bytes) -> None:
    for name in DIALECTS:
        dialect = get(name)
        with suppress(CarpoolError):
            for stream_options in ("", dialect.stream_options(data)):
                b"".join(dialect.replay(data, stream_options))
        assert isinstance(dialect.stream_error(data), bytes)
        dialect.usage(data)
        assert json.loads(dialect.error(400, "", data.decode("latin-1")))
