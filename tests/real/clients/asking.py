"""What the scripts for the Python SDKs share: a file of asks comes in, what each was told goes out as JSON.

An ask is one conversation: its turns are said one after the other, each after the answer to the one before. All asks of
a file begin together, when a line arrives on standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

Ask = dict[str, Any]
Told = dict[str, Any]
FOUND = "It was found."
LOOKUP = {"type": "object", "properties": {}, "additionalProperties": True}


def main(answer: Callable[[Ask], Awaitable[list[Told]]], failure: Callable[[Exception], Told]) -> None:
    asks = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_all(asks, answer, failure))))


async def _all(asks: list[Ask], answer: Any, failure: Any) -> dict[str, Told]:
    async def one(ask: Ask) -> tuple[str, Told]:
        try:
            return ask["name"], {"turns": await answer(ask)}
        except Exception as error:  # noqa: BLE001  whatever a client raises is what its user would see
            return ask["name"], {"turns": [], "error": {"raised": type(error).__name__, **failure(error)}}

    return dict(await asyncio.gather(*(one(ask) for ask in asks)))


def client_options(ask: Ask) -> dict[str, Any]:
    options = {"base_url": ask["url"], "api_key": ask["key"], "max_retries": ask["retries"]}
    return options if ask["timeout"] is None else {**options, "timeout": ask["timeout"]}
