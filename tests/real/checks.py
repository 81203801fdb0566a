"""What every client must have got, held against what the provider charged for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .stage import ResponseEnd, expect

ECHO = re.compile(r"echo:([0-9a-f]{16})(?: (.*))?", re.DOTALL)
SNIPPET = 40
KINDS = {"now": "sync", "flex": "sync", "batch": "batch", "own batches": "batch"}


def arguments(prompt: str) -> dict[str, Any]:
    """What the provider calls a tool with: characters and shapes that careless re-encoding would spoil."""
    return {"query": prompt[:SNIPPET], "ünïcode": '\u2028"\\', "nested": {"n": [1, 2.5, None, True]}}


def fingerprint(text: str, prompt: str | None = None) -> str:
    """The fingerprint in an answer; the answer must be to this very prompt."""
    found = ECHO.fullmatch(text)
    expect(found, f"the answer is {text[:200]!r}, which is no echo of its question")
    assert found is not None
    if prompt is not None:
        expect(found[2] == prompt[:SNIPPET], f"it asked {prompt!r} and got the answer to {found[2]!r}")
    return found[1]


def check_turns(turns: Sequence[dict[str, Any]], prompts: Sequence[str]) -> list[str]:
    """Each turn has its own answer, its tools and signatures as they were made. Gives the fingerprints."""
    expect(len(turns) == len(prompts), f"{len(prompts)} turns were asked for and {len(turns)} were answered")
    return [check_turn(turn, prompt) for turn, prompt in zip(turns, prompts, strict=True)]


def check_turn(turn: dict[str, Any], prompt: str) -> str:
    if "[tool]" in prompt:
        name = check_tools(turn["tools"], prompt)
        # OpenAI says nothing beside a tool call, Anthropic says as much as without.
        expect(
            not turn["text"] or fingerprint(turn["text"], prompt) == name,
            f"beside its tool call it says {turn['text']}",
        )
    else:
        name = fingerprint(turn["text"], prompt)
        expect(not turn["tools"], f"the tools {turn['tools']} were called, and none was asked for")
    signed = [f"EqQB/{name}+aB=="] if "[think]" in prompt else []
    expect(turn["signatures"] == signed, f"the signatures are {turn['signatures']} instead of {signed}")
    expect(turn["usage"]["input"] > 0 and turn["usage"]["output"] > 0, f"the usage is {turn['usage']}")
    return name


def check_tools(tools: Sequence[dict[str, Any]], prompt: str) -> str:
    """One call, as it was made. Its id ends with the fingerprint of the question."""
    called = [(tool["name"], tool["input"]) for tool in tools]
    wanted = [("lookup", arguments(prompt))]
    expect(called == wanted, f"the tool calls are {called} instead of {wanted}")
    return str(tools[0]["id"]).rpartition("_")[2]


def check_bill(seen: ResponseEnd, lane: str, fingerprints: Sequence[str]) -> None:
    """Bought once, on this lane, and nothing else beside."""
    kinds = Counter(charge["kind"] for charge in seen.charges)
    wanted = Counter({KINDS[lane]: len(fingerprints)})
    expect(kinds == wanted, f"the provider charged {dict(kinds)} instead of {dict(wanted)}")
    charged = sorted(charge["fingerprint"] for charge in seen.charges)
    expect(charged == sorted(fingerprints), f"the provider charged for {charged}, the client heard {fingerprints}")
    if lane != "own batches":  # which pass by untouched
        check_ledger(seen, lane)


def check_ledger(seen: ResponseEnd, lane: str) -> None:
    """carpool knows what it paid for each of these calls: to the nano-dollar what the provider charged."""
    paid, charged = sum(row["paid"] for row in seen.ledger), sum(charge["nano_usd"] for charge in seen.charges)
    purchases = sum(row["purchases"] for row in seen.ledger)
    expect(
        purchases == len(seen.charges), f"the ledger has {purchases} purchases of {len(seen.charges)}: {seen.ledger}"
    )
    expect(not any(row["unknown"] for row in seen.ledger), f"the ledger does not know a price: {seen.ledger}")
    expect(paid == charged, f"the ledger has {paid} nano-dollars, and the provider charged {charged}")
    expect({row["lane"] for row in seen.ledger} == {lane}, f"the ledger has other lanes than {lane}: {seen.ledger}")


def check_usage(seen: ResponseEnd, turns: Sequence[dict[str, Any]]) -> None:
    """The client counts the tokens that it is billed for."""
    for name in ("input", "output"):
        heard, billed = (sum(turn["usage"][name] for turn in turns), sum(charge[name] for charge in seen.charges))
        expect(heard == billed, f"the client heard of {heard} {name} tokens and was billed for {billed}")
