"""Secrets live here, in memory, and nowhere else. Everything else knows a credential by its keyed hash."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

from carpool.keys import digest_of
from carpool.model import Headers


class Keyring:
    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper
        self._secrets: dict[str, Headers] = {}
        self._names: dict[tuple[str, str, Headers], str] = {}  # every call asks, few secrets there are
        self._accounts: dict[str, str] = {}  # of those that buy with another's secret

    def credential(self, provider: str, base_url: str, secret: Headers) -> str:
        """The name of a secret at a provider. Equal secrets at different places are different credentials."""
        return self._named(provider, base_url, *(f"{name}:{value}" for name, value in sorted(secret)))

    def _named(self, *parts: str) -> str:
        return hmac.digest(self._pepper, "\n".join(parts).encode(), "sha256")[:16].hex()

    def add(self, provider: str, base_url: str, secret: Headers) -> tuple[str, bool]:
        """Takes a secret in; says its credential, and whether it is new here."""
        place = (provider, base_url, secret)
        credential = self._names.get(place) or self._names.setdefault(place, self.credential(*place))
        new = credential not in self._secrets
        self._secrets[credential] = secret
        return credential, new

    def lend(self, borrower: str, provider: str, base_url: str, secret: Headers) -> tuple[str, bool]:
        """A credential of its own for one that buys with a secret which others may buy with, too. It keeps its name
        when the secret behind it changes, but not when the secret is sent in another form."""
        forms = sorted(name for name, _ in secret)
        credential = self._named("borrowed", borrower, provider, base_url, *forms)
        new = credential not in self._secrets
        self._secrets[credential] = secret
        self._accounts[credential] = self.credential(provider, base_url, secret)
        return credential, new

    def digest(self, virtual_key: str) -> str:
        """Under what the store knows a virtual key."""
        return digest_of(self._pepper, virtual_key)

    def secret(self, credential: str) -> Headers:
        return self._secrets[credential]

    def account(self, credential: str) -> str:
        """What at the provider is shared by all who buy with one secret: its limits, and what it may do."""
        return self._accounts.get(credential, credential)

    def sharing(self, credential: str) -> list[str]:
        """All credentials of the same account, this one first."""
        account = self.account(credential)
        others = [one for one in self._secrets if one != credential and self.account(one) == account]
        return [credential, *others]

    def __contains__(self, credential: str) -> bool:
        return credential in self._secrets

    def __iter__(self) -> Iterator[str]:
        return iter(self._secrets)

    def __repr__(self) -> str:  # never the secrets
        return f"<Keyring of {len(self._secrets)}>"
