"""The mock provider as a process of its own: what `carpool mock` serves, with a window on its bill.

python provider.py '{"batch_latency": "constant:0.3"}' prints its address. Beside the provider's endpoints it answers
GET /_window (the bill, the batches, who asked) and POST /_window/script?fault=NAME&times=N.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any
from urllib.parse import parse_qs

from carpool.mock import MockAnthropic, MockConfig, OpenAIConfig, parse_latency, serve

WINDOW = "/_window"
LATENCIES = {"batch_latency", "sync_latency", "control_latency"}
TOLD = ("user-agent", "anthropic-version", "content-type", "content-encoding", "x-stainless-retry-count")


class Window:
    """Stands before the provider's app, writes down who asks for what, and shows it to the tests."""

    def __init__(self, provider: MockAnthropic) -> None:
        self._provider, self._app = provider, provider.app
        self._asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith(WINDOW):
            await answer(send, self._shown(scope))
            return
        self._asked.append(asked(scope))
        await self._app(scope, receive, send)

    def _shown(self, scope: Any) -> dict[str, Any]:
        query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode()).items()}
        if scope["path"] == f"{WINDOW}/script":
            self._provider.script(query["fault"], int(query.get("times", 1)))
            return {}
        return {"charges": self._charges(), "batches": self._batches(), "asked": self._asked}

    def _charges(self) -> list[dict[str, Any]]:
        names = ("credential", "kind", "batch_id", "model", "nano_usd", "fingerprint")
        return [
            {**{name: getattr(charge, name) for name in names}, **tokens(charge.usage)}
            for charge in self._provider.bill.charges
        ]

    def _batches(self) -> list[dict[str, Any]]:
        return [{"id": one.id, "credential": one.credential, "size": one.size} for one in self._provider.batches]


def tokens(usage: Any) -> dict[str, int]:
    return {"input": usage.total_input, "output": usage.output}


def asked(scope: Any) -> dict[str, Any]:
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return {
        "credential": headers.get("x-api-key") or token,
        "scheme": "x-api-key" if "x-api-key" in headers else scheme,
        "method": scope["method"],
        "path": scope["path"].removeprefix("/openai"),  # where some have OpenAI's paths
        "query": scope["query_string"].decode(),
        **{name: headers[name] for name in TOLD if name in headers},
    }


async def answer(send: Any, shown: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(shown).encode()})


async def main(settings: dict[str, Any]) -> None:
    own = OpenAIConfig(vendor=settings.pop("vendor", "openai"))
    read = {name: parse_latency(value) if name in LATENCIES else value for name, value in settings.items()}
    provider = MockAnthropic(MockConfig(**read, openai=own))
    provider.app = Window(provider)  # type: ignore[assignment]
    async with serve(provider=provider) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
