"""The cache model bills as the providers do: by its rules, and by comparison with the mock's caches."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from carpool.core.errors import Misuse
from carpool.core.model import Lane, Usage
from carpool.dialects import ANTHROPIC, OPENAI
from carpool.mock.anthropic.cache import LOOKBACK, Breakpoint, CachePlan, PromptCache
from carpool.mock.openai.cache import OpenAICache, Prefixes
from carpool.mock.openai.models import CATALOGUE
from carpool.sim.money.cache import CacheModel, cache_rules
from carpool.sim.money.model import ROOT, Node, RunPurchase, Ttl

OPUS = "claude-opus-5"  # caches from 512 tokens
CHAIN = [Node(ROOT, 1000), Node(0, 3000), Node(1, 3500), Node(2, 4100)]  # tools and system, then three turns


def buy(
    node: int,
    starts: float,
    ttl: Ttl | None = None,
    system_ttl: Ttl | None = None,
    lane: Lane = Lane.NOW,
    took: float = 0,
) -> RunPurchase:
    return RunPurchase(0, 0, lane, "purchase", starts, starts + took, starts + took, node, 10, ttl, system_ttl, 0)


def classes(usage: Usage) -> tuple[int, int, int, int]:
    """(full price, read, written for 5 minutes, written for 1 hour)."""
    return usage.input_tokens, usage.cache_read_tokens, usage.cache_write_5m_tokens, usage.cache_write_1h_tokens


def used(*purchases: RunPurchase, model: str = OPUS) -> list[tuple[int, int, int, int]]:
    dialect = OPENAI if model.startswith("gpt") else ANTHROPIC
    rules, cache = cache_rules(dialect, model), CacheModel(CHAIN)
    return [classes(cache.use(purchase, model, rules)) for purchase in purchases]


def test_reads_what_is_stored_and_writes_up_to_the_marks() -> None:
    assert used(buy(1, 0, "5m", "1h"), buy(2, 10, "5m", "1h"), buy(3, 20)) == [
        (0, 0, 2000, 1000),
        (0, 3000, 500, 0),
        (4100, 0, 0, 0),  # without a mark nothing is looked up
    ]


def test_a_mark_of_one_hour_behind_a_read_of_a_shorter_entry_writes_only_the_rest() -> None:
    assert used(buy(1, 0, "5m"), buy(2, 10, "1h"), buy(3, 3000, "5m")) == [
        (0, 0, 3000, 0),
        (0, 3000, 0, 500),
        (0, 3500, 600, 0),
    ]


def test_lives_count_from_the_start_of_the_request_and_are_refreshed_by_reads() -> None:
    slow = 200.0
    assert used(buy(1, 0, "5m", took=slow), buy(1, 299, "5m"), buy(1, 598, "5m"), buy(1, 898, "5m")) == [
        (0, 0, 3000, 0),
        (0, 3000, 0, 0),
        (0, 3000, 0, 0),
        (0, 0, 3000, 0),
    ]


def test_an_entry_is_readable_once_the_response_has_begun() -> None:
    batch = [buy(1, 5, "1h", lane=Lane.BATCH, took=3) for _ in range(3)]
    assert used(*batch, buy(1, 9, "1h", lane=Lane.BATCH)) == [(0, 0, 0, 3000)] * 3 + [(0, 3000, 0, 0)]


def test_surfaces_are_apart_and_flex_shares_the_synchronous_one() -> None:
    assert used(buy(1, 0, "1h"), buy(1, 1, "1h", lane=Lane.BATCH), buy(1, 2, "1h", lane=Lane.FLEX)) == [
        (0, 0, 0, 3000),
        (0, 0, 0, 3000),
        (0, 3000, 0, 0),
    ]


def test_models_are_apart() -> None:
    cache, rules = CacheModel(CHAIN), cache_rules(ANTHROPIC, OPUS)
    cache.use(buy(1, 0, "1h"), OPUS, rules)
    assert cache.use(buy(1, 1, "1h"), "claude-sonnet-5", rules).cache_read_tokens == 0


def test_below_the_minimum_a_mark_does_nothing() -> None:
    assert used(buy(0, 0, "5m"), buy(0, 1, "5m"), model="claude-opus-4-6") == [(1000, 0, 0, 0)] * 2


def test_a_mark_looks_back_so_far_only() -> None:
    rules = replace(cache_rules(ANTHROPIC, OPUS), lookback=1)
    cache = CacheModel(CHAIN)
    reads = [cache.use(buy(*at, "5m"), OPUS, rules).cache_read_tokens for at in ((1, 0), (3, 1), (2, 2))]
    assert reads == [0, 0, 3000]


def test_an_hour_after_5_minutes_is_refused() -> None:
    with pytest.raises(Misuse):
        used(buy(1, 0, "1h", "5m"))


@pytest.mark.parametrize(
    ("model", "lane", "ttl", "expected"),
    [
        ("gpt-4.1", Lane.NOW, None, [(3000, 0, 0, 0), (556, 2944, 0, 0)]),
        ("gpt-4.1", Lane.BATCH, None, [(3000, 0, 0, 0), (3500, 0, 0, 0)]),
        ("gpt-5", Lane.BATCH, None, [(3000, 0, 0, 0), (556, 2944, 0, 0)]),
        ("gpt-5.6-terra", Lane.BATCH, "5m", [(56, 0, 2944, 0), (44, 2944, 512, 0)]),
        ("gpt-6-sol", Lane.NOW, None, [(3000, 0, 0, 0), (3500, 0, 0, 0)]),  # declined
    ],
)
def test_openai(model: str, lane: Lane, ttl: Ttl | None, expected: list[tuple[int, int, int, int]]) -> None:
    assert used(buy(1, 0, ttl, lane=lane), buy(2, 1799, ttl, lane=lane), model=model) == expected


def tree(rng: random.Random) -> list[Node]:
    nodes = [Node(ROOT, rng.randint(1, 1500))]
    for index in range(rng.randint(3, 40)):
        parent = rng.choice([ROOT, index, rng.randint(0, index)])
        nodes.append(Node(parent, (0 if parent == ROOT else nodes[parent].tokens) + rng.randint(1, 900)))
    return nodes


def path(nodes: list[Node], node: int) -> list[int]:
    found: list[int] = []
    while node != ROOT:
        found.append(node)
        node = nodes[node].parent
    return found[::-1]


@pytest.mark.parametrize("seed", range(200))
def test_agrees_with_the_mock_of_anthropic(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    nodes, clock = tree(rng), 0.0
    rules = replace(cache_rules(ANTHROPIC, OPUS), lookback=LOOKBACK)
    cache, mock = CacheModel(nodes), {"batch": PromptCache(), "now": PromptCache()}
    for _ in range(80):
        clock += rng.choice([0.0, rng.uniform(0, 20), rng.uniform(0, 400), rng.uniform(0, 4000)])
        node, lane = rng.randrange(len(nodes)), rng.choice([Lane.NOW, Lane.BATCH])
        above = path(nodes, node)
        system, ttls = (
            rng.choice(above),
            rng.choice([("1h", "5m"), ("5m", "5m"), ("1h", "1h"), (None, "5m"), ("1h", None)]),
        )
        begins = clock + rng.choice([0.0, rng.uniform(0, 60)])
        purchase = RunPurchase(0, 0, lane, "purchase", clock, begins, begins, node, 7, ttls[1], ttls[0], system)
        marks = [(system, ttls[0])] * (ttls[0] is not None and system != node) + [(node, ttls[1])] * (
            ttls[1] is not None
        )
        plan = CachePlan(
            [str(one).encode() for one in above],
            [nodes[one].tokens for one in above],
            [Breakpoint(above.index(one), str(ttl)) for one, ttl in marks if nodes[one].tokens >= rules.minimum],
        )
        usage = cache.use(purchase, OPUS, rules)
        assert classes(usage)[1:] == tuple(mock[lane].use(plan, clock, begins))
        assert usage.total_input == nodes[node].tokens


@pytest.mark.parametrize("seed", range(50))
def test_agrees_with_the_mock_of_openai(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    nodes, clock, model = tree(rng), 0.0, rng.choice(["gpt-5", "gpt-5.6-terra"])
    rules, cache, mock = cache_rules(OPENAI, model), CacheModel(nodes), OpenAICache()
    for _ in range(80):
        clock += rng.choice([rng.uniform(0.1, 20), rng.uniform(0.1, 4000)])
        above = path(nodes, rng.randrange(len(nodes)))
        purchase = RunPurchase(0, 0, Lane.NOW, "purchase", clock, clock, clock, above[-1], 7, "5m")
        prefixes = Prefixes([str(one).encode() for one in above], [nodes[one].tokens for one in above])
        usage = cache.use(purchase, model, rules)
        assert classes(usage)[1:3] == tuple(mock.use(prefixes, CATALOGUE[model], clock))
