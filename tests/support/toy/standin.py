"""The toy's provider over real HTTP: it says back what it is told, at once or in jobs that end when they are polled."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.stage import _served
from tests.support.toy import ENDPOINT, JOBS, KEY


class ToyProvider:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.jobs: dict[str, dict[str, Any]] = {}
        self.keys: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        key = dict(scope["headers"]).get(KEY.encode(), b"").decode()
        self.keys.add(key)
        status, content = self._answer(scope["method"], scope["path"], body) if key else (401, {"fault": "No key."})
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        name, _, rest = path.removeprefix(JOBS).strip("/").partition("/")
        if (method, path) == ("POST", ENDPOINT):
            self.calls.append(json.loads(body))
            return 200, said(json.loads(body))
        if (method, path) == ("POST", JOBS):
            made = json.loads(body)
            job = {"id": f"job-{len(self.jobs) + 1}", "nonce": made["nonce"], "count": len(made["toys"])}
            self.jobs[job["id"]] = {**job, "at": time.time(), "over": False, "toys": made["toys"]}
            return 200, self.jobs[job["id"]]
        if (method, path) == ("GET", JOBS):
            return 200, list(reversed(self.jobs.values()))
        if method == "GET" and name in self.jobs:
            job = self.jobs[name]
            if rest == "results":
                return 200, b"".join(result(toy) + b"\n" for toy in job["toys"])
            job["over"] = True
            return 200, job
        return 404, {"fault": "No such toy."}


def said(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": body["model"], "said": f"You said {body['text']}.", "tokens": [len(body["text"]), 3]}


def result(toy: dict[str, Any]) -> bytes:
    return json.dumps({"id": toy["id"], "answer": said(toy["toy"])}).encode()


@asynccontextmanager
async def serve_toy() -> AsyncIterator[tuple[str, ToyProvider]]:
    provider = ToyProvider()
    async with _served(provider) as url:
        yield url, provider
