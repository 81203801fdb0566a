"""Drives the frameworks: each does a handful of tasks in its own words, and what it made of the answers is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from . import environments
from .checks import SNIPPET, check_bill, fingerprint
from .sdks import MODEL, OPENAI_MODEL, SCRIPTS, last_line
from .stage import ResponseEnd, Stage, Trouble, expect, run
from .verdicts import Cell, Verdict

EVERY_TASK = ("text", "stream", "object", "parts", "tool")  # see clients/tasks.py
STREAMED = ("stream", "parts")


@dataclass(frozen=True)
class Framework:
    package: str  # in versions.toml
    label: str
    script: str
    endpoints: tuple[str, ...] = ("messages", "chat", "responses")
    tasks: tuple[str, ...] = EVERY_TASK
    below: str = ""  # what its base URL ends in for Anthropic

    @property
    def name(self) -> str:
        return f"{self.label} {environments.version_of(self.package)}"

    @property
    def command(self) -> list[str | Path]:
        script = SCRIPTS / self.script
        if script.suffix == ".cjs":
            return [environments.node(), script]
        return [environments.python(environments.home_of(self.package)), script]


FRAMEWORKS = (
    Framework("langchain-anthropic", "LangChain", "langchain_python.py"),
    Framework("pydantic-ai-slim", "pydantic-ai", "pydantic_ai_python.py"),
    Framework("openai-agents", "openai-agents", "openai_agents_python.py", ("chat", "responses")),
    Framework("litellm", "LiteLLM", "litellm_python.py", ("messages", "chat")),
    Framework(
        "instructor", "instructor", "instructor_python.py", ("messages", "chat", "responses"), ("object", "parts")
    ),
    Framework("ai", "Vercel AI SDK", "vercel_node.cjs", below="/v1"),
)


@dataclass(frozen=True)
class Task:
    """As the scripts in clients/ read it."""

    name: str
    key: str
    url: str
    prompt: str
    task: str
    endpoint: str
    model: str


def tasks_of(framework: Framework, stage: Stage) -> Iterator[tuple[Cell, Task]]:
    for endpoint, lane, task in product(framework.endpoints, ("now", "batch"), framework.tasks):
        name = f"{endpoint}-{lane}-{task}"
        is_anthropic = endpoint == "messages"
        options = "" if lane == "now" else "@budget=30m" if is_anthropic else "@lane=batch"
        how = "stream" if task in STREAMED else "whole"
        yield (
            Cell(framework.name, lane, how, task == "tool", f"{endpoint}, {task}"),
            Task(
                name=name,
                key=f"sk-{framework.package}-{name}",
                url=stage.at(options) + (framework.below if is_anthropic else "/v1"),
                prompt=f"[tool] {name}" if task == "tool" else f"A question of {name}",
                task=task,
                endpoint=endpoint,
                model=MODEL if is_anthropic else OPENAI_MODEL,
            ),
        )


async def try_framework(framework: Framework, stage: Stage) -> list[Verdict]:
    plan = list(tasks_of(framework, stage))
    room = stage.room(framework.package)
    (room / "asks.json").write_text(json.dumps([asdict(task) for _, task in plan]))
    env = {"NODE_PATH": str(environments.NODE / "node_modules"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = (await run([*framework.command, room / "asks.json"], room, "go\n", **env)).ok()
    told = json.loads(last_line(done.out))
    return [judge(cell, task, told[task.name], await stage.seen(task.key)) for cell, task in plan]


def judge(cell: Cell, task: Task, told: dict[str, Any], seen: ResponseEnd) -> Verdict:
    try:
        expect("error" not in told, f"it failed with {told.get('error')}")
        (turn,) = told["turns"]
        charged = [charge["fingerprint"] for charge in seen.charges]
        turns = 2 if task.task == "tool" else 1
        expect(len(charged) == len(set(charged)) == turns, f"{turns} calls were to be bought, and {charged} were")
        check_bill(seen, cell.lane, charged)
        check_answer(turn, task, charged)
    except Trouble as trouble:
        return Verdict(cell, str(trouble))
    return Verdict(cell)


def check_answer(turn: dict[str, Any], task: Task, charged: list[str]) -> None:
    if task.task in ("object", "parts"):
        check_object(turn["object"], task.prompt)
        return
    last = fingerprint(turn["text"], None if task.task == "tool" else task.prompt)
    expect(last in charged, f"its answer {last} is none of those it was billed for, {charged}")
    wanted = [{"query": task.prompt[:SNIPPET]}] if task.task == "tool" else []
    expect(turn["called"] == wanted, f"its tool was called with {turn['called']} instead of {wanted}")


def check_object(made: dict[str, Any] | None, prompt: str) -> None:
    """The framework has held it against its model already: here, that it is the answer to this very question."""
    expect(made is not None and prompt[:SNIPPET] in made["city"], f"it was made {made} of the answer to {prompt!r}")
