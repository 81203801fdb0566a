"""An evaluation for inspect_ai: some plain questions, and some that need a tool."""

from __future__ import annotations

import json
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, ToolDef, ToolParams, tool


@tool
def lookup() -> Tool:
    async def execute(**asked: Any) -> str:
        return json.dumps(asked)

    return ToolDef(execute, "lookup", "Looks something up.", ToolParams(additionalProperties=True)).as_tool()


@task
def questions(count: int = 6) -> Task:
    asked = [f"A question, number {number}" for number in range(count)]
    asked += [f"[tool] number {number}" for number in range(count)]
    dataset = [Sample(input=text, id=str(number)) for number, text in enumerate(asked)]
    return Task(dataset=dataset, solver=[use_tools(lookup()), generate()])
