from __future__ import annotations

import time

from carpool.core.clock import SystemClock


def test_now_is_the_time_since_the_epoch() -> None:
    assert abs(SystemClock().now() - time.time()) < 1


async def test_sleep_takes_its_time_and_none_for_the_past() -> None:
    clock = SystemClock()
    started = time.monotonic()
    await clock.sleep(-5)
    await clock.sleep(0.02)
    assert 0.015 < time.monotonic() - started < 1
