"""Memory of one waiting batch client: how much `carpool serve` grows when many clients wait for their batch.

    .venv/bin/python bench/proxy/waiting.py --clients 10000

The mock provider, the proxy and the clients are a process each. Every client has a connection of its own, a body of
1 KB and the headers of an SDK. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

BODY_BYTES = 1024
SDK_HEADERS = (
    "x-api-key: sk-bench-0123456789abcdef",
    "anthropic-version: 2023-06-01",
    "accept: application/json",
    "accept-encoding: gzip, deflate",
    "content-type: application/json",
    "user-agent: AsyncAnthropic/Python 2.8.0",
    "x-stainless-lang: python",
    "x-stainless-package-version: 2.8.0",
    "x-stainless-os: Linux",
    "x-stainless-arch: x64",
    "x-stainless-runtime: CPython",
    "x-stainless-runtime-version: 3.11.4",
    "x-stainless-async: async:asyncio",
    "x-stainless-retry-count: 0",
    "x-stainless-read-timeout: 600",
)
MANY_FILES = 65_536
PATIENCE_S = 240


def body(number: int) -> bytes:
    asked: dict[str, Any] = {"model": "claude-haiku-4-5", "max_tokens": 100, "messages": []}
    asked["messages"] = [{"role": "user", "content": f"{number:08} "}]
    padding = BODY_BYTES - len(json.dumps(asked))
    asked["messages"][0]["content"] += "x" * padding
    return json.dumps(asked).encode()


def rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"Process {pid} is gone.")


@contextmanager
def process(*command: str) -> Iterator[tuple[int, str]]:
    """A `carpool` process, and the first thing that it says."""
    full = [sys.executable, "-m", "carpool", *command]
    with subprocess.Popen(full, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            said = child.stdout.readline()
            if " listens on " not in said:
                raise RuntimeError(f"`carpool {command[0]}` did not start.")
            yield child.pid, said
        finally:
            child.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stats(url: str) -> dict[str, Any]:
    with urlopen(f"{url}/carpool/stats", timeout=30) as answer:
        said: dict[str, Any] = json.load(answer)
    return said


async def connect(host: str, port: int, number: int, gate: asyncio.Semaphore) -> asyncio.StreamWriter:
    async with gate:
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        sent = body(number)
        head = ["POST /@budget=20h/v1/messages HTTP/1.1", f"host: {host}:{port}", *SDK_HEADERS]
        writer.write("\r\n".join([*head, f"content-length: {len(sent)}", "", ""]).encode() + sent)
        await writer.drain()
        return writer


async def crowd(url: str, pid: int, clients: int) -> dict[str, int]:
    host, port = url.removeprefix("http://").split(":")
    gate = asyncio.Semaphore(64)
    first = await asyncio.gather(*(connect(host, int(port), n, gate) for n in range(20)))  # what is made once is made
    await until_waiting(url, len(first))
    before = rss(pid)
    writers = await asyncio.gather(*(connect(host, int(port), 1000 + n, gate) for n in range(clients)))
    await until_waiting(url, clients + len(first))
    await until_bought(url)
    waiting = rss(pid)
    for writer in (*first, *writers):
        writer.transport.abort()
    return {"rss_before": before, "rss_waiting": waiting}


async def until_waiting(url: str, count: int) -> None:
    while (await asyncio.to_thread(stats, url))["waiting"] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


async def until_bought(url: str) -> None:
    """Until everybody is aboard: what a create needs beside is then given back, or it counts."""
    while (await asyncio.to_thread(stats, url))["store"].get("tickets.queued"):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(2.0)


def measure(clients: int) -> dict[str, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, MANY_FILES), hard), hard))
    port = free_port()
    mock, upstream = ("mock", "--port", str(port), "--batch-latency", "constant:86000"), f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, process(*mock):
        serve = ("serve", "--port", "0", "--upstream", upstream, "--store", f"{folder}/s.db", "--log-format", "off")
        with process(*serve) as (pid, said):
            url = said.split(" listens on ")[1].split()[0]
            found = asyncio.run(asyncio.wait_for(crowd(url, pid, clients), PATIENCE_S))
    each = (found["rss_waiting"] - found["rss_before"]) // clients
    return {"clients": clients, "bytes_per_client": each, **found, "body_bytes": BODY_BYTES}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--clients", type=int, default=10_000)
    found = measure(options.parse_args().clients)
    print(f"{found['bytes_per_client'] / 1024:.1f} KB for each of {found['clients']:,} waiting clients.")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
