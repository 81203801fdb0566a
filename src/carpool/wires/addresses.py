"""Where a request goes, as far as messages may say it."""

from __future__ import annotations

from urllib.parse import urlsplit


def host_of(url: str) -> str:
    """The host and nothing else: a path may name things, a query or user part may hold secrets."""
    try:
        return urlsplit(url).hostname or "the provider"
    except ValueError:
        return "the provider"
