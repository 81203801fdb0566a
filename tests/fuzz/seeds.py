"""Something good for every parser, to begin with."""

from __future__ import annotations

import gzip
import json
import zlib

import brotli
import zstandard

from tests.support import ROOT

_CALL = {"model": "claude-haiku-4-5", "max_tokens": 9, "messages": [{"role": "user", "content": "hé"}], "stream": True}
_BODY = json.dumps(_CALL).encode()
_USAGE = {"input_tokens": 10, "output_tokens": 20, "cache_creation": {"ephemeral_5m_input_tokens": 3}}
_CONTENT = [{"type": "text", "text": "hi"}, {"type": "tool_use", "id": "t", "name": "n", "input": {"a": [1, 2.5]}}]
_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": _CONTENT}
_ANSWER = json.dumps({**_MESSAGE, "stop_reason": "end_turn", "usage": _USAGE}).encode()
_CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
_CHAT = json.dumps(
    {"id": "c", "object": "chat.completion", "created": 1, "model": "gpt-5", "choices": [_CHOICE]}
    | {"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
).encode()
_RESPONSE = json.dumps(
    {"id": "r", "object": "response", "status": "completed", "model": "gpt-5"}
    | {
        "output": [
            {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}
        ]
    }
    | {"usage": {"input_tokens": 1, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}}}
).encode()
_ERROR = b'{"type":"error","error":{"type":"rate_limit_error","message":"slow down","details":{"error_code":"x"}}}'
_BATCH = {
    "id": "msgbatch_1",
    "processing_status": "ended",
    "request_counts": {"succeeded": 1},
    "created_at": "2026-11-16T03:00:00Z",
    "expires_at": "2026-11-17T03:00:00Z",
    "ended_at": "2026-11-16T03:01:00Z",
    "results_url": "https://x/results",
}
_LINE = b'{"custom_id":"a-1","result":{"type":"succeeded","message":%b}}' % _ANSWER
_HEAD = b"POST /v1/messages HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: k\r\n"
_POST = _HEAD + b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nx-t: y\r\n\r\n" % (len(_BODY), _BODY)
_UPGRADE = _POST.replace(b"x-api-key", b"connection: upgrade\r\nupgrade: h2c\r\nx-api-key")
_SSE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":10,'
    b'"output_tokens":1}}}\n\nevent: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":20}}\n\n'
)
_CHAT_SSE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\ndata: [DONE]\n\n'
)
_EXAMPLES = ROOT / "examples"

SEEDS: dict[str, list[bytes]] = {
    "bodies": [_BODY, b'{"a":1,"b":{"c":[null,true,1e5,-0.0]},"d":"\\u00e9\\n"}', b'{ "a" : [ ] , "\\u0062" : {} }'],
    "calls": [_BODY, json.dumps({"model": "gpt-5", "input": [{"role": "user", "content": "x"}]}).encode()],
    "options": [b"budget=30m,tags.team=ci,lane=batch", b"tags: a=b,c=d", b"budget:1.5h", b"respond-async, wait=10"],
    "hosts": [b"127.0.0.1:8787", b"[::1]:80", b"carpool.example", b"10.1.2.3, 192.168.0.1"],
    "config": [file.read_bytes() for file in sorted(_EXAMPLES.glob("**/*.yaml"))] or [b"batching: {rpm: 50}"],
    "packed": [pack(_BODY * 3) for pack in (gzip.compress, zlib.compress, brotli.compress, zstandard.compress)],
    "requests": [_POST, _CHUNKED, _UPGRADE, _POST + _CHUNKED, b"GET http://x/v1/models HTTP/1.1\r\nhost: x\r\n\r\n"],
    "answers": [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 204 No\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    ],
    "outgoing": [b"x-a: b", b"content-length: 5", b"transfer-encoding: chunked", b"x\r\ny: z"],
    "streams": [_SSE, _SSE.replace(b"\n", b"\r\n"), _CHAT_SSE, _ANSWER, _CHAT],
    "batches": [json.dumps(_BATCH).encode(), json.dumps({"data": [_BATCH], "has_more": True}).encode(), _LINE, _ERROR,
                b"Mon, 16 Nov 2026 03:00:00 GMT", b"1.5", b"2026-11-16T03:00:00Z"],
    "replays": [_ANSWER, _CHAT, _RESPONSE, _ERROR],
}  # fmt: skip
