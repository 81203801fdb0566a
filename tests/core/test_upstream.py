from __future__ import annotations

import pytest

from carpool.core.upstream import clock_offset, is_link_local

NOW = 1_794_000_000.0
LINK_LOCAL = ("169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "fd00:ec2::254")


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


def test_link_local_addresses_are_known() -> None:
    assert all(map(is_link_local, LINK_LOCAL))
    assert not any(map(is_link_local, ("127.0.0.1", "10.0.0.1", "192.0.2.1", "::1", "2001:db8::1")))
