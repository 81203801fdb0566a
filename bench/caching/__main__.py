"""`make bench-caching`: what it costs to follow prompt caches: hashing a prompt, looking it up, and the memory of a
prefix."""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from running import keep, machine, say  # noqa: E402

from carpool.core.model import CacheMark, PromptChain, Usage  # noqa: E402
from carpool.core.ports import RawRequest  # noqa: E402
from carpool.dialects import ANTHROPIC, OPENAI, Dialect  # noqa: E402
from carpool.planners.caching.index import PrefixIndex, Surface  # noqa: E402

KEY = (("x-api-key", "k"), ("authorization", "Bearer k"), ("anthropic-version", "2023-06-01"))
SCOPE = 12345
MESSAGES = 60


def agent_body(size: int, rng: random.Random) -> dict[str, Any]:
    """A coding agent's request: tools, a system prompt, 60 messages with tool calls and results; 3 marks."""
    words = ["def", "return", "value", "größe", "[0]", "if x:", "\n    ", "the", "file"]
    text = lambda count: " ".join(rng.choices(words, k=max(1, count // 5)))  # noqa: E731
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [{"name": f"t{n}", "description": text(size // 200), "input_schema": {"type": "object"}} for n in range(15)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": text(size // 20)}]}]
    each = size * 8 // 10 // MESSAGES
    for number in range(MESSAGES // 2):
        call = {"type": "tool_use", "id": f"c{number}", "name": "t1", "input": {"path": text(each // 3)}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": text(each)}
        messages += [{"role": "assistant", "content": [{"type": "text", "text": text(each // 3)}, call]}]
        messages += [{"role": "user", "content": [result]}]
    messages[-1]["content"][-1] |= mark
    messages[-3]["content"][-1] |= mark
    system = [{"type": "text", "text": text(size // 20), **mark}]
    return {"model": "claude-sonnet-5", "max_tokens": 9, "tools": tools, "system": system, "messages": messages}


def chat_body(size: int, rng: random.Random) -> dict[str, Any]:
    text = " ".join(rng.choices(["alpha", "beta", "gamma"], k=size // MESSAGES // 6))
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {text}"} for n in range(MESSAGES)]
    return {"model": "gpt-6-sol", "messages": messages}


def median_us(run: Callable[[], object], count: int) -> float:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def hashing(dialect: Dialect, path: str, body: dict[str, Any], count: int) -> dict[str, Any]:
    raw = RawRequest("POST", path, "", KEY, json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())
    parsed = dialect.parse(raw)
    prompt = dialect.prompt_chain(parsed)
    assert prompt is not None
    taken, parsing = (
        median_us(lambda: dialect.prompt_chain(parsed), count),
        median_us(lambda: dialect.parse(raw), count),
    )
    return {
        "bytes": len(raw.body),
        "positions": len(prompt.positions),
        "parse_us": round(parsing, 1),
        "chain_us": round(taken, 1),
        "chain_us_per_100_kb": round(taken * 100_000 / len(raw.body), 1),
    }


def random_prompt(rng: random.Random, positions: int) -> PromptChain:
    found = tuple((1000 * n) << 32 | rng.getrandbits(32) for n in range(positions))
    marks = tuple(CacheMark(position, "5m") for position in sorted({2, positions - 2, positions - 1}))
    return PromptChain(found, marks, 2, positions - 3, 1)


def filled(count: int, rng: random.Random) -> tuple[PrefixIndex, list[PromptChain], float]:
    """An index that is as full as it gets, some prompts in it, and bytes an entry."""
    index, process = PrefixIndex(count), psutil.Process()
    gc.collect()
    before, known = process.memory_info().rss, []
    usage = Usage(cache_write_5m_tokens=100_000)
    while len(index) < 0.99 * count:
        keeps = len(known) < 2000 and len(index) > count * 2 // 3
        prompt = random_prompt(rng, 100 if keeps else 4)
        index.answered(SCOPE, prompt, Surface.SYNCHRONOUS, 1e9, usage)
        if keeps:
            known.append(prompt)
    gc.collect()
    bytes_of_known = sum(sys.getsizeof(p.positions) + 36 * len(p.positions) for p in known)
    return index, known, (process.memory_info().rss - before - bytes_of_known) / len(index)


def lookups(index: PrefixIndex, known: list[PromptChain], rng: random.Random) -> dict[str, float]:
    def each(prompts: list[PromptChain]) -> float:
        start = time.perf_counter()
        for prompt in prompts:
            index.lookup(SCOPE, prompt, Surface.SYNCHRONOUS, 1e9 + 1)
        return round((time.perf_counter() - start) / len(prompts) * 1e6, 2)

    grown = [
        PromptChain((*p.positions, *random_prompt(rng, 3).positions), (*p.marks, CacheMark(101, "5m")), 2, None, 1)
        for p in known
    ]
    return {
        "same_prompt_us": each(known),
        "next_turn_us": each(grown),
        "unknown_prompt_us": each([random_prompt(rng, 100) for _ in range(2000)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    rng, facts = random.Random(1), machine()
    index, known, size = filled(args.prefixes, rng)
    exact = sum(sys.getsizeof(one) + 64 * len(one) for one in (index._young, index._old)) / len(index)
    result: dict[str, Any] = {"machine": facts, "prefixes": len(index)}
    result |= {"bytes_a_prefix": round(exact, 1), "resident_bytes_a_prefix": round(size, 1)}
    result["lookup"] = lookups(index, known, rng)
    result["hashing"] = {
        "agent, 100 KB": hashing(ANTHROPIC, "/v1/messages", agent_body(100_000, rng), args.rounds),
        "agent, 400 KB": hashing(ANTHROPIC, "/v1/messages", agent_body(400_000, rng), args.rounds),
        "chat, 100 KB": hashing(OPENAI, "/v1/chat/completions", chat_body(100_000, rng), args.rounds),
    }
    say(json.dumps(result, indent=1))
    keep("caching", result)


if __name__ == "__main__":
    main()
