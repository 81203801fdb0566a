"""A fleet of agents over plain sockets, each with retries as the SDKs make them."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

MODEL = "claude-haiku-4-5"
RETRIES = 2  # as the SDKs have it


@dataclass(frozen=True)
class Done:
    """One call that an agent finished, well or not."""

    tag: str
    at: float
    status: int
    tries: int


class Agent:
    """Calls without a pause until it is told to stop, on one connection that it keeps."""

    def __init__(self, url: str, tag: str, number: int, seed: int, key: str = "k") -> None:
        parts = urlsplit(url)
        self._place = (parts.hostname, parts.port)
        self._tag = tag
        self._dice = random.Random(seed * 1000 + number)
        self._body = json.dumps(
            {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": f"agent {number}"}]}
        ).encode()
        self._head = (
            f"POST /v1/messages HTTP/1.1\r\nhost: {parts.netloc}\r\nx-api-key: {key}\r\n"
            f"anthropic-version: 2023-06-01\r\ncontent-type: application/json\r\nx-carpool-tags: team={tag}\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        ).encode()
        self.done: list[Done] = []

    async def run(self, until: float) -> None:
        await asyncio.sleep(self._dice.random() * 0.2)
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            while time.time() < until:
                self.done.append(await self._call(reader, writer))
        finally:
            writer.close()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Done:
        status = 0
        for tries in range(RETRIES + 1):
            status, after = await self._try(reader, writer)
            if status < 429 or tries == RETRIES:
                return Done(self._tag, time.time(), status, tries)
            await asyncio.sleep(after or min(8.0, 0.5 * 2**tries) * (1 - self._dice.random() / 4))
        raise AssertionError

    async def _try(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, float]:
        writer.write(self._head + self._body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        lines = head.split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        await reader.readexactly(int(headers["content-length"]))
        return int(lines[0].split()[1]), float(headers.get("retry-after", 0))


async def run_fleet(url: str, teams: dict[str, int], seconds: float, seed: int) -> Sequence[Done]:
    """So many agents of each team, for so long."""
    until = time.time() + seconds
    tags = [tag for tag, count in teams.items() for _ in range(count)]
    agents = [Agent(url, tag, number, seed) for number, tag in enumerate(tags)]
    async with asyncio.TaskGroup() as group:
        for agent in agents:
            group.create_task(agent.run(until))
    return [done for agent in agents for done in agent.done]
