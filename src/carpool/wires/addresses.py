"""Where a request goes, as far as messages may say it."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

_METADATA_V6 = ipaddress.ip_address("fd00:ec2::254")


def host_of(url: str) -> str:
    """The host and nothing else: a path may name things, a query or user part may hold secrets."""
    try:
        return urlsplit(url).hostname or "the provider"
    except ValueError:
        return "the provider"


def is_link_local(address: str) -> bool:
    """Where clouds give their machines' secrets to whoever asks from the inside."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_link_local or parsed == _METADATA_V6
