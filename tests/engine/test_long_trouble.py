"""Hours of a provider's trouble: what is counted meanwhile never becomes trouble of our own."""

from __future__ import annotations

from carpool.core.model import Lane
from carpool.mock import Faults, MockConfig
from tests.support.engines import House, in_house

HOUR = 3600.0


def test_a_call_outlasts_eleven_hours_of_refusals_that_name_no_time() -> None:
    async def test(house: House) -> None:
        await house.boot(1)
        house.provider.script("sync_429_burst")
        await house.ask(house.engines[0], 1, budget=30 * HOUR, lane=Lane.NOW)
        assert house.log.text().count("POST /v1/messages -> 429") > 1100

    in_house(test, MockConfig(faults=Faults(burst_s=11 * HOUR, retry_after_s=0)))
