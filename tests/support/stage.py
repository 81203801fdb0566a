"""A proxy on a real port, in front of the mock on another."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from anthropic import AsyncAnthropic

from carpool.core.clock import SystemClock
from carpool.dialects import get as get_dialect
from carpool.engine import Engine, Upstream
from carpool.frontends.library.exchange import start_engine
from carpool.frontends.proxy import Proxy
from carpool.frontends.proxy.http.connection import Connection
from carpool.frontends.proxy.waiting import KeepAliveIntervals
from carpool.http import Http1Client
from carpool.mock import Constant, MockAnthropic, MockConfig, MockServer, serve
from carpool.planners.policy import RoutingPolicy

MODEL = "claude-haiku-4-5"
IMPATIENT = KeepAliveIntervals(stream_head_s=0.05, ping_s=0.05)  # the rest as in earnest
QUICK = RoutingPolicy(linger_ms=20, poll_interval_s=0.05, batch_rpm=100_000)


def ask(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": text}], **more}


@dataclass
class Stage:
    """Both ends, and hands on everything between."""

    url: str
    direct: str
    mock: MockAnthropic
    engine: Engine
    proxy: Proxy
    http: httpx2.AsyncClient

    def client(self, options: str = "", **more: Any) -> AsyncAnthropic:
        return AsyncAnthropic(base_url=self.url + options, **{"api_key": "k", "max_retries": 0, **more})

    async def post(self, body: Any, *, to: str | None = None, path: str = "/v1/messages", **headers: str) -> Any:
        sent = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post((to or self.url) + path, json=body, headers=sent)

    async def until(self, true: Callable[[], Any], seconds: float = 5.0) -> None:
        async with asyncio.timeout(seconds):
            while not true():  # noqa: ASYNC110  what is waited for happens on the other side of a connection
                await asyncio.sleep(0.01)


@asynccontextmanager
async def staged(
    config: MockConfig | None = None,
    policy: RoutingPolicy = QUICK,
    store: Path | None = None,
    intervals: KeepAliveIntervals = IMPATIENT,
    beside: MockServer | None = None,
    **more: Any,
) -> AsyncIterator[Stage]:
    config = config or MockConfig(batch_latency=Constant(0.2))
    clock, wire = SystemClock(), Http1Client()
    async with nullcontext(beside) if beside else serve(config) as mock, httpx2.AsyncClient(timeout=20) as http:
        upstream = Upstream("anthropic", mock.url, get_dialect("anthropic"), wire)
        engine = await start_engine(
            store, partial(Engine, clock=clock, upstreams={upstream.provider: upstream}, policy=policy)
        )
        proxy = Proxy(
            engine,
            {upstream.provider: upstream},
            clock,
            on_disconnect=policy.on_disconnect,
            intervals=intervals,
            **more,
        )
        async with _served(proxy) as url:
            yield Stage(url, mock.url, mock.provider, engine, proxy, http)
        await engine.close(0.0)
        await wire.aclose()


@asynccontextmanager
async def _served(app: Any, http: type[Connection] = Connection) -> AsyncIterator[str]:
    config = uvicorn.Config(
        app,
        http=http,
        log_level="critical",
        lifespan="off",
        proxy_headers=False,
        date_header=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.TaskGroup() as group:
            group.create_task(server._serve([listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
