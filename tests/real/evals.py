"""Drives inspect_ai: in its own batch mode, which passes through carpool untouched, and on carpool's lanes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from . import environments
from .checks import arguments, check_bill, fingerprint
from .sdks import MODEL, SCRIPTS
from .stage import ResponseEnd, Stage, Trouble, expect, run
from .verdicts import Cell, Verdict

OPTIONS = {"now": "", "batch": "@budget=30m", "own batches": ""}
COUNT = 6  # of plain questions, and of those with tools


def name() -> str:
    return f"inspect_ai {environments.version_of('inspect')}"


async def try_eval(lane: str, stage: Stage) -> list[Verdict]:
    key, room = f"sk-inspect-{lane.replace(' ', '-')}", stage.room(f"inspect-{lane.replace(' ', '-')}")
    how = "whole" if lane == "own batches" else "stream"
    cells = [Cell(name(), lane, how, tools) for tools in (False, True)]
    try:
        samples = await evaluate(stage.at(OPTIONS[lane]), key, room, lane == "own batches")
        expect(len(samples) == 2 * COUNT, f"{len(samples)} samples came back")
        seen = await stage.seen(key)
        check(seen, samples, lane)
    except Trouble as trouble:
        return [Verdict(cell, str(trouble)) for cell in cells]
    return [Verdict(cell) for cell in cells]


async def evaluate(url: str, key: str, room: Path, batches: bool) -> list[dict[str, Any]]:
    shutil.copy(SCRIPTS / "inspect_task.py", room)  # it takes relative paths only
    (room / "batch.json").write_text(json.dumps({"send_delay": 0.5, "tick": 0.2}))
    command = [environments.program("inspect", "inspect"), "eval", "inspect_task.py", "-T", f"count={COUNT}"]
    command += ["--model", f"anthropic/{MODEL}", "--max-tokens", "400", "--max-retries", "0"]
    command += ["--log-dir", "logs", "--log-format", "json", "--display", "plain"]
    command += ["--batch", "batch.json"] if batches else []
    (await run(command, room, ANTHROPIC_BASE_URL=url, ANTHROPIC_API_KEY=key)).ok()
    (log,) = (room / "logs").glob("*.json")
    told = json.loads(log.read_text("utf-8"))
    expect(told["status"] == "success", f"the evaluation ended with {told['status']}")
    samples: list[dict[str, Any]] = told["samples"]
    return samples


def check(seen: ResponseEnd, samples: list[dict[str, Any]], lane: str) -> None:
    charged = [charge["fingerprint"] for charge in seen.charges]
    expect(len(charged) == len(set(charged)) == 3 * COUNT, f"{3 * COUNT} calls were to be bought, not {len(charged)}")
    check_bill(seen, lane, charged)
    for sample in samples:
        expect(check_sample(sample) in charged, f"the answer of sample {sample['id']} was never billed")
    heard = sum(usage["output_tokens"] for sample in samples for usage in sample["model_usage"].values())
    billed = sum(charge["output"] for charge in seen.charges)
    expect(heard == billed, f"it heard of {heard} output tokens and was billed for {billed}")
    alone, made = seen.posts("/v1/messages"), seen.posts("/v1/messages/batches")
    expect((alone > 0) == (lane == "now") and (made > 0) == (lane != "now"), f"{alone} calls, {made} batches were made")


def check_sample(sample: dict[str, Any]) -> str:
    prompt, text = sample["input"], sample["output"]["completion"]
    if "[tool]" not in prompt:
        return fingerprint(text, prompt)
    calls = [call for message in sample["messages"] for call in message.get("tool_calls") or ()]
    expect([call["arguments"] for call in calls] == [arguments(prompt)], f"sample {sample['id']} called {calls}")
    return fingerprint(text)
