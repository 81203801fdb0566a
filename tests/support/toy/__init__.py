"""A provider that nobody has: its dialect, for the proof that a dialect is one folder and one registration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from carpool.core.errors import BadCall, MalformedResponse, Misuse
from carpool.core.model import Headers, Usage
from carpool.core.ports import (
    Ask,
    BatchLimits,
    BatchReport,
    Capability,
    Claim,
    Dialect,
    Parsed,
    Pricing,
    RawRequest,
    Refusal,
    ResponseEnd,
    ResultLine,
    UsageTap,
)
from carpool.dialects import json_object
from carpool.dialects.event_stream import Tap
from carpool.dialects.headers import DROPPED, DROPPED_PREFIXES, forwarded
from carpool.dialects.provider_api import refused

ENDPOINT = "/v1/toys"
JOBS = "/v1/toy-jobs"
KEY = "x-toy-key"

_ID = re.compile(r"[a-z0-9_-]{1,40}")
_IDENTITY = ("accept-encoding", "identity")
_UNREADABLE = (ValueError, RecursionError)


class _Answer(msgspec.Struct):
    model: str
    said: str
    tokens: tuple[int, int]


class _Job(msgspec.Struct):
    id: str
    nonce: str
    count: int
    at: float
    over: bool = False


class _Line(msgspec.Struct):
    id: str
    answer: msgspec.Raw = msgspec.Raw(b"")
    fault: str = ""


class _Event(msgspec.Struct):
    tokens: tuple[int, int] | None = None
    fault: str = ""


class _Fault(msgspec.Struct):
    fault: str


def _read(kind: Any, body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except _UNREADABLE as error:
        raise MalformedResponse(f"The toy can't be understood: {error}.") from None


class Toy(Dialect):
    name = seller = "toy"
    models = (("toy-live*", Capability(batch=False)),)
    pricing = Pricing(free=("toy-free*",))
    limits = BatchLimits(max_count=100, max_bytes=1_000_000, window=3600.0, retention=7200.0)
    key_headers = (KEY,)
    mixes_models = shows_nonces = True
    keep_alive = b": soon\n\n"
    open_paths = frozenset({ENDPOINT})
    models_path = "/v1/toy-models"
    subagent_headers = frozenset({"x-toy-helper"})

    # from clients
    def claim(self, path: str, headers: Headers) -> Claim:
        return Claim.OWN if path == ENDPOINT or any(name == KEY for name, _ in headers) else Claim.NONE

    def endpoint_of(self, body: Mapping[str, Any]) -> tuple[Claim, str]:
        return (Claim.OWN, ENDPOINT) if str(body.get("model")).startswith("toy-") else (Claim.NONE, "")

    def handles(self, method: str, path: str) -> bool:
        return (method, path) == ("POST", ENDPOINT)

    def parse(self, raw: RawRequest) -> Parsed:
        document = json_object.read(raw.body)
        model = document.values.get("model")
        if not self.handles(raw.method, raw.path) or not isinstance(model, str):
            raise BadCall("This is no call of a toy.")
        kept, retry = forwarded(raw.headers, DROPPED | {KEY}, DROPPED_PREFIXES)
        return Parsed(
            endpoint=ENDPOINT,
            model=model,
            body=document.without("stream"),
            stream=document.stream(),
            max_output_tokens=100,
            headers=tuple(kept),
            secret=self.secret(raw.headers),
            unbatchable=None,
            document=document,
            retry=retry,
        )

    def secret(self, headers: Headers) -> Headers:
        return tuple(pair for pair in headers if pair[0] == KEY)

    # to the provider
    def send(self, endpoint: str, headers: Headers, body: bytes) -> Ask:
        return Ask("POST", endpoint, (*headers, _IDENTITY), body)

    def line(self, endpoint: str, custom_id: str, body: bytes) -> bytes:
        return b'{"id":"%b","toy":%b}' % (custom_id.encode(), body)

    def frame(self, nonce: str) -> tuple[bytes, bytes, bytes]:
        return b'{"nonce":"%b","toys":[' % nonce.encode(), b",", b"]}"

    def create(self, headers: Headers, endpoint: str, nonce: str, file_id: str | None, model: str = "") -> Ask:
        return Ask("POST", JOBS, (*headers, _IDENTITY))

    def listing(self, headers: Headers, after: str | None, limit: int) -> Ask:
        return Ask("GET", JOBS, (*headers, _IDENTITY))

    def retrieve(self, headers: Headers, provider_id: str) -> Ask:
        return Ask("GET", _path(provider_id), (*headers, _IDENTITY))

    def cancel(self, headers: Headers, provider_id: str) -> Ask:
        return Ask("DELETE", _path(provider_id), (*headers, _IDENTITY))

    def results(self, headers: Headers, place: str) -> Ask:
        return Ask("GET", place, (*headers, _IDENTITY))

    # from the provider
    def report(self, body: bytes) -> BatchReport:
        return _report(_read(_Job, body))

    def page(self, body: bytes, after: str | None = None) -> tuple[list[BatchReport], str | None]:
        return [_report(job) for job in _read(list[_Job], body)], None

    def result_line(self, line: bytes) -> ResultLine:
        read = _read(_Line, line)
        if read.fault:
            body = self.error(400, "", read.fault)
            return ResultLine(read.id, "errored", 400, body, "", None, False)
        answer = _read(_Answer, bytes(read.answer))
        return ResultLine(read.id, "succeeded", 200, bytes(read.answer), answer.model, Usage(*answer.tokens), False)

    def usage(self, body: bytes) -> Usage | None:
        try:
            return Usage(*_read(_Answer, body).tokens)
        except MalformedResponse:
            return None

    def usage_tap(self) -> UsageTap:
        return Tap(_Listener(), self.usage)

    def refusal(self, status: int, headers: Headers, body: bytes) -> Refusal:
        try:
            message = _read(_Fault, body).fault
        except MalformedResponse:
            message = ""
        return refused(status, headers, message, no_credit=False)

    # to clients
    def error(self, status: int, code: str, message: str) -> bytes:
        return msgspec.json.encode({"fault": message.encode("utf-8", "replace").decode()})

    def replay(self, body: bytes, stream_options: str = "") -> Iterator[bytes]:
        answer = _read(_Answer, body)
        events = [{"said": answer.said}, {"tokens": answer.tokens}]
        return iter([b"data: %b\n\n" % msgspec.json.encode(event) for event in events])

    def stream_error(self, body: bytes) -> bytes:
        return b"data: %b\n\n" % body.replace(b"\n", b" ")


class _Listener:
    """The tokens are the last event of a stream."""

    def __init__(self) -> None:
        self._usage: Usage | None = None

    def event(self, data: bytes) -> None:
        try:
            tokens = _read(_Event, data).tokens
        except MalformedResponse:
            return
        self._usage = Usage(*tokens) if tokens else self._usage

    def usage(self) -> Usage | None:
        return self._usage

    def end(self, whole: bool) -> ResponseEnd:
        return ResponseEnd(self._usage, whole or self._usage is not None, self._usage is not None)


def _path(name: str) -> str:
    if not _ID.fullmatch(name):
        raise Misuse(f"{name[:40]!r} can't be the id of a job.")
    return f"{JOBS}/{name}"


def _report(job: _Job) -> BatchReport:
    if not _ID.fullmatch(job.id):
        raise MalformedResponse(f"The toy named a job {job.id[:40]!r}.")
    return BatchReport(
        provider_id=job.id,
        ended=job.over,
        cancelling=False,
        count=job.count,
        created_at=job.at,
        expires_at=job.at + TOY.limits.window,
        ended_at=job.at if job.over else None,
        results=(f"{_path(job.id)}/results",) if job.over else None,
        archived=False,
        nonce=job.nonce,
    )


TOY = Toy()
