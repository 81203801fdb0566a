from __future__ import annotations

import pytest

from carpool.core.upstream import clock_offset

NOW = 1_794_000_000.0


@pytest.mark.parametrize(
    ("date", "offset"),
    [
        ("Fri, 06 Nov 2026 21:20:10 GMT", 10.0),
        (None, None),
        ("yesterday", None),
        ("Mon, 16 Nov 2026 99999999999999999999999999999903:00:00 GMT", None),  # the fuzzer's: OverflowError
    ],
)
def test_the_providers_clock_is_read_from_its_date(date: str | None, offset: float | None) -> None:
    headers = () if date is None else (("date", date),)
    assert clock_offset(headers, NOW) == offset
