from __future__ import annotations

from carpool.planners.pressure.breaker import FAILURES, OPEN_MAX_S, PROBE_S, Breaker, RetryBudget

NOW = 1_794_000_000.0


def broken(now: float = NOW) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed(now, False, 0.5)
    return breaker


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker()
    for _ in range(100):
        for _ in range(FAILURES - 1):
            assert not breaker.failed(NOW, False, 0.5)
        breaker.answered()
    assert breaker.closed
    opened = [breaker.failed(NOW, False, 0.5) for _ in range(FAILURES)]
    assert opened == [False] * (FAILURES - 1) + [True]
    assert breaker.ready_at(NOW) > NOW


def test_failures_of_long_ago_do_not_count() -> None:
    breaker = Breaker()
    for number in range(3 * FAILURES):
        breaker.failed(NOW + 100.0 * number, False, 0.5)
    assert breaker.closed


def test_one_probe_at_a_time() -> None:
    breaker = broken()
    now = breaker.ready_at(NOW)
    assert breaker.take(now)
    assert breaker.ready_at(now) == now + PROBE_S  # nobody else meanwhile
    breaker.left(probe=True)
    assert breaker.ready_at(now) == now
    assert breaker.take(now)
    assert breaker.answered()
    assert breaker.ready_at(now) == now
    assert not breaker.take(now)


def test_probes_that_fail_come_more_and_more_rarely_and_never_end() -> None:
    breaker, now, pauses = broken(), NOW, []
    for _ in range(12):
        now = breaker.ready_at(now)
        breaker.take(now)
        assert not breaker.failed(now, True, 0.5)
        pauses.append(breaker.ready_at(now) - now)
    assert pauses == sorted(pauses)
    assert pauses[-1] <= OPEN_MAX_S


def test_others_that_fail_late_do_not_prolong_it() -> None:
    breaker = broken()
    until = breaker.open_until
    breaker.failed(NOW + 0.5, False, 0.5)
    assert breaker.open_until == until


# ---------------------------------------------------------------- retries


def test_retries_are_a_share_of_the_calls_and_a_few_more() -> None:
    retries, made = RetryBudget(NOW), 0
    for number in range(1000):
        if retries.wait(NOW, number) == 0.0:
            retries.spend()
            made += 1
    assert 200 <= made <= 220


def test_beyond_the_budget_they_wait_longer_and_longer() -> None:
    retries = RetryBudget(NOW)
    waits = []
    for _ in range(30):
        waits.append(retries.wait(NOW, 0))
        retries.spend()
    assert waits[0] == 0.0
    assert waits == sorted(waits)
    assert waits[-1] > 30.0
    assert retries.wait(NOW + 3600.0, 0) == 0.0


def test_a_clock_that_is_set_back_earns_nothing() -> None:
    retries = RetryBudget(NOW)
    for _ in range(30):
        retries.wait(NOW, 0)
        retries.spend()
    before = retries.wait(NOW, 0)
    assert retries.wait(NOW - 1000.0, 0) == before
