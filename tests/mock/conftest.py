"""What the tests of the mock share: a client, a clock to turn, and a way to call the app without a network."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

from carpool.mock import MockAnthropic, MockConfig, MockServer, serve

MODEL = "claude-haiku-4-5"


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": text}], **more}


def batch_of(*texts: str) -> list[dict[str, Any]]:
    return [{"custom_id": f"c{i}", "params": ask(text)} for i, text in enumerate(texts)]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytearray

    def json(self) -> Any:
        return json.loads(self.body)

    def lines(self) -> dict[str, Any]:
        return {line["custom_id"]: line["result"] for line in map(json.loads, self.body.splitlines())}


class Turned:
    """A provider in this process, with a clock that only moves when it is told to."""

    def __init__(self, config: MockConfig | None = None) -> None:
        self.time = 1_800_000_000.0
        self.provider = MockAnthropic(config, now=lambda: self.time)

    async def call(self, method: str, path: str, body: Any = None, key: str = "k", **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        path, _, query = path.partition("?")
        merged = {"x-api-key": key, "anthropic-version": "2023-06-01", "host": "mock.test", **headers}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.encode(), value.encode()) for name, value in merged.items()],
        }
        answer = Answer(0, {}, bytearray())

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": raw, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        await self.provider.app(scope, receive, send)
        return answer

    async def create(self, requests: list[dict[str, Any]], key: str = "k") -> str:
        answer = await self.call("POST", "/v1/messages/batches", {"requests": requests}, key)
        assert answer.status == 200, answer.body
        return str(answer.json()["id"])

    async def look(self, batch_id: str, key: str = "k") -> Any:
        return (await self.call("GET", f"/v1/messages/batches/{batch_id}", key=key)).json()

    async def results(self, batch_id: str) -> dict[str, Any]:
        return (await self.call("GET", f"/v1/messages/batches/{batch_id}/results")).lines()


OPENAI_MODEL = "gpt-6-luna"
CHAT = "/v1/chat/completions"
NAMED = 'form-data; name="file"; filename="in.jsonl"\r\nContent-Type: application/jsonl'


def line_of(custom_id: str, text: str = "hello", url: str = CHAT, **more: Any) -> dict[str, Any]:
    body = {"model": OPENAI_MODEL, "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class OpenAITurned(Turned):
    """The same, spoken to as OpenAI is."""

    async def call(self, method: str, path: str, body: Any = None, key: str = "k", **headers: str) -> Answer:
        return await super().call(method, path, body, "", authorization=f"Bearer {key}", **headers)

    async def upload(self, data: bytes, key: str = "k", head: str = NAMED, **fields: str) -> Answer:
        parts = [f'form-data; name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
        parts = [*(parts or [b'form-data; name="purpose"\r\n\r\nbatch']), head.encode() + b"\r\n\r\n" + data]
        form = b"".join(b"--edge\r\nContent-Disposition: " + part + b"\r\n" for part in parts) + b"--edge--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=edge"}
        return await self.call("POST", "/v1/files", form, key, **kind)

    async def submit(self, file_id: str, key: str = "k", endpoint: str = CHAT, **more: Any) -> Answer:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h", **more}
        return await self.call("POST", "/v1/batches", body, key)

    async def start(self, lines: list[Any] | bytes, key: str = "k", **more: Any) -> str:
        """The id of a new batch of these lines."""
        data = lines if isinstance(lines, bytes) else jsonl(lines)
        file = await self.upload(data, key)
        assert file.status == 200, file.body
        created = await self.submit(file.json()["id"], key, **more)
        assert created.status == 200, created.body
        assert created.json()["status"] == "validating"
        return str(created.json()["id"])

    async def look(self, batch_id: str, key: str = "k") -> Any:
        answer = await self.call("GET", f"/v1/batches/{batch_id}", key=key)
        assert answer.status == 200, answer.body
        return answer.json()

    async def content(self, file_id: str | None) -> list[Any]:
        """The lines of a file; none of a file that is not there."""
        if file_id is None:
            return []
        answer = await self.call("GET", f"/v1/files/{file_id}/content")
        assert answer.status == 200, answer.body
        return [json.loads(line) for line in answer.body.splitlines()]

    async def told(self, batch_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """The lines of both result files by custom_id."""
        seen = await self.look(batch_id)
        good, bad = await self.content(seen["output_file_id"]), await self.content(seen["error_file_id"])
        return {one["custom_id"]: one for one in good}, {one["custom_id"]: one for one in bad}


@asynccontextmanager
async def _openai_connected(config: MockConfig | None = None, **options: Any) -> AsyncIterator[tuple[MockServer, Any]]:
    http = openai.DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": "k", "max_retries": 0, "_strict_response_validation": True, "http_client": http, **options}
    async with serve(config) as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options) as client:
        yield server, client


@asynccontextmanager
async def _connected(config: MockConfig | None = None, **options: Any) -> AsyncIterator[tuple[MockServer, Any]]:
    # No TLS here, and reading the certificates for every client would take most of the time of these tests.
    http = DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": "k", "max_retries": 0, "_strict_response_validation": True, "http_client": http, **options}
    async with serve(config) as server, AsyncAnthropic(base_url=server.url, **options) as client:
        yield server, client


@pytest.fixture
def connected() -> Callable[..., Any]:
    return _connected


@pytest.fixture
def turned() -> Callable[..., Turned]:
    return Turned


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only by waiting, and waiting takes no time."""

    def __init__(self) -> None:
        super().__init__()
        # Counted from 0: added to the seconds of an epoch, a timer's last nanosecond would be lost and never pass.
        self._virtual = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            self._virtual += timeout or 0.0
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._virtual


@pytest.fixture
def virtual_loop() -> type[VirtualLoop]:
    return VirtualLoop


@pytest.fixture
def body() -> Callable[..., dict[str, Any]]:
    return ask


@pytest.fixture
def requests_of() -> Callable[..., list[dict[str, Any]]]:
    return batch_of


@pytest.fixture
def openai_connected() -> Callable[..., Any]:
    return _openai_connected


@pytest.fixture
def openai_turned() -> Callable[..., OpenAITurned]:
    return OpenAITurned


@pytest.fixture
def lines_of() -> Callable[..., dict[str, Any]]:
    return line_of


@pytest.fixture
def as_jsonl() -> Callable[[list[Any]], bytes]:
    return jsonl
