"""The index of prefixes: what it expects a provider to read, and how answers correct it."""

from __future__ import annotations

import random
import sys
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from carpool.core.model import CacheMark, PromptChain, Usage
from carpool.core.ports import RawRequest
from carpool.dialects import ANTHROPIC
from carpool.mock.anthropic.cache import PromptCache, plan_cache
from carpool.mock.anthropic.models import find_model
from carpool.planners.caching.index import LOOKBACK, PrefixIndex, Surface, WarmPrefix

SYNC, BATCH = Surface.SYNCHRONOUS, Surface.BATCH
SCOPE = 7


def chain(*names: int, marks: dict[int, str] | None = None, **changes: Any) -> PromptChain:
    """A prompt of blocks with these names, 1,000 bytes each."""
    positions, name = [0], 0
    for number, one in enumerate(names, 1):
        name = hash((name, one)) & 0xFFFFFFFF
        positions.append(number * 1000 << 32 | name)
    found = [CacheMark(position, ttl) for position, ttl in (marks or {len(names): "5m"}).items()]
    return replace(PromptChain(tuple(positions), tuple(found), 1, None, 1), **changes)


def wrote(tokens: int, hour: int = 0) -> Usage:
    return Usage(input_tokens=0, cache_write_5m_tokens=tokens, cache_write_1h_tokens=hour)


def index_after(first: PromptChain, usage: Usage, at: float = 100.0) -> PrefixIndex:
    index = PrefixIndex()
    index.answered(SCOPE, first, SYNC, at, usage)
    return index


def test_what_was_written_is_read_while_it_lives() -> None:
    index = index_after(chain(1, 2), wrote(2000))
    later = chain(1, 2, 3)
    assert index.lookup(SCOPE, later, SYNC, 399.0) == WarmPrefix(2, 2000, 400, "5m")
    assert index.lookup(SCOPE, later, SYNC, 400.0) is None


@pytest.mark.parametrize(
    ("scope", "surface", "later"),
    [(8, SYNC, chain(1, 2, 3)), (SCOPE, BATCH, chain(1, 2, 3)), (SCOPE, SYNC, chain(2, 1)), (SCOPE, SYNC, chain(1))],
)
def test_what_is_not_read(scope: int, surface: Surface, later: PromptChain) -> None:
    assert index_after(chain(1, 2), wrote(2000)).lookup(scope, later, surface, 101.0) is None


def test_without_a_mark_nothing_is_read() -> None:
    assert index_after(chain(1, 2), wrote(2000)).lookup(SCOPE, replace(chain(1, 2), marks=()), SYNC, 101.0) is None


@pytest.mark.parametrize(("more", "found"), [(LOOKBACK - 1, True), (LOOKBACK, False)])
def test_a_provider_looks_at_20_positions(more: int, found: bool) -> None:
    later = chain(1, 2, *range(10, 10 + more))
    assert (index_after(chain(1, 2), wrote(2000)).lookup(SCOPE, later, SYNC, 101.0) is not None) is found


def test_reads_renew() -> None:
    index = index_after(chain(1, 2), wrote(2000))
    index.answered(SCOPE, chain(1, 2, 3), SYNC, 300.0, Usage(input_tokens=1000, cache_read_tokens=2000))
    assert index.lookup(SCOPE, chain(1, 2), SYNC, 599.0) == WarmPrefix(2, 2000, 600, "5m")


def test_a_prefix_that_was_not_read_is_removed() -> None:
    index = index_after(chain(1, 2), wrote(2000))
    index.answered(SCOPE, chain(1, 2), SYNC, 200.0, Usage(input_tokens=2000))
    assert index.lookup(SCOPE, chain(1, 2), SYNC, 201.0) is None


def test_a_prefix_that_was_written_meanwhile_could_not_be_read() -> None:
    index = index_after(chain(1, 2), wrote(2000), at=250.0)
    index.answered(SCOPE, chain(1, 2), SYNC, 200.0, Usage(input_tokens=2000))
    assert index.lookup(SCOPE, chain(1, 2), SYNC, 260.0) is not None


def test_only_what_is_longer_than_the_read_is_removed() -> None:
    index = index_after(chain(1, 2, 3, 4, marks={1: "1h", 4: "5m"}), wrote(3000, 1000))
    usage = Usage(input_tokens=3000, cache_read_tokens=1000)
    index.answered(SCOPE, chain(1, 2, 3, 4), SYNC, 200.0, usage)
    assert index.lookup(SCOPE, chain(1, 2, 3, 4), SYNC, 201.0) == WarmPrefix(1, 1000, 3800, "1h")


def test_a_read_reveals_what_somebody_else_wrote() -> None:
    index, usage = PrefixIndex(), Usage(input_tokens=1000, cache_read_tokens=2000)
    index.answered(SCOPE, chain(1, 2, 3), SYNC, 100.0, usage)
    assert index.lookup(SCOPE, chain(1, 2, 4), SYNC, 101.0) == WarmPrefix(2, 2000, 400, "5m")


def test_below_the_minimum_nothing_is_entered() -> None:
    assert len(index_after(chain(1, 2), Usage(input_tokens=2000))) == 0
    assert len(index_after(chain(1, 2), Usage())) == 0


def test_an_hour_is_not_shortened() -> None:
    index = index_after(chain(1, 2, marks={2: "1h"}), wrote(0, 2000))
    index.answered(SCOPE, chain(1, 2), SYNC, 200.0, Usage(cache_read_tokens=2000))
    assert index.lookup(SCOPE, chain(1, 2), SYNC, 3700.0) == WarmPrefix(2, 2000, 3800, "1h")


def test_implicit_caches_keep_root_parent_and_end() -> None:
    prompt = chain(1, 2, 3, 4, implicit=True, marks={9: "x"}, root=2, parent=3)
    index = index_after(replace(prompt, marks=()), Usage(input_tokens=4000))
    found = [
        index.lookup(SCOPE, replace(chain(*names), implicit=True), SYNC, 101.0) for names in ((1,), (1, 2), (1, 2, 3))
    ]
    assert [one and one.tokens for one in found] == [None, 2000, 3000]
    assert len(index_after(prompt, Usage(input_tokens=1000))) == 0


def test_two_generations_bound_it_and_keep_what_is_used() -> None:
    index = PrefixIndex(100)
    for number in range(500):
        index.answered(SCOPE, chain(number), SYNC, 100.0, wrote(2000))
        index.answered(SCOPE, chain(0), SYNC, 100.0, wrote(2000))
        assert len(index) <= 100
    known = [number for number in range(500) if index.lookup(SCOPE, chain(number), SYNC, 101.0)]
    assert known[0] == 0
    assert known[1:] == list(range(501 - len(known), 500))
    assert len(known) >= 50


def test_numbers_stay_small() -> None:
    index = index_after(chain(1, marks={1: "12h"}), wrote(10_000_000), at=2e9)
    for key, value in index._young.items():
        assert sys.getsizeof(key) <= 32
        assert sys.getsizeof(value) <= 32


# ---------------------------------------------------------------- beside the mock's cache


def marked(text: str, ttl: str | None) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": text}
    return block if ttl is None else {**block, "cache_control": {"type": "ephemeral", "ttl": ttl}}


def body_of(session: list[str], turns: int, ttl: str) -> dict[str, Any]:
    said = session[: 2 * turns - 1]
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": [marked(text, ttl if number >= len(said) - 1 else None)]}
        for number, text in enumerate(said)
    ]
    system = [marked("You help. " * 900, ttl)]
    return {"model": "claude-sonnet-5-5", "max_tokens": 9, "system": system, "messages": messages}


@pytest.mark.parametrize("seed", range(30))
def test_it_expects_what_the_provider_reads(seed: int) -> None:
    """Sequential requests of several conversations. In odd worlds the provider forgets all now and then, of which only
    `usage` tells: once for each conversation."""
    rng, now, index, cache = random.Random(seed), 1000.0, PrefixIndex(), PromptCache()
    sessions = [[f"{number} {turn} " * rng.randint(1, 3000) for turn in range(40)] for number in range(4)]
    turns, surprises, count = [0] * len(sessions), 0, 60
    for _ in range(count):
        now += rng.choice([1.0, 20.0, 100.0, 250.0, 400.0, 3000.0])
        which = rng.randrange(len(sessions))
        turns[which] = min(turns[which] + 1, 20)
        body = body_of(sessions[which], turns[which], rng.choice(["5m", "5m", "1h"]))
        raw = RawRequest("POST", "/v1/messages", "", (("x-api-key", "k"),), msgspec.json.encode(body))
        prompt = ANTHROPIC.prompt_chain(ANTHROPIC.parse(raw))
        assert prompt is not None
        plan = plan_cache(body, find_model(body["model"]))
        assert plan is not None
        if evicted := seed % 2 and rng.random() < 0.05:
            cache = PromptCache()
        expected = index.lookup(SCOPE, prompt, SYNC, now)
        used = cache.use(plan, now, now)
        now += 0.5
        fresh = plan.tokens[-1] - used.read - used.write_5m - used.write_1h
        usage = Usage(fresh, 1, used.read, used.write_5m, used.write_1h)
        index.answered(SCOPE, prompt, SYNC, now - 0.5, usage)
        tokens = 0 if expected is None else expected.tokens
        surprises += not evicted and abs(tokens - used.read) > 0.03 * plan.tokens[-1]
    assert surprises <= (10 if seed % 2 else 1), f"seed {seed}: {surprises} of {count}"
