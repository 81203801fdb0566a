"""Every client outlasts a long batch, is billed once for it, and hears the truth when it fails late.

Scaled: the clients' own limits and carpool's signs of life, both a hundredth or so of what they are. In real time:
everything as it comes, against a batch of twenty minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from . import agents
from .agents import Agent, Errand
from .checks import check_bill, check_turns
from .sdks import MODEL, Ask, Sdk, ask
from .stage import Stage, Trouble, expect
from .verdicts import Cell, Verdict

FAIL = "[error:invalid_request_error]"


@dataclass(frozen=True)
class Scale:
    batch_s: float
    serve: tuple[str, ...] = ()
    timeout: float | None = None  # of the SDKs
    silence: float | None = None  # of Node
    retries: int = 2  # of the SDKs, unless told otherwise
    agents: dict[str, dict[str, str]] = field(default_factory=dict)  # what an agent is told of its limits

    @property
    def seconds(self) -> float:
        return self.batch_s + 120

    @property
    def settings(self) -> dict[str, Any]:
        return {"batch_latency": f"constant:{self.batch_s:g}"}


SCALED = Scale(
    8,
    ("--patience", "0.01"),
    timeout=2.5,
    silence=2.5,
    retries=0,
    agents={
        # Without retries, which would find the call again and hide that its client had given up. Only its limit on
        # silence before the head can be scaled: the one after the head can't be set this low, and opencode has none
        # that was seen to act. What happens there is shown in real time only.
        "Claude Code": {
            "API_TIMEOUT_MS": "2500",
            "CLAUDE_CODE_MAX_RETRIES": "0",
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
        },
    },
)
REAL = Scale(1200)


def waiting(sdk: Sdk, stage: Stage, scale: Scale) -> Iterator[tuple[Cell, Ask]]:
    """Conversations that outlast their client's limits, or fail after them."""
    is_openai = sdk.dialect == "openai"
    named = f",provider={sdk.vendor}" if sdk.vendor else ""
    url = stage.at(f"@lane=batch{named}") + sdk.below if is_openai else stage.at("@budget=2h")
    timeout = None if sdk.keeps_timeout else scale.timeout
    is_node = sdk.script.endswith(".cjs")
    for fails in (False, True):
        for stream in (False, True):
            name = f"{'fails' if fails else 'waits'}-{'stream' if stream else 'whole'}"
            one = Ask(
                name,
                f"sk-{name}-{sdk.row}",
                url,
                (f"{FAIL if fails else 'A question of'} {name}",),
                stream=stream,
                # The time-out of the Node SDK is for the whole way to the head: no sign of life prolongs it.
                timeout=None if is_node else timeout,
                silence=scale.silence if is_node else None,
                retries=scale.retries,
                endpoint="chat" if is_openai else "messages",
                model=sdk.model or MODEL,
            )
            cell = Cell(sdk.name, "batch", "stream" if stream else "whole", style="a late failure" if fails else "")
            yield cell, one
            if scale.timeout is not None and not fails and not stream and not is_openai:
                again = replace(one, name="retries", key=f"sk-retries-{sdk.row}", timeout=scale.timeout, retries=8)
                yield replace(cell, style="retries"), replace(again, silence=None, style="async")


async def try_sdk(sdk: Sdk, scale: Scale, stage: Stage) -> list[Verdict]:
    plan = list(waiting(sdk, stage, scale))
    told = await ask(sdk, stage, [one for _, one in plan], scale.seconds)
    return [await judge(stage, cell, one, told[one.name], deaf=sdk.deaf and one.stream) for cell, one in plan]


async def judge(stage: Stage, cell: Cell, one: Ask, told: dict[str, Any], *, deaf: bool) -> Verdict:
    try:
        if FAIL in one.turns[0]:
            return Verdict(cell, note=check_failure(told, one.stream, deaf=deaf))
        expect("error" not in told, f"it failed with {told.get('error')}")
        check_bill(await stage.seen(one.key), "batch", check_turns(told["turns"], one.turns))
    except Trouble as trouble:
        return Verdict(cell, str(trouble))
    return Verdict(cell)


def check_failure(told: dict[str, Any], stream: bool, *, deaf: bool) -> str:
    """A whole answer has its true status; a stream has begun with a 200, and says the kind of its failure."""
    error = told.get("error")
    expect(error, f"it was to fail, and heard {told['turns']}")
    assert error is not None
    expect(deaf or error["kind"] == "invalid_request_error", f"it heard of {error} instead of invalid_request_error")
    expect(stream or error["status"] == 400, f"it heard of {error} instead of a 400")
    return f"a late failure{' of a stream' if stream else ''} is heard as {error['raised']} {error['status']}"


async def try_agent(agent: Agent, scale: Scale, stage: Stage) -> list[Verdict]:
    cell = Cell(agents.name_of(agent), "batch", "stream")
    name = f"waiting-{agent.label}".replace(" ", "-")
    env = scale.agents.get(agent.label, {})
    errand = Errand(
        f"sk-{name}", stage.at("@budget=2h"), f"A question of {name}", stage.room(name), seconds=scale.seconds, env=env
    )
    try:
        report = agent.read((await agent.run(errand)).ok())
        agents.check(agent, errand, report, await stage.seen(errand.key), "batch")
    except Trouble as trouble:
        return [Verdict(cell, str(trouble))]
    return [Verdict(cell)]


async def try_agents_failure(agent: Agent, scale: Scale, stage: Stage) -> list[Verdict]:
    """It ends by itself, says that it failed and why."""
    cell = Cell(agents.name_of(agent), "batch", "stream", style="a late failure")
    name = f"failing-{agent.label}".replace(" ", "-")
    room = stage.room(name)
    errand = Errand(f"sk-{name}", stage.at("@budget=2h"), f"{FAIL} {name}", room, seconds=scale.seconds)
    try:
        done = await agent.run(errand)
        said = done.out + done.err
        expect(done.code != 0, f"it ended with 0 and said {said[-300:]!r}")
        expect("You asked for invalid_request_error" in said, f"it said {said[-500:]!r}")
    except Trouble as trouble:
        return [Verdict(cell, str(trouble))]
    return [Verdict(cell)]
