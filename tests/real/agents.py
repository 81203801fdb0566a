"""Drives the agents that are programs of their own. They always stream, and take their tools from an MCP server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import environments
from .checks import arguments, check_bill, fingerprint
from .stage import HERE, Done, ResponseEnd, Stage, Trouble, expect, run
from .verdicts import Cell, Verdict

SERVER = HERE / "lookup_server.py"
BOTH_LANES = (("now", ""), ("batch", "@budget=30m"))


@dataclass(frozen=True)
class Errand:
    """One run of an agent."""

    key: str
    url: str
    prompt: str
    room: Path
    tools: bool = False
    model: str = "claude-haiku-4-5"
    seconds: float = 120.0
    env: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> Path:
        return self.room / "notes.jsonl"

    @property
    def server(self) -> list[str]:
        """The command of the server whose tool the agent may use."""
        return [sys.executable, str(SERVER), str(self.notes)]


@dataclass(frozen=True)
class Report:
    """What an agent says of its run, however it says it."""

    text: str
    output_tokens: int
    tools: list[str]


def events(done: Done) -> list[dict[str, Any]]:
    """Lines of JSON; a line that is none is somebody's warning."""
    return [json.loads(line) for line in done.out.split("\n") if line.startswith("{")]


class ClaudeCode:
    row, label = "@anthropic-ai/claude-code", "Claude Code"
    tool, lanes = "mcp__real__lookup", BOTH_LANES
    ends_on_failure = True

    async def run(self, errand: Errand) -> Done:
        command: list[str | Path] = [environments.program("claude"), "-p", errand.prompt, "--model", errand.model]
        command += ["--output-format", "stream-json", "--verbose", "--tools", ""]
        if errand.tools:
            servers = {"real": {"command": errand.server[0], "args": errand.server[1:]}}
            command += ["--mcp-config", json.dumps({"mcpServers": servers}), "--strict-mcp-config"]
            command += ["--allowedTools", self.tool]
        env = {
            "ANTHROPIC_BASE_URL": errand.url,
            "ANTHROPIC_API_KEY": errand.key,
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",  # or the first tool is a placeholder
            **errand.env,
        }
        return await run(command, errand.room, seconds=errand.seconds, **env)

    def read(self, done: Done) -> Report:
        told = events(done)
        final = next(one for one in told if one["type"] == "result")
        expect(not final["is_error"], f"it reported an error: {final.get('result')}")
        blocks = [block for one in told if one["type"] == "assistant" for block in one["message"]["content"]]
        used = [block["name"] for block in blocks if block["type"] == "tool_use"]
        return Report(final["result"], final["usage"]["output_tokens"], used)


class OpenCode:
    row, label = "opencode-ai", "opencode"
    tool, lanes = "real_lookup", BOTH_LANES
    ends_on_failure = False  # it takes every error inside a stream for a passing one, and tries again for ever

    async def run(self, errand: Errand) -> Done:
        settings: dict[str, Any] = {
            "provider": {"anthropic": {"options": {"baseURL": f"{errand.url}/v1", "apiKey": errand.key}}},
            "model": f"anthropic/{errand.model}",
            "small_model": f"anthropic/{errand.model}",
            "autoupdate": False,
            "share": "disabled",
            "tools": {"*": False, self.tool: True},
        }
        if errand.tools:
            settings["mcp"] = {"real": {"type": "local", "command": errand.server}}
        (errand.room / "opencode.json").write_text(json.dumps(settings))
        # A title of its own saves the call in which it would make one up.
        command = [environments.program("opencode"), "run", "--title", "real", "--format", "json", errand.prompt]
        env = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", **errand.env}
        return await run(command, errand.room, seconds=errand.seconds, **env)

    def read(self, done: Done) -> Report:
        parts = [one["part"] for one in events(done)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        expect(texts, f"it said nothing: {done.out[-500:]}")
        spent = sum(part["tokens"]["output"] for part in parts if part["type"] == "step-finish")
        return Report(texts[-1], spent, [part["tool"] for part in parts if part["type"] == "tool"])


class Codex:
    """Its tool is its own shell. Its usual model is sold on `now` alone, whatever the budget; others on every lane."""

    row, label = "@openai/codex", "Codex"
    tool = "/bin/bash -lc 'echo carpool'"
    lanes = (("now", ""), ("now", "@budget=30m"), ("flex", "@lane=flex"), ("batch", "@lane=batch"))
    ends_on_failure = True

    async def run(self, errand: Errand) -> Done:
        command: list[str | Path] = [environments.program("codex"), "exec", "--skip-git-repo-check", "--json"]
        model = "gpt-5-mini" if "@lane=" in errand.url else "gpt-5.3-codex"
        command += ["-m", model, "-c", f'openai_base_url="{errand.url}/v1"']
        command += ["-s", "danger-full-access", errand.prompt]  # what it runs is what the mock tells it: an echo
        return await run(command, errand.room, seconds=errand.seconds, CODEX_API_KEY=errand.key, **errand.env)

    def read(self, done: Done) -> Report:
        told = events(done)
        items = [one["item"] for one in told if one["type"] == "item.completed"]
        texts = [item["text"] for item in items if item["type"] == "agent_message"]
        expect(texts, f"it said nothing: {done.out[-500:]}")
        ran = [item for item in items if item["type"] == "command_execution"]
        expect(all(item["aggregated_output"] == "carpool\n" for item in ran), f"its command came to {ran}")
        final = next(one for one in told if one["type"] == "turn.completed")
        return Report(texts[-1], final["usage"]["output_tokens"], [item["command"] for item in ran])


AGENTS = (ClaudeCode(), OpenCode(), Codex())
Agent = ClaudeCode | OpenCode | Codex


def name_of(agent: Agent) -> str:
    return f"{agent.label} {environments.version_of(agent.row)}"


def plan(agent: Agent) -> Iterator[tuple[Cell, str]]:
    """The cells of an agent, each with the options in its base URL."""
    for lane, options in agent.lanes:
        for tools in (False, True):
            yield Cell(name_of(agent), lane, "stream", tools, options), options


async def try_agent(agent: Agent, stage: Stage) -> list[Verdict]:
    """One after the other: the first run in a fresh home writes there what the others use."""
    return [await try_cell(agent, cell, options, stage) for cell, options in plan(agent)]


async def try_cell(agent: Agent, cell: Cell, options: str, stage: Stage) -> Verdict:
    way = f"{cell.lane}-{'tools' if cell.tools else 'plain'}{'-budget' if options else ''}"
    name = f"{agent.label}-{way}".replace(" ", "-")
    prompt = f"[tool] {name}" if cell.tools else f"A question of {name}"
    errand = Errand(f"sk-{name}", stage.at(options), prompt, stage.room(name), cell.tools)
    try:
        report = agent.read((await agent.run(errand)).ok())
        check(agent, errand, report, await stage.seen(errand.key), cell.lane)
    except Trouble as trouble:
        return Verdict(cell, str(trouble))
    return Verdict(cell)


def check(agent: Agent, errand: Errand, report: Report, seen: ResponseEnd, lane: str) -> None:
    """With a tool there are two turns: one that calls it, and one that has its result."""
    last = fingerprint(report.text)
    turns = 2 if errand.tools else 1
    charged = [charge["fingerprint"] for charge in seen.charges]
    expect(len(charged) == len(set(charged)) == turns, f"{turns} calls were to be bought, and {charged} were")
    expect(last in charged, f"its answer {last} is none of those it was billed for, {charged}")
    check_bill(seen, lane, charged)
    billed = sum(charge["output"] for charge in seen.charges)
    expect(report.output_tokens == billed, f"it heard of {report.output_tokens} output tokens and is billed {billed}")
    expect(report.tools == [agent.tool] * (turns - 1), f"it used the tools {report.tools}")
    sockets = [one for one in seen.asked if (one["method"], one["path"]) == ("GET", "/v1/responses")]
    expect(not sockets, "a WebSocket reached the provider: it was to be refused at the door")
    if errand.tools and not isinstance(agent, Codex):
        called = [json.loads(line) for line in errand.notes.read_text("utf-8").split("\n") if line]
        wanted = arguments(errand.prompt)
        # Some agents put quotation marks around a prompt that they are given as an argument.
        expect(len(called) == 1, f"its tool was called {len(called)} times")
        expect(
            called[0]["query"].strip('"') == wanted["query"].strip('"'), f"its tool was asked {called[0]['query']!r}"
        )
        expect({**called[0], "query": ""} == {**wanted, "query": ""}, f"its tool was called with {called[0]}")
