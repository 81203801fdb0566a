"""Drives the SDKs: a script in the client's own environment asks, and what it was told is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from . import environments
from .checks import check_bill, check_turns, check_usage
from .stage import HERE, Stage, Trouble, expect, run
from .verdicts import Cell, Verdict

SCRIPTS = HERE / "clients"
MODEL = "claude-haiku-4-5"
OPENAI_MODEL = "gpt-5-mini"
PATHS = {"messages": "/v1/messages", "chat": "/v1/chat/completions", "responses": "/v1/responses"}


@dataclass(frozen=True)
class Sdk:
    row: str  # of versions.toml
    label: str
    script: str
    dialect: str = "anthropic"
    vendor: str = ""  # the OpenAI-compatible provider it is made for
    below: str = "/v1"  # what its base URL ends in
    model: str = ""
    endpoints: tuple[str, ...] = ("chat",)
    lanes: tuple[str, ...] = ("now", "flex", "batch")
    keeps_timeout: bool = False  # the one that it has unless told otherwise is short enough to be tried
    deaf: bool = False  # to errors in a stream: it only knows that it can't read one
    styles: tuple[str, ...] = ("blocking", "async")

    @property
    def name(self) -> str:
        return f"{self.label} {environments.version_of(self.row)}"

    @property
    def command(self) -> list[str | Path]:
        script = SCRIPTS / self.script
        return [environments.node() if script.suffix == ".cjs" else environments.python(self.row), script]


ANTHROPIC = (
    Sdk("anthropic-new", "anthropic (Python)", "anthropic_python.py"),
    Sdk("anthropic-old", "anthropic (Python)", "anthropic_python.py"),
    Sdk("@anthropic-ai/sdk", "@anthropic-ai/sdk (Node)", "anthropic_node.cjs", styles=("async",)),
)


_BOTH = ("chat", "responses")
OPENAI = (
    Sdk("openai-new", "openai (Python)", "openai_python.py", "openai", model=OPENAI_MODEL, endpoints=_BOTH),
    Sdk("openai-old", "openai (Python)", "openai_python.py", "openai", model=OPENAI_MODEL, endpoints=_BOTH),
    Sdk("openai", "openai (Node)", "openai_node.cjs", "openai", model=OPENAI_MODEL, endpoints=_BOTH, styles=("async",)),
    Sdk("groq", "groq (Python)", "groq_python.py", "openai", "groq", "", "openai/gpt-oss-120b"),
    Sdk(
        "mistralai",
        "mistralai (Python)",
        "mistral_python.py",
        "openai",
        "mistral",
        "",
        "mistral-small-latest",
        lanes=("now", "batch"),
        keeps_timeout=True,
        deaf=True,
    ),
)
VENDORS = tuple(sdk.vendor for sdk in OPENAI if sdk.vendor)


@dataclass(frozen=True)
class Ask:
    """One conversation, as the scripts in clients/ read it."""

    name: str
    key: str
    url: str
    turns: tuple[str, ...]
    stream: bool = False
    tools: bool = False
    style: str = "async"
    endpoint: str = "messages"
    model: str = MODEL
    retries: int = 0
    timeout: float | None = None  # the SDK's own
    silence: float | None = None  # Node's own


async def ask(sdk: Sdk, stage: Stage, asks: Sequence[Ask], seconds: float = 120.0) -> dict[str, dict[str, Any]]:
    """What each ask was told."""
    room = stage.room(sdk.row.replace("/", "-"))
    (room / "asks.json").write_text(json.dumps([asdict(one) for one in asks]))
    node = {"NODE_PATH": str(environments.NODE / "node_modules")}
    done = (await run([*sdk.command, room / "asks.json"], room, "go\n", seconds, **node)).ok()
    told: dict[str, dict[str, Any]] = json.loads(last_line(done.out))
    return told


def last_line(text: str) -> str:
    """Lines as JSON has them: U+2028 ends none."""
    return text.strip().rpartition("\n")[2]


def turns_of(name: str, tools: bool) -> tuple[str, ...]:
    return (f"[tool] {name}", f"[think] {name}, again") if tools else (f"A question of {name}",)


def matrix_of(sdk: Sdk, stage: Stage) -> Iterator[tuple[Cell, Ask]]:
    """Both lanes, whole answers and streams, with tools and without, in every style of the SDK."""
    for lane, options in (("now", ""), ("batch", "@budget=30m")):
        for stream in (False, True):
            for tools in (False, True):
                for style in sdk.styles:
                    name = "-".join((lane, "stream" if stream else "whole", "tools" if tools else "plain", style))
                    cell = Cell(sdk.name, lane, "stream" if stream else "whole", tools, style)
                    forced = "@lane=batch" if lane == "batch" and tools else options
                    yield (
                        cell,
                        Ask(
                            name=name,
                            key=f"sk-{sdk.row}-{name}",
                            url=stage.at(forced),
                            turns=turns_of(name, tools),
                            stream=stream,
                            tools=tools,
                            style=style,
                        ),
                    )


def openai_matrix_of(sdk: Sdk, stage: Stage) -> Iterator[tuple[Cell, Ask]]:
    """Every endpoint and every lane that there is."""
    for endpoint, lane in product(sdk.endpoints, sdk.lanes):
        for stream, tools, style in product((False, True), (False, True), sdk.styles):
            how = "stream" if stream else "whole"
            name = "-".join((endpoint, lane, how, "tools" if tools else "plain", style))
            named = [f"provider={sdk.vendor}"] if sdk.vendor else []
            options = ",".join([*named, *([f"lane={lane}"] if lane != "now" or tools else [])])
            yield (
                Cell(sdk.name, lane, how, tools, f"{endpoint}, {style}"),
                Ask(
                    name=name,
                    key=f"sk-{sdk.row}-node-{name}" if sdk.row == "openai" else f"sk-{sdk.row}-{name}",
                    url=stage.at(f"@{options}" if options else "") + sdk.below,
                    turns=(f"[tool] {name}", f"Again {name}") if tools else (f"A question of {name}",),
                    stream=stream,
                    tools=tools,
                    style=style,
                    endpoint=endpoint,
                    model=sdk.model,
                ),
            )


async def try_matrix(sdk: Sdk, stage: Stage) -> list[Verdict]:
    plan = list((matrix_of if sdk.dialect == "anthropic" else openai_matrix_of)(sdk, stage))
    told = await ask(sdk, stage, [one for _, one in plan])
    return [await judge(stage, cell, one, told[one.name]) for cell, one in plan]


async def judge(stage: Stage, cell: Cell, one: Ask, told: dict[str, Any]) -> Verdict:
    try:
        expect("error" not in told, f"it failed with {told.get('error')}")
        fingerprints = check_turns(told["turns"], one.turns)
        seen = await stage.seen(one.key)
        check_bill(seen, cell.lane, fingerprints)
        check_usage(seen, told["turns"])
        alone = seen.posts(PATHS[one.endpoint])
        expect(alone == (0 if cell.lane == "batch" else len(one.turns)), f"{alone} calls went on now or flex")
        tiers = {turn["tier"] for turn in told["turns"] if turn.get("tier")}
        expect(tiers <= {"flex" if cell.lane == "flex" else "default"}, f"it was served in the tiers {tiers}")
    except Trouble as trouble:
        return Verdict(cell, str(trouble))
    return Verdict(cell)
