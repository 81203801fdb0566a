"""`make walk`: the modules that one call crosses, in the order in which it reaches them.

A tracer watches every thread of this process while a call travels on a warm connection: through the proxy on `now`,
through the proxy into a batch and back, and through `fleet.submit`.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from anthropic import AsyncAnthropic

import carpool
from carpool import BatchSubmitted, CallAdmitted, CallSettled, FleetDispatcher
from carpool.mock import Constant, MockConfig
from tests.support import ROOT
from tests.support.stage import QUICK, ask, staged

SOURCE = str(Path(carpool.__file__).parent) + "/"
APART = ("mock/", "sim/")
PAGE = ROOT / "docs" / "architecture.md"
PART = re.compile(r"(?P<open><!-- walks -->\n).*?(?P<close><!-- end of walks -->)", re.DOTALL)
BUDGET = "30m"
QUIET_S = 0.5  # until what earlier calls left to do is done


class Tracer:
    """Notes every module whose code is called while it is active."""

    def __init__(self) -> None:
        self._modules: dict[str, None] | None = None
        sys.setprofile(self._called)
        threading.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self._modules is not None and frame.f_code.co_filename.startswith(SOURCE):
            name = frame.f_code.co_filename.removeprefix(SOURCE)
            if not name.startswith(APART):
                self._modules.setdefault(name, None)

    @contextmanager
    def walk(self, walks: dict[str, list[str]], name: str) -> Iterator[None]:
        self._modules = {}
        yield
        walks[name], self._modules = list(self._modules), None

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


class Events:
    """A hook that lets a walk end where something has happened."""

    def __init__(self) -> None:
        self._happened: dict[type, asyncio.Event] = {}

    def __call__(self, event: Any) -> None:
        self.of(type(event)).set()

    def of(self, kind: type) -> asyncio.Event:
        return self._happened.setdefault(kind, asyncio.Event())


async def proxy_walks(tracer: Tracer, walks: dict[str, list[str]]) -> None:
    events = Events()
    async with staged(MockConfig(batch_latency=Constant(0.01), sync_latency=Constant(0.0))) as stage:
        await stage.post(ask("warm"))
        await asyncio.sleep(QUIET_S)
        with tracer.walk(walks, "now: bytes → answer"):
            await stage.post(ask("traced"))
        for number in range(2):  # a head is known from its second request on
            await stage.post(ask(f"warm, patient {number}"), x_carpool_budget=BUDGET)
        await asyncio.sleep(QUIET_S)
        stage.engine.event_hooks.add(events)
        with tracer.walk(walks, "patient: bytes → disk"):
            answer = asyncio.create_task(stage.post(ask("patient"), x_carpool_budget=BUDGET))
            await events.of(CallAdmitted).wait()
        await events.of(BatchSubmitted).wait()
        with tracer.walk(walks, "patient: ended → settled"):
            await events.of(CallSettled).wait()
        await answer


async def library_walk(tracer: Tracer, walks: dict[str, list[str]]) -> None:
    events = Events()
    async with (
        staged(MockConfig(batch_latency=Constant(0.01))) as stage,
        AsyncAnthropic(api_key="k", base_url=stage.direct) as client,
        FleetDispatcher(client, policy=QUICK, hooks=[events]) as fleet,
    ):
        await fleet.submit(**ask("warm"))
        await asyncio.sleep(QUIET_S)
        events.of(CallAdmitted).clear()
        with tracer.walk(walks, "fleet.submit → disk"):
            answer = asyncio.create_task(fleet.submit(**ask("traced")))
            await events.of(CallAdmitted).wait()
        await answer


async def all_walks() -> dict[str, list[str]]:
    walks: dict[str, list[str]] = {}
    tracer = Tracer()
    try:
        await proxy_walks(tracer, walks)
        await library_walk(tracer, walks)
    finally:
        tracer.end()
    return walks


def section(walks: dict[str, list[str]]) -> str:
    """The walks as docs/architecture.md shows them: every module with the first sentence of its docstring."""
    parts = []
    for name, modules in walks.items():
        rows = [f"| `{module}` | {purpose(module)} |" for module in modules]
        parts.append(
            "\n".join([f"**{name}**, {len(modules)} modules\n", "| module | what it is for |", "|---|---|", *rows])
        )
    return "\n\n".join(parts) + "\n"


def purpose(module: str) -> str:
    text = ast.get_docstring(ast.parse(Path(SOURCE, module).read_text("utf-8"))) or ""
    return " ".join(re.split(r"(?<=\.)\s", text.partition("\n\n")[0], maxsplit=1)[0].split())


def documented() -> dict[str, list[str]]:
    """The walks in docs/architecture.md."""
    part = PART.search(PAGE.read_text("utf-8"))
    assert part is not None
    titles = re.split(r"^\*\*(.+?)\*\*.*$", part[0], flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^\| `(.+?)`", rows, re.MULTILINE)
        for name, rows in zip(titles[::2], titles[1::2], strict=True)
    }


def write(walks: dict[str, list[str]]) -> None:
    text = PAGE.read_text("utf-8")
    PAGE.write_text(PART.sub(lambda part: part["open"] + section(walks) + part["close"], text), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="make walk", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the walks as JSON")
    parser.add_argument("--write", action="store_true", help="write the walks into docs/architecture.md")
    arguments = parser.parse_args()
    walks = asyncio.run(all_walks())
    if arguments.write:
        write(walks)
    if arguments.json:
        print(json.dumps(walks, indent=2, ensure_ascii=False))
        return
    for name, modules in walks.items():
        print(f"{name}: {len(modules)} modules")
        for module in modules:
            print(f"  {module}")
    print(", ".join(f"{name} {len(modules)}" for name, modules in walks.items()))


if __name__ == "__main__":
    main()
