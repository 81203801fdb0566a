from __future__ import annotations

from decimal import Decimal

import pytest

from carpool.core import prices
from carpool.core.errors import ConfigError
from carpool.core.model import Entry, EntryKind, Lane, Usage
from carpool.core.ports import Dialect
from carpool.core.prices import Price, PriceBook
from carpool.dialects import ANTHROPIC, COMPATIBLE_PROVIDERS, CompatibleProvider, OpenAI

AT = 1_795_000_000.0  # in November 2026
BEFORE_BATCH_PRICES = 1_790_000_000.0  # in September 2026
M = 1_000_000
BOOK = PriceBook()

# USD per million tokens: input, output, 5-minute write, 1-hour write, read. Batch costs half of each.
TABLE = {
    "claude-fable-5": ("10", "50", "12.5", "20", "1"),
    "claude-fable-5-1": ("10", "50", "12.5", "20", "0.25"),
    "claude-opus-5-5": ("4", "20", "5", "8", "0.2"),
    "claude-opus-5": ("5", "25", "6.25", "10", "0.5"),
    "claude-opus-4-8": ("5", "25", "6.25", "10", "0.5"),
    "claude-opus-4-7": ("5", "25", "6.25", "10", "0.5"),
    "claude-opus-4-6": ("5", "25", "6.25", "10", "0.5"),
    "claude-opus-4-5": ("5", "25", "6.25", "10", "0.5"),
    "claude-sonnet-5-5": ("2", "10", "2.5", "4", "0.1"),
    "claude-sonnet-5": ("2", "10", "2.5", "4", "0.2"),
    "claude-sonnet-4-6": ("3", "15", "3.75", "6", "0.3"),
    "claude-sonnet-4-5": ("3", "15", "3.75", "6", "0.3"),
    "claude-haiku-5-5": ("0.1", "0.5", "0.125", "0.2", "0.01"),
    "claude-haiku-4-5": ("1", "5", "1.25", "2", "0.1"),
}
CLASSES = ("input_tokens", "output_tokens", "cache_write_5m_tokens", "cache_write_1h_tokens", "cache_read_tokens")


def seller(name: str) -> Dialect:
    rows = [row for row in COMPATIBLE_PROVIDERS.values() if row.seller == name]
    return OpenAI(rows[0] if rows else CompatibleProvider(name, name, name))


def price(model: str, lane: Lane = Lane.NOW, at: float = AT, book: PriceBook = BOOK, **usage: object) -> int | None:
    return book.price(ANTHROPIC, model, Usage(**usage), lane, at)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", TABLE)
@pytest.mark.parametrize(("lane", "factor"), [(Lane.NOW, 1), (Lane.BATCH, Decimal("0.5"))])
def test_every_model_and_class_of_tokens(model: str, lane: Lane, factor: Decimal) -> None:
    for name, dollars in zip(CLASSES, TABLE[model], strict=True):
        assert price(model, lane, **{name: 10_000}) == Decimal(dollars) * 1000 * 10_000 * factor


@pytest.mark.parametrize("model", TABLE)
def test_classes_add_up(model: str) -> None:
    usage = dict(zip(CLASSES, (11, 7, 301, 1003, 5000), strict=True))
    parts = [price(model, **{name: count * M}) for name, count in usage.items()]
    if model not in ("claude-haiku-5-5", "claude-sonnet-4-5"):  # these cost more for long input
        assert price(model, **{name: count * M for name, count in usage.items()}) == sum(part or 0 for part in parts)


def test_a_dated_model_costs_what_its_model_costs() -> None:
    assert price("claude-haiku-4-5-20251001", input_tokens=M) == price("claude-haiku-4-5", input_tokens=M)


@pytest.mark.parametrize(("lane", "low", "high"), [(Lane.NOW, 100, 500), (Lane.BATCH, 50, 250)])
def test_long_input_reprices_every_token(lane: Lane, low: int, high: int) -> None:
    """The whole input counts towards the threshold, cached or not."""
    assert price("claude-haiku-5-5", lane, input_tokens=100_000) == 100_000 * low
    assert price("claude-haiku-5-5", lane, input_tokens=100_001) == 100_001 * high
    split = {"input_tokens": 1, "cache_write_5m_tokens": 1000, "cache_write_1h_tokens": 1000}
    rest = (1 + 1000 * Decimal("1.25") + 1000 * 2) * high
    total = price("claude-haiku-5-5", lane, **split, cache_read_tokens=98_000, output_tokens=10)
    assert total == rest + 98_000 * Decimal("0.1") * high + 10 * 5 * high


def test_before_its_start_a_batch_price_is_unknown_and_not_the_full_price() -> None:
    assert price("claude-haiku-4-5", Lane.BATCH, BEFORE_BATCH_PRICES, input_tokens=1) is None
    assert price("claude-haiku-4-5", Lane.NOW, BEFORE_BATCH_PRICES, input_tokens=1) == 1000
    midnight = 1_791_936_000.0  # 2026-10-14 in UTC
    assert price("claude-haiku-4-5", Lane.BATCH, midnight - 1, input_tokens=2) is None
    assert price("claude-haiku-4-5", Lane.BATCH, midnight, input_tokens=2) == 1000


def test_a_model_without_batch_price_is_unknown_in_a_batch() -> None:
    assert price("claude-opus-4-1", Lane.BATCH, input_tokens=1) is None
    assert price("claude-opus-4-1", Lane.NOW, input_tokens=1) == 15_000
    assert price("claude-haiku-4-5", Lane.FLEX, input_tokens=1) is None


def test_unknown_is_unknown_and_never_free() -> None:
    assert price("claude-nobody-9", input_tokens=1) is None
    assert price("claude-nobody-9") is None
    assert BOOK.price(seller("no-such-provider"), "claude-haiku-4-5", Usage(input_tokens=1), Lane.NOW, AT) is None
    assert price("claude-2", cache_read_tokens=1) is None  # has no such price


def test_no_usage_costs_nothing() -> None:
    assert price("claude-haiku-4-5") == 0


# ---------------------------------------------------------------- surcharges and fees


@pytest.mark.parametrize(
    "model", ["claude-opus-4-6", "claude-sonnet-5", "claude-haiku-5-5", "claude-opus-5-5-20261001"]
)
@pytest.mark.parametrize("lane", [Lane.NOW, Lane.BATCH])
def test_a_place_costs_a_tenth_more_on_every_class(model: str, lane: Lane) -> None:
    for name in CLASSES:
        plain = price(model, lane, **{name: 10_000})
        assert plain is not None
        assert price(model, lane, **{name: 10_000}, inference_geo="us") == plain * Decimal("1.1")
        assert price(model, lane, **{name: 10_000}, inference_geo="global") == plain


def test_a_place_costs_nothing_on_older_models() -> None:
    assert price("claude-opus-4-5", inference_geo="us", input_tokens=1) == 5000
    assert price("claude-haiku-4-5-20251001", inference_geo="us", input_tokens=1) == 1000


def test_a_place_without_a_stated_price_is_unknown() -> None:
    assert price("claude-opus-5", inference_geo="mars", input_tokens=1) is None


def test_fast_costs_double_and_is_unknown_in_a_batch() -> None:
    assert price("claude-opus-5", speed="fast", input_tokens=1, output_tokens=1) == 2 * (5000 + 25_000)
    assert price("claude-opus-5", speed="standard", input_tokens=1) == 5000
    assert price("claude-opus-5", Lane.BATCH, speed="fast", input_tokens=1) is None
    assert price("claude-opus-5", speed="warp", input_tokens=1) is None
    assert price("claude-opus-5", speed="fast", inference_geo="us", input_tokens=1) == 11_000


def test_searches_are_a_fee_without_discount_or_surcharge() -> None:
    for lane in (Lane.NOW, Lane.BATCH):
        assert price("claude-opus-5", lane, web_searches=3, inference_geo="us") == 3 * 10 * M
    assert price("claude-3-haiku", web_searches=1) is None


# ---------------------------------------------------------------- rounding


def test_one_rounding_half_to_even_at_the_end() -> None:
    book = PriceBook({"anthropic": {"m": Price(input="0.0005", output="0.0001", batch_multiplier="0.5")}})
    assert price("m", book=book, input_tokens=1) == 0  # half a nano-dollar
    assert price("m", book=book, input_tokens=3) == 2  # one and a half
    assert price("m", book=book, input_tokens=5) == 2  # two and a half
    assert price("m", book=book, input_tokens=1, output_tokens=1) == 1  # 0.6
    assert price("m", Lane.BATCH, book=book, input_tokens=2) == 0  # half a nano-dollar
    assert price("m", Lane.BATCH, book=book, input_tokens=3) == 1  # 0.75


# ---------------------------------------------------------------- overrides


def test_the_config_adds_a_model() -> None:
    mythos = Price(input=10, output=50, cache_read=1.0, cache_write_5m="12.5", cache_write_1h=20, batch_multiplier=0.5)
    book = PriceBook({"anthropic": {"claude-mythos-5": mythos}})
    usage = dict.fromkeys(CLASSES, 100)
    assert price("claude-mythos-5", **usage) is None
    assert price("claude-mythos-5", book=book, **usage) == 100 * 93_500
    assert price("claude-mythos-5", Lane.BATCH, book=book, **usage) == 50 * 93_500
    assert price("claude-mythos-5", book=book, inference_geo="us", **usage) == 110 * 93_500


def test_the_config_replaces_a_price_altogether() -> None:
    book = PriceBook({"anthropic": {"claude-haiku-4-5*": Price(input=2, output=8)}})
    assert price("claude-haiku-4-5-20251001", book=book, input_tokens=1, output_tokens=1) == 10_000
    assert price("claude-haiku-4-5", Lane.BATCH, book=book, input_tokens=1) is None
    assert price("claude-haiku-4-5", book=book, cache_read_tokens=1) is None
    assert price("claude-haiku-4-5", book=book, web_searches=1) is None
    assert price("claude-opus-5", book=book, input_tokens=1) == 5000


def test_an_exact_name_goes_before_a_pattern() -> None:
    book = PriceBook({"anthropic": {"claude-*": Price(input=1, output=1), "claude-x": Price(input=2, output=2)}})
    assert price("claude-x", book=book, input_tokens=1) == 2000
    assert price("claude-y", book=book, input_tokens=1) == 1000


@pytest.mark.parametrize("wrong", [-1, "a lot", float("nan"), float("inf"), True])
def test_a_wrong_price_is_refused_in_a_sentence(wrong: object) -> None:
    with pytest.raises(ConfigError, match="`output`"):
        Price(input=1, output=wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- beside genai-prices


@pytest.mark.parametrize("model", TABLE)
@pytest.mark.parametrize("lane", [Lane.NOW, Lane.BATCH])
def test_the_cards_agree_with_genai_prices(model: str, lane: Lane) -> None:
    from datetime import UTC, datetime

    import genai_prices

    mine = Usage(1234, 567, 89_000, 4321, 8765)
    theirs = genai_prices.Usage(
        input_tokens=mine.total_input,  # includes what was cached
        output_tokens=mine.output_tokens,
        cache_read_tokens=mine.cache_read_tokens,
        cache_write_tokens=mine.cache_write_5m_tokens + mine.cache_write_1h_tokens,
        cache_write_1h_tokens=mine.cache_write_1h_tokens,
    )
    when = datetime.fromtimestamp(AT, UTC)
    context = {"processing": "batch"} if lane is Lane.BATCH else None
    their_price = genai_prices.calc_price(
        theirs, model, provider_id="anthropic", genai_request_timestamp=when, price_context=context
    ).total_price
    assert abs((BOOK.price(ANTHROPIC, model, mine, lane, AT) or 0) - their_price * 10**9) <= Decimal("0.5")


def test_the_table_is_searched_once_for_many_lines_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes a thousand times as long as a multiplication; a batch has 100,000 lines."""
    searches = []
    search = prices._table_prices
    monkeypatch.setattr(prices, "_table_prices", lambda *asked: searches.append(asked) or search(*asked))
    book = PriceBook()
    for tokens in range(1000):
        assert price("claude-haiku-4-5", Lane.BATCH, AT + tokens, book, input_tokens=tokens) is not None
    assert len(searches) <= 2  # prices hold for a slot of time, and two may have been met


# ---------------------------------------------------------------- OpenAI-compatible providers


@pytest.mark.parametrize(
    ("name", "model", "now", "batch"),
    [
        ("azure", "gpt-5-mini", "2.25", "1.125"),
        ("groq", "openai/gpt-oss-120b", "0.75", "0.375"),
        ("groq", "qwen/qwen3.8-27b", "4.8", "2.4"),  # half, as Groq says of all its models
        ("mistral", "mistral-small-latest", "0.75", "0.375"),
        ("mistral", "mistral-large-latest", "2", "1"),
        ("together", "meta-llama/Llama-3.3-70B-Instruct-Turbo", "1.76", None),  # "up to half" is no price
        ("x-ai", "grok-4.7", "16", None),  # for so long a prompt; it is not sold in batches
        ("groq", "nobody-knows", None, None),
    ],
)
def test_relatives_have_prices_of_their_own(name: str, model: str, now: str | None, batch: str | None) -> None:
    for lane, dollars in ((Lane.NOW, now), (Lane.BATCH, batch)):
        paid = BOOK.price(seller(name), model, Usage(M, M), lane, AT)
        assert paid == (None if dollars is None else int(Decimal(dollars) * 10**9))


def test_xai_takes_a_fifth_off() -> None:
    used = Usage(1000, 1000, cache_read_tokens=1000)
    now, batch = (BOOK.price(seller("x-ai"), "grok-4.3", used, lane, AT) for lane in (Lane.NOW, Lane.BATCH))
    assert (now, batch) == (3_950_000, 3_160_000)


def test_what_is_read_from_a_cache_in_a_batch_stays_unknown_where_nobody_says_it() -> None:
    used = Usage(1000, 1000, cache_read_tokens=1)
    assert BOOK.price(seller("groq"), "qwen/qwen3.8-27b", used, Lane.BATCH, AT) is None
    assert BOOK.price(seller("groq"), "openai/gpt-oss-120b", used, Lane.BATCH, AT) is not None


def test_flex_at_groq_costs_what_now_does() -> None:
    used = Usage(1000, 1000, speed="flex")
    for lane in (Lane.NOW, Lane.FLEX):
        assert BOOK.price(seller("groq"), "openai/gpt-oss-120b", used, lane, AT) == 750_000
    assert BOOK.price(seller("azure"), "gpt-5-mini", used, Lane.FLEX, AT) == 1_125_000


def attempt(purchase: int, lane: Lane, at: float = AT) -> Entry:
    return Entry(1, purchase, at, lane, EntryKind.PURCHASE, "main", "c", "claude-haiku-4-5")


def test_an_entry_of_a_batched_purchase_saves_half() -> None:
    usage = Usage(input_tokens=1000, output_tokens=200)
    entry = BOOK.priced(attempt(7, Lane.BATCH), ANTHROPIC, usage)
    assert (entry.paid, entry.would_have_paid) == (1_000_000, 2_000_000)
    assert (entry.provider, entry.usage) == ("main", usage)


def test_an_attempt_is_completed_by_its_answer() -> None:
    started = attempt(-1, Lane.NOW)
    assert (started.paid, started.would_have_paid, started.usage) == (None, None, None)
    entry = BOOK.priced(started, ANTHROPIC, Usage(input_tokens=10))
    assert (entry.ticket, entry.purchase, entry.paid, entry.would_have_paid) == (1, -1, 10_000, 10_000)
    assert BOOK.priced(started, ANTHROPIC, None) == started


def test_no_saving_is_claimed_where_the_price_paid_is_unknown() -> None:
    entry = BOOK.priced(attempt(7, Lane.BATCH, 1_780_000_000.0), ANTHROPIC, Usage(input_tokens=10))
    assert (entry.paid, entry.would_have_paid) == (None, None)
    assert entry.usage == Usage(input_tokens=10)
