"""What is learned from simulated batches whose distribution is known: 95 % log-normal with median 100 s, and 5 % with
median 1800 s. F(120) is 0.61 and F(600) is 0.957."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.planners.forecast import BatchClass, Forecast, Prior
from carpool.planners.forecast.forecast import MAX_CLASSES

HOUR = 3600.0
OF = BatchClass("anthropic", "model", "s")
F120, F600 = 0.61, 0.957


def seconds_taken(rng: random.Random) -> float:
    if rng.random() < 0.95:
        return rng.lognormvariate(math.log(100), 0.5)
    return rng.lognormvariate(math.log(1800), 1.0)


class Provider:
    """Sells a batch every `gap` seconds, and is polled every 5 s. Batches are given up at the age of `patience`."""

    def __init__(self, forecast: Forecast, seed: int, patience: float = math.inf, gap: float = 5.0) -> None:
        print(f"seed {seed}")
        self._rng = random.Random(seed)
        self._forecast, self._patience, self._gap = forecast, patience, gap
        self._live: list[tuple[float, float]] = []  # when bought, and how long it takes
        self._polled = 0.0
        self.now = 0.0
        self.completed: list[float] = []

    def run(self, seconds: float, slower: float = 1.0, of: BatchClass = OF, *, sells: bool = True) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += self._gap
            if sells:
                self._live.append((self.now, slower * seconds_taken(self._rng)))
            if self.now - self._polled >= 5:
                self._live = [batch for batch in self._live if self._poll(*batch, of)]
                self._polled = self.now

    def _poll(self, bought: float, takes: float, of: BatchClass) -> bool:
        age, seen = self.now - bought, max(0.0, self._polled - bought)
        if takes <= min(age, self._patience):
            self._forecast.batch_ended(of, seen, takes, self.now)
            self.completed.append(takes)
            return False
        self._forecast.batch_passed(of, seen, min(age, self._patience), self.now)
        return age < self._patience


# ------------------------------------------------------------ censoring


@pytest.mark.parametrize("seed", range(3))
def test_batches_that_were_given_up_count_as_long_as_they_were_in_flight(seed: int) -> None:
    forecast = Forecast()
    provider = Provider(forecast, seed, patience=180)
    provider.run(6 * HOUR)
    naive = sum(taken <= 120 for taken in provider.completed) / len(provider.completed)
    assert naive > F120 + 0.08
    assert forecast.batch_cdf(120, OF) == pytest.approx(F120, abs=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_an_estimate_from_completed_batches_has_no_tail(seed: int) -> None:
    forecast = Forecast()
    provider = Provider(forecast, seed, patience=600)
    provider.run(6 * HOUR)
    assert max(provider.completed) <= 600
    assert forecast.batch_cdf(600, OF) == pytest.approx(F600, abs=0.03)
    assert forecast.batch_cdf(86_400, OF) < 0.9999


def test_stuck_batches_count_before_anything_ends() -> None:
    forecast = Forecast()
    before = forecast.batch_cdf(600, OF)
    for age in range(0, 600, 5):
        for _ in range(10):
            forecast.batch_passed(OF, age, age + 5, now=age + 5)
    assert forecast.batch_cdf(600, OF) < before / 2
    assert forecast.observed(OF) == 0


def test_stuck_batches_among_others_only_change_the_tail() -> None:
    forecast = Forecast()
    provider = Provider(forecast, seed=5)
    provider.run(HOUR)
    body = forecast.batch_cdf(300, OF)
    for _ in range(20):
        forecast.batch_passed(OF, 600, 20_000, provider.now)
    assert forecast.batch_cdf(300, OF) == pytest.approx(body, abs=0.001)
    assert forecast.ends_within(3600, 600, OF) < 0.3


# ------------------------------------------------------------ drift and decay


def test_a_provider_that_slows_down_is_noticed_within_minutes() -> None:
    forecast = Forecast()
    provider = Provider(forecast, seed=1, gap=2)
    provider.run(3 * HOUR)
    chances = []
    for _ in range(8):
        provider.run(300, slower=8)
        chances.append(forecast.batch_cdf(120, OF))
    assert chances == sorted(chances, reverse=True)
    assert chances[3] < F120 / 1.7
    provider.run(2 * HOUR, slower=8)
    assert forecast.batch_cdf(120, OF) < 0.05
    provider.run(2 * HOUR)
    assert forecast.batch_cdf(120, OF) == pytest.approx(F120, abs=0.1)


def test_a_quiet_night_is_not_forgotten() -> None:
    forecast = Forecast()
    provider = Provider(forecast, seed=2)
    provider.run(3 * HOUR)
    learned = forecast.observed(OF)
    for _ in range(3):
        provider.now += 12 * HOUR
        forecast.batch_ended(OF, 0, 90, provider.now)
    assert learned / 9 < forecast.observed(OF) < learned
    assert forecast.batch_cdf(120, OF) == pytest.approx(F120, abs=0.1)


def test_a_class_without_observations_is_like_the_next_wider_one() -> None:
    forecast = Forecast()
    Provider(forecast, seed=3).run(3 * HOUR)
    for other in (OF._replace(model="other"), OF._replace(model="")):
        assert forecast.batch_cdf(120, other) == pytest.approx(F120, abs=0.05)
    longer = OF._replace(size_class="l")
    assert forecast.batch_cdf(360, longer) == pytest.approx(F120, abs=0.05)
    elsewhere = OF._replace(provider="openai")
    assert forecast.batch_cdf(120, elsewhere) == Forecast().batch_cdf(120, elsewhere)


def test_batches_of_several_models_speak_for_each_of_them() -> None:
    forecast = Forecast()
    mixed = OF._replace(model="", size_class="l")
    Provider(forecast, seed=4).run(3 * HOUR, of=mixed)
    assert forecast.batch_cdf(120, mixed) == pytest.approx(F120, abs=0.05)
    assert forecast.batch_cdf(120, mixed._replace(model="any")) == forecast.batch_cdf(120, mixed)
    assert forecast.observed(mixed._replace(model="any")) == forecast.observed(mixed) > 100


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6), st.booleans(), st.sampled_from("sml")), max_size=30))
def test_whatever_is_observed_it_stays_a_distribution(seen: list[tuple[float, float, bool, str]]) -> None:
    forecast = Forecast()
    for number, (start, end, ended, size) in enumerate(seen):
        learn = forecast.batch_ended if ended else forecast.batch_passed
        learn(OF._replace(size_class=size), start, end, 10.0 * number)
    curve = [forecast.batch_cdf(10 ** (step / 8), OF) for step in range(-8, 56)]
    assert curve == sorted(curve)
    assert 0 <= curve[0] <= curve[-1] <= 1
    for p in (0.1, 0.5, 0.9):
        assert forecast.batch_cdf(forecast.batch_quantile(p, OF), OF) <= p + 1e-6
    means = [forecast.batch_mean(10 ** (step / 8), OF) for step in range(-8, 56)]
    assert means == sorted(means)


# ------------------------------------------------------------ synchronous calls


def answered(forecast: Forecast, rng: random.Random, calls: int, since: float, slower: float = 1.0) -> float:
    """A call a second. Returns the time after the last of them."""
    for number in range(calls):
        tokens = rng.randrange(20, 2000)
        seconds = slower * (1 + tokens / 80) * rng.lognormvariate(0, 0.3)
        forecast.call_answered("p", "m", tokens, seconds, since + number)
    return since + calls


def missed(forecast: Forecast, rng: random.Random, slower: float) -> float:
    """The share of calls that take longer than promised."""
    late = 0
    for _ in range(20_000):
        tokens = rng.randrange(20, 2000)
        taken = slower * (1 + tokens / 80) * rng.lognormvariate(0, 0.3)
        late += taken > forecast.sync_seconds("p", "m", tokens)
    return late / 20_000


@pytest.mark.parametrize("seed", range(3))
def test_the_margin_holds_while_the_provider_is_slow(seed: int) -> None:
    print(f"seed {seed}")
    rng, forecast = random.Random(seed), Forecast()
    now = answered(forecast, rng, 3600, 0)
    assert missed(forecast, rng, slower=1) == 0
    for slower in (3.0, 8.0):
        now = answered(forecast, rng, 60, now, slower)
        assert missed(forecast, rng, slower) < 0.0015
    answered(forecast, rng, 4 * 3600, now)
    assert missed(forecast, rng, slower=1) == 0


def test_a_fast_model_needs_less_than_the_prior() -> None:
    forecast = Forecast()
    for number in range(3000):
        forecast.call_answered("p", "m", 500, 1.0, number / 10)
    assert forecast.sync_seconds("p", "m", 500) < 3
    assert forecast.sync_typical("p", "m", 500) == pytest.approx(1, rel=0.2)
    assert forecast.sync_seconds("p", "other", 500) == Prior().sync_seconds(500)


def test_few_fast_answers_do_not_lower_the_margin() -> None:
    forecast = Forecast()
    for number in range(100):
        forecast.call_answered("p", "m", 500, 1.0, number)
    assert forecast.sync_seconds("p", "m", 500) == Prior().sync_seconds(500)


def test_short_answers_say_little_about_long_ones() -> None:
    """Most responses are short, and what a promise needs is the time of the longest that the limit allows."""
    forecast = Forecast()
    for number in range(5000):
        forecast.call_answered("p", "m", 100, 1 + 100 / 60, number / 10)
    assert forecast.sync_seconds("p", "m", 200) < Prior().sync_seconds(200)
    assert forecast.sync_seconds("p", "m", 4096) == Prior().sync_seconds(4096) > 1 + 4096 / 60
    for number in range(20):
        forecast.call_answered("p", "m", 100, 60.0, 500 + number / 10)
    assert forecast.sync_seconds("p", "m", 4096) > 2 * Prior().sync_seconds(4096)  # whatever is slow now, is slow
    assert (
        forecast.sync_seconds("p", "m", 4096) < Prior().sync_seconds(4096) + 2 * 70
    )  # but few calls reach their limit


@given(
    st.lists(st.tuples(st.integers(0, 64_000), st.floats(0, 5000)), max_size=30),
    st.integers(0, 300_000),
    st.integers(0, 300_000),
)
def test_more_tokens_never_take_less(seen: list[tuple[int, float]], tokens: int, more: int) -> None:
    forecast = Forecast()
    for number, (written, seconds) in enumerate(seen):
        forecast.call_answered("p", "m", written, seconds, float(number))
    assert forecast.sync_seconds("p", "m", tokens) <= forecast.sync_seconds("p", "m", tokens + more)
    assert forecast.sync_typical("p", "m", tokens) <= forecast.sync_seconds("p", "m", tokens)
    assert forecast.sync_seconds("p", "m", tokens) >= Prior().sync_seconds(tokens)  # of so few


# ------------------------------------------------------------ cancels and flex


def test_cancels() -> None:
    forecast = Forecast()
    for number in range(20):
        forecast.cancel_ended("p", 60, billed=0, unbilled=100, now=number * 60)
    assert 60 <= forecast.cancel_seconds("p") < 70
    assert forecast.billed_chance("p") < 0.05
    forecast.cancel_ended("p", 60, billed=0, unbilled=0, now=1300)
    for number in range(20, 60):
        forecast.cancel_ended("p", 60, billed=1, unbilled=0, now=number * 60)
    assert forecast.billed_chance("p") > 0.5
    assert forecast.billed_chance("q") == Prior().billed_chance


def test_one_cancel_says_less_than_many() -> None:
    forecast = Forecast()
    forecast.cancel_ended("p", 20, billed=10_000, unbilled=0, now=0)
    assert forecast.billed_chance("p") < 0.5


def test_flex() -> None:
    forecast = Forecast()
    for number in range(100):
        forecast.flex_answered("p", "m", refused=number % 2 == 0, now=number)
    assert forecast.flex_refusal("p", "m") == pytest.approx(0.5, abs=0.05)
    assert forecast.flex_refusal("p", "other") == Prior().flex_refusal


# ------------------------------------------------------------ persistence


def some_forecast(seed: int, provider: str = "anthropic") -> Forecast:
    forecast, of = Forecast(), OF._replace(provider=provider)
    Provider(forecast, seed).run(HOUR, of=of)
    answered(forecast, random.Random(seed), 600, 0)
    forecast.cancel_ended(provider, 30, 3, 4, now=HOUR)
    forecast.flex_answered(provider, "m", refused=True, now=HOUR)
    return forecast


def readings(forecast: Forecast) -> list[float]:
    return [
        *(forecast.batch_cdf(10.0**power, OF._replace(size_class=size)) for power in range(6) for size in "sml"),
        forecast.sync_seconds("p", "m", 1000),
        forecast.cancel_seconds("anthropic"),
        forecast.billed_chance("anthropic"),
        forecast.flex_refusal("anthropic", "m"),
        forecast.observed(OF),
    ]


def test_a_stored_forecast_says_the_same() -> None:
    forecast, restarted = some_forecast(1), Forecast()
    restarted.load(forecast.dump(), now=HOUR)
    assert readings(restarted) == pytest.approx(readings(forecast), rel=1e-3)
    assert len(forecast.dump()) < 10_000


def save(forecast: Forecast, stored: bytes, now: float) -> bytes:
    """As the engine does."""
    forecast.load(stored, now)
    stored = forecast.dump()
    forecast.saved()
    return stored


def test_engines_add_what_they_learned_in_any_order() -> None:
    orders = []
    for seeds in ((1, 2, 3), (3, 1, 2)):
        stored = b""
        for seed in seeds:
            stored = save(some_forecast(seed), stored, HOUR)
        merged = Forecast()
        merged.load(stored, HOUR)
        orders.append(readings(merged))
    assert orders[0] == pytest.approx(orders[1], rel=1e-3)
    alone = some_forecast(1).observed(OF)
    assert 2.5 * alone < orders[0][-1] < 3.5 * alone


def test_saving_again_and_again_counts_nothing_twice() -> None:
    one, other = some_forecast(1), some_forecast(2)
    stored = b""
    for _ in range(5):
        stored = save(other, save(one, stored, HOUR), HOUR)
    both = readings(other)
    stored = save(one, stored, HOUR)
    assert readings(one) == pytest.approx(both, rel=1e-3)
    one.batch_ended(OF, 0, 60, now=HOUR)
    other.load(save(one, stored, HOUR), HOUR)
    assert other.observed(OF) == pytest.approx(both[-1] + 1, rel=1e-3)


@pytest.mark.parametrize("stored", [b"", b"nonsense", b"\x82\xa7version\x02\xa7classes\x90"])
def test_an_unreadable_state_is_ignored(stored: bytes) -> None:
    forecast = some_forecast(1)
    before = readings(forecast)
    forecast.load(stored, now=HOUR)
    assert readings(forecast) == before


def test_the_number_of_classes_is_bounded() -> None:
    forecast = Forecast()
    for number in range(MAX_CLASSES + 100):
        forecast.call_answered("p", f"model {number}", 10, 1.0, float(number))
        forecast.sync_seconds("p", f"model {number}", 10)
        forecast.batch_ended(OF, 0, 100, float(number))
        forecast.batch_cdf(100, OF._replace(model=f"model {number}"))
    assert len(forecast.dump()) < 100 * MAX_CLASSES
    assert forecast.observed(OF) > 100  # what is in use is kept
