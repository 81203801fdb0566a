"""Rate limits as the heads of answers name them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.ports import Allowance, Allowances
from carpool.dialects import DIALECTS, get
from carpool.dialects.rate_limits import duration

ANTHROPIC = (
    ("date", "Mon, 16 Nov 2026 03:00:00 GMT"),
    ("anthropic-ratelimit-requests-limit", "1000"),
    ("anthropic-ratelimit-requests-remaining", "10"),
    ("anthropic-ratelimit-requests-reset", "2026-11-16T03:00:59.400Z"),
    ("anthropic-ratelimit-tokens-limit", "2400000"),
    ("anthropic-ratelimit-tokens-remaining", "2000000"),
    ("anthropic-ratelimit-tokens-reset", "2026-11-16T03:00:10Z"),
    ("anthropic-ratelimit-input-tokens-limit", "2000000"),
)
OPENAI = (
    ("x-ratelimit-limit-requests", "5000"),
    ("x-ratelimit-remaining-requests", "4999"),
    ("x-ratelimit-reset-requests", "12ms"),
    ("x-ratelimit-limit-tokens", "40000"),
    ("x-ratelimit-remaining-tokens", "0"),
    ("x-ratelimit-reset-tokens", "6m0s"),
)


def test_anthropics_heads() -> None:
    said = get("anthropic").allowances(ANTHROPIC)
    assert said is not None
    assert said.requests == Allowance(1000, 10, pytest.approx(59.4))
    assert said.tokens == Allowance(2_400_000, 2_000_000, pytest.approx(10.0))


def test_openais_heads() -> None:
    assert get("openai").allowances(OPENAI) == Allowances(
        Allowance(5000, 4999, pytest.approx(0.012)), Allowance(40_000, 0, 360.0)
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("1h2m3.5s", 3723.5),
        ("1d", 86_400.0),
        ("7m12s", 432.0),
        ("0s", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1", "1e9s", "s", "9" * 50 + "s", None])
def test_what_is_no_duration(text: str | None) -> None:
    assert not duration(text)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_an_answer_that_says_nothing(name: str) -> None:
    assert get(name).allowances((("content-type", "application/json"),)) is None


@pytest.mark.parametrize("name", sorted(DIALECTS))
@given(st.lists(st.tuples(st.sampled_from([name for name, _ in ANTHROPIC + OPENAI]), st.text(max_size=20))))
def test_nonsense_is_no_limit(name: str, headers: list[tuple[str, str]]) -> None:
    said = get(name).allowances(tuple(headers))
    for one in () if said is None else (said.requests, said.tokens):
        assert one is None or (one.limit > 0 and 0 <= one.remaining <= one.limit and (one.full_in or 0.0) >= 0.0)
