"""OpenAI's bill: by hand, and beside the ledger's own table, which it shares nothing with."""

import random

import pytest

from carpool.core import model
from carpool.core.prices import PriceBook
from carpool.dialects import OPENAI
from carpool.mock import OPENAI_CATALOGUE, Usage
from carpool.mock.openai.bill import price_nano
from carpool.mock.openai.cache import OpenAICache, prefixes
from carpool.mock.openai.models import find_model

AT = 1_795_000_000.0  # in November 2026


@pytest.mark.parametrize(
    ("name", "tier", "usage", "expected"),
    [
        # 1,000 x $0.10 + 100 x $0.50 per million
        ("gpt-6-luna", "default", {"input": 1000, "output": 100}, 150_000),
        ("gpt-6-luna", "flex", {"input": 1000, "output": 100}, 75_000),
        ("gpt-6-luna", "batch", {"input": 1000, "output": 100}, 75_000),
        # cached tokens in a batch: a tenth of the batch's price
        ("gpt-6-luna", "batch", {"input": 0, "output": 0, "write_5m": 1024, "read": 2048}, 64_000 + 10_240),
        ("omni-moderation-latest", "batch", {"input": 1000, "output": 0}, 0),
        ("gpt-6-luna", "priority", {"input": 1000, "output": 100}, 300_000),
        # writes at 1.25x, reads at 0.1x
        ("gpt-6-luna", "default", {"input": 0, "output": 0, "write_5m": 1024, "read": 2048}, 128_000 + 20_480),
        # older models write for nothing
        ("gpt-5-mini", "default", {"input": 1000, "output": 10, "read": 1024}, 250_000 + 20_000 + 25_600),
        # above 272,000 input tokens, cached ones included: input twice, output half as much again
        ("gpt-6-luna", "default", {"input": 272_000, "output": 10}, 27_205_000),
        ("gpt-6-luna", "default", {"input": 1, "output": 10, "read": 272_000}, 200 + 7_500 + 5_440_000),
        ("gpt-5-mini", "default", {"input": 300_000, "output": 0}, 75_000_000),
        ("text-embedding-3-small", "default", {"input": 7, "output": 0}, 140),
        # 12.5 and 37.5 nano-dollars: half to even, once, after the sum
        ("gpt-5-nano", "flex", {"input": 0, "output": 0, "read": 5}, 12),
        ("gpt-5-nano", "flex", {"input": 0, "output": 0, "read": 15}, 38),
    ],
)
def test_prices_by_hand(name, tier, usage, expected):
    assert price_nano(OPENAI_CATALOGUE[name], Usage(**usage), tier) == expected


PRICED = [name for name, spec in OPENAI_CATALOGUE.items() if spec.use in ("talk", "embed")]


@pytest.mark.parametrize("name", PRICED)
def test_two_tables_that_know_nothing_of_each_other_agree(name):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng, spec, book = random.Random(seed), OPENAI_CATALOGUE[name], PriceBook()
    batched = ["batch"] if spec.batch and spec.use == "talk" else []  # embeddings have no batch price in the book
    for tier in ("default", *spec.tiers, *batched):
        for _ in range(50):
            # What one tier costs for very long input is not stated for all; those are tested by hand.
            most = 500_000 if tier == "default" else 80_000
            fresh, read = rng.randrange(most), 0 if spec.dimensions else rng.randrange(most)
            written = rng.randrange(most) if spec.write is not None else 0
            output = 0 if spec.dimensions else rng.randrange(10_000)
            mine = price_nano(spec, Usage(fresh, output, written, 0, read), tier)
            said = model.Usage(fresh, output, read, written, speed=tier if tier in spec.tiers else None)
            lane = model.Lane.BATCH if tier == "batch" else model.Lane.NOW
            theirs = book.price(OPENAI, name, said, lane, AT)
            # What a cached token costs in a batch is not stated for all; then the price is unknown, never another.
            assert theirs == mine or (theirs is None and tier == "batch" and read), (tier, said)


def test_a_dated_name_is_its_familys():
    assert find_model("gpt-5-mini-2025-08-07") is OPENAI_CATALOGUE["gpt-5-mini"]
    assert find_model("gpt-5-mini-20250807") is None


# ---------------------------------------------------------------- the cache


LONG = "word " * 4000  # some 5,000 tokens


def test_a_beginning_seen_before_is_read():
    cache, spec = OpenAICache(), OPENAI_CATALOGUE["gpt-6-luna"]
    first = prefixes(spec.id, [LONG, "a"])
    second = prefixes(spec.id, [LONG, "b"])
    whole, shared = first.tokens[1] // 128 * 128, first.tokens[0] // 128 * 128
    assert cache.use(first, spec, 0.0) == (0, whole)
    assert cache.use(second, spec, 1.0) == (shared, whole - shared)
    assert cache.use(second, spec, 2.0) == (whole, 0)
    assert cache.use(prefixes(spec.id, ["other", LONG]), spec, 3.0).read == 0
    assert cache.use(first, spec, 10_000.0) == (0, whole)


def test_short_prompts_are_not_cached():
    cache, spec = OpenAICache(), OPENAI_CATALOGUE["gpt-6-luna"]
    short = prefixes(spec.id, ["word " * 700])
    assert short.tokens[-1] < 1024
    assert [cache.use(short, spec, 0.0), cache.use(short, spec, 1.0)] == [(0, 0), (0, 0)]


def test_older_models_tell_no_writes():
    cache, spec = OpenAICache(), OPENAI_CATALOGUE["gpt-5-mini"]
    asked = prefixes(spec.id, [LONG])
    assert cache.use(asked, spec, 0.0) == (0, 0)
    assert cache.use(asked, spec, 1.0) == (asked.tokens[0] // 128 * 128, 0)
