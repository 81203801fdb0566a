"""The secrets of clients, and what is known of the accounts that they buy with.

Two clients may buy with one secret: several virtual keys stand for it, or it is sent in two forms, as `x-api-key` and
as a bearer token. So three names are distinguished, each a keyed hash:

- The name of a secret in one form, as it is sent. A batch that was bought with it stores this name.
- The credential: the name of the usual form. Calls, results and adoption are separate between credentials.
- The account: the credential of the secret itself, also for the names of virtual keys. The provider's rate
  limits and permissions belong to it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence

from carpool.core.keys import digest_of
from carpool.core.model import Headers, Lane
from carpool.core.ports import Clock, KeyStore

REFUSAL_TTL_S = 3600.0  # how long a refused lane is not tried: an account may get the permission later
_REFUSALS = {Lane.BATCH: ("cannot_batch", "can't batch"), Lane.FLEX: ("cannot_flex", "can't take the lane flex")}


class Keyring:
    """Secrets are kept here, in memory, and nowhere else. Other code knows a credential by its keyed hash."""

    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper
        self._secrets: dict[str, Headers] = {}
        self._names: dict[tuple[str, str, Headers], str] = {}  # a cache: every call needs the name
        self._owners: dict[str, str] = {}  # name of any form → name of the usual form
        self._accounts: dict[str, str] = {}  # name of a virtual key → name of the secret behind it

    def name(self, provider: str, base_url: str, secret: Headers) -> str:
        """The name of a secret at a provider, in the form in which it is sent. Equal secrets at different providers
        have different names."""
        return self._hashed(provider, base_url, *(f"{name}:{value}" for name, value in sorted(secret)))

    def _hashed(self, *parts: str) -> str:
        return hmac.digest(self._pepper, "\n".join(parts).encode(), "sha256")[:16].hex()

    def known(self, provider: str, base_url: str, secret: Headers) -> str | None:
        """The name of a secret that was added."""
        return self._names.get((provider, base_url, secret))

    def add(self, provider: str, base_url: str, forms: Sequence[Headers]) -> bool:
        """Adds a secret in every form in which it may be sent, the usual one first: a purchase made with one form can
        continue with another. Returns whether any form is new."""
        names = [self.name(provider, base_url, form) for form in forms]
        self._names |= {(provider, base_url, form): name for form, name in zip(forms, names, strict=True)}
        return self._keep(names, forms)

    def add_virtual_key(
        self, key_uid: str, provider: str, base_url: str, forms: Sequence[Headers]
    ) -> tuple[list[str], bool]:
        """Adds a virtual key: its own names for a secret that others may use as well. The names stay the same when the
        secret behind them changes."""
        names = [
            self._hashed("borrowed", key_uid, provider, base_url, *sorted(name for name, _ in form)) for form in forms
        ]
        self._accounts |= dict.fromkeys(names, self.name(provider, base_url, forms[0]))
        return names, self._keep(names, forms)

    def _keep(self, names: Sequence[str], forms: Sequence[Headers]) -> bool:
        new = any(name not in self._secrets for name in names)
        self._secrets |= dict(zip(names, forms, strict=True))
        self._owners |= dict.fromkeys(names, names[0])
        return new

    def digest(self, virtual_key: str) -> str:
        """The digest under which the store knows a virtual key."""
        return digest_of(self._pepper, virtual_key)

    def derived(self, purpose: str) -> bytes:
        """A key for one purpose, from the store's secret."""
        return hmac.digest(self._pepper, purpose.encode(), "sha256")

    def secret(self, name: str) -> Headers:
        return self._secrets[name]

    def credential(self, name: str) -> str:
        """The credential of a secret in any form: the name of its usual form."""
        return self._owners.get(name, name)

    def account(self, credential: str) -> str:
        """The account at the provider, with its limits and permissions: shared by all who buy with one secret."""
        return self._accounts.get(credential) or self.credential(credential)

    def sharing(self, credential: str) -> list[str]:
        """All credentials of the account, this one first."""
        account = self.account(credential)
        others = [name for name in self._secrets if name != credential and self.account(name) == account]
        return [credential, *others]

    def __contains__(self, credential: str) -> bool:
        return credential in self._secrets

    def __iter__(self) -> Iterator[str]:
        return iter(self._secrets)

    def __repr__(self) -> str:  # never the secrets
        return f"<Keyring of {len(self._secrets)}>"


class LaneRefusals:
    """What providers refuse on principle. It is remembered for a while, so that it is not requested again."""

    def __init__(self, store: KeyStore, clock: Clock, keyring: Keyring) -> None:
        self._store = store
        self._clock = clock
        self._keyring = keyring
        self._refused: dict[tuple[Lane, str], tuple[float, str]] = {}  # lane, account and model → (until, why)

    def why_not(self, lane: Lane, credential: str, model: str) -> str | None:
        """Why a credential's account may not take a lane with a model; None if it was not refused recently."""
        if not self._refused:
            return None
        account = self._keyring.account(credential)
        for key in (account, f"{account} {model}"):
            until, why = self._refused.get((lane, key), (0.0, ""))
            if until > self._clock.now():
                return why
        return None

    async def refused(self, lane: Lane, credential: str, model: str, message: str) -> None:
        """Remembers a refusal. `model` is empty if the whole account was refused."""
        account, now = self._keyring.account(credential), self._clock.now()
        key, until = f"{account} {model}".rstrip(), now + REFUSAL_TTL_S
        self._note(lane, key, until, message)
        await self._store.remember(_REFUSALS[lane][0], key, f"{until} {message}", now)

    async def recall(self) -> None:
        for lane, (kind, _) in _REFUSALS.items():
            for key, memo in (await self._store.recall(kind)).items():
                until, _, message = memo.partition(" ")
                self._note(lane, key, float(until), message)

    def _note(self, lane: Lane, key: str, until: float, message: str) -> None:
        _, _, model = key.partition(" ")
        who = f"the model {model}" if model else "this credential"
        self._refused[lane, key] = (until, f"{who} {_REFUSALS[lane][1]}: {message}")
