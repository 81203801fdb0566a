"""Secrets live here, in memory, and nowhere else. Everything else knows a credential by its keyed hash."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from carpool.model import Headers


class Keyring:
    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper
        self._secrets: dict[str, Headers] = {}
        self._names: dict[tuple[str, str, Headers], str] = {}  # every call asks, few secrets there are

    def credential(self, provider: str, base_url: str, secret: Headers) -> str:
        """The name of a secret at a provider. Equal secrets at different places are different credentials."""
        text = "\n".join([provider, base_url, *(f"{name}:{value}" for name, value in sorted(secret))])
        return hmac.digest(self._pepper, text.encode(), "sha256")[:16].hex()

    def add(self, provider: str, base_url: str, secret: Headers) -> tuple[str, bool]:
        """Takes a secret in; says its credential, and whether it is new here."""
        place = (provider, base_url, secret)
        credential = self._names.get(place) or self._names.setdefault(place, self.credential(*place))
        new = credential not in self._secrets
        self._secrets[credential] = secret
        return credential, new

    def secret(self, credential: str) -> Headers:
        return self._secrets[credential]

    def __contains__(self, credential: str) -> bool:
        return credential in self._secrets

    def __iter__(self) -> Iterator[str]:
        return iter(self._secrets)

    def __repr__(self) -> str:  # never the secrets
        return f"<Keyring of {len(self._secrets)}>"
