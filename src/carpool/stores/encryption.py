"""Encryption at rest: contents of calls and answers are encrypted before they are stored, with a key derived from the
secret.

A store may hold plain and encrypted values side by side; a prefix tells them apart. A plain value that happens to begin
like the prefix is escaped, so that neither kind can be mistaken for the other. A row is bound to its ticket as
associated data, so that someone who can write to the file can't give one call the answer of another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from carpool.core.errors import ConfigError, StoreCorrupt

_SALT: Final = "sealing_salt"
_PLAIN, _SEALED, _PACKED = b"\0\0", b"\0\1", b"\0\2"
_PLAIN_TEXT, _SEALED_TEXT, _KEY_TEXT = "\1p", "\1s", "\1k"
_NONCE: Final = 12

_package = msgspec.json.Decoder(tuple[str, str, int])

Told = tuple[str, str, bytes]  # the contents of an outcome: reason, headers, body


class Sealing:
    """Base class: writes plain values and reads plain values."""

    def bytes_in(self, ticket: int, data: bytes) -> bytes:
        return _PLAIN + data if data[:1] == b"\0" else data

    def bytes_out(self, ticket: int, data: bytes) -> bytes:
        if data[:1] != b"\0":
            return data
        return data[2:] if data[:2] == _PLAIN else self._decrypt(_SEALED, ticket, data)

    def outcome_in(self, ticket: int, told: Told) -> Told:
        reason, headers, body = told
        return reason, headers, self.bytes_in(ticket, body)

    def outcome_out(self, ticket: int, told: Told) -> Told:
        reason, headers, body = told
        if body[:2] != _PACKED:
            return reason, headers, self.bytes_out(ticket, body)
        opened = self._decrypt(_PACKED, ticket, body)
        size = int.from_bytes(opened[:4], "big")
        reason, headers, _ = _package.decode(opened[4 : 4 + size])
        return reason, headers, opened[4 + size :]

    def text_in(self, text: str) -> str:
        return _PLAIN_TEXT + text if text[:1] == "\1" else text

    def text_out(self, text: str) -> str:
        if text[:1] != "\1":
            return text
        return text[2:] if text[:2] == _PLAIN_TEXT else self._decrypt_text(text)

    def key_in(self, key: str) -> str:
        """Encodes a client's key, which is only ever compared."""
        return self.key_forms(key)[0]

    def key_forms(self, key: str) -> list[str]:
        """Returns every form in which this key may be stored, the current one first."""
        return [Sealing.text_in(self, key)]

    def _decrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        raise StoreCorrupt("The store holds what was encrypted, but not what it takes to read it.")

    def _decrypt_text(self, text: str) -> str:
        raise StoreCorrupt("The store holds what was encrypted, but not what it takes to read it.")


PLAIN = Sealing()


class Cipher(Protocol):
    """The interface of AES-GCM in `cryptography`."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...
    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes | None) -> bytes: ...


class Unsealing(Sealing):
    """Reads plain and encrypted values, writes plain ones: for a store whose encryption was switched off."""

    def __init__(self, cipher: Cipher, words: bytes, invalid: type[Exception]) -> None:
        self._cipher = cipher
        self._words = words  # the key for texts, which must be encrypted to the same value every time
        self._invalid = invalid

    def key_forms(self, key: str) -> list[str]:
        digest = hmac.digest(self._words, b"key\n" + key.encode("utf-8", "surrogatepass"), "sha256")
        return [*super().key_forms(key), _KEY_TEXT + base64.b64encode(digest).decode()]

    def _decrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        try:
            nonce, sealed = data[2 : 2 + _NONCE], data[2 + _NONCE :]
            return self._cipher.decrypt(nonce, sealed, _bound(kind, ticket))
        except self._invalid:
            raise StoreCorrupt("What the store keeps of a call was changed, and can't be read.") from None

    def _decrypt_text(self, text: str) -> str:
        try:
            raw = base64.b64decode(text[2:])
            opened = self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], _SEALED_TEXT.encode())
            return opened.decode("utf-8", "surrogatepass")
        except (self._invalid, ValueError):
            raise StoreCorrupt("A word that the store keeps was changed, and can't be read.") from None


class Sealed(Unsealing):
    """Reads plain and encrypted values, writes encrypted ones."""

    def __init__(self, cipher: Cipher, words: bytes, invalid: type[Exception]) -> None:
        super().__init__(cipher, words, invalid)
        self.text_in = lru_cache(maxsize=1024)(self._text_in)  # type: ignore[method-assign]  # few texts, used often

    def bytes_in(self, ticket: int, data: bytes) -> bytes:
        return self._encrypt(_SEALED, ticket, data)

    def outcome_in(self, ticket: int, told: Told) -> Told:
        reason, headers, body = told
        head = msgspec.json.encode((reason, headers, len(body)))
        return "", "[]", self._encrypt(_PACKED, ticket, len(head).to_bytes(4, "big") + head + body)

    def _text_in(self, text: str) -> str:
        """Encrypts deterministically, with a nonce derived from the text, so that an equal text can be looked up."""
        raw = text.encode("utf-8", "surrogatepass")
        nonce = hmac.digest(self._words, raw, "sha256")[:_NONCE]
        sealed = self._cipher.encrypt(nonce, raw, _SEALED_TEXT.encode())
        return _SEALED_TEXT + base64.b64encode(nonce + sealed).decode()

    def key_forms(self, key: str) -> list[str]:
        return super().key_forms(key)[::-1]

    def _encrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return kind + nonce + self._cipher.encrypt(nonce, data, _bound(kind, ticket))


def _bound(kind: bytes, ticket: int) -> bytes:
    return kind + ticket.to_bytes(8, "big")


class Meta(Protocol):
    """The metadata of a store."""

    def get(self, name: str) -> str | None: ...
    def make(self, name: str, value: str) -> str:
        """Stores the value unless there is one; returns the stored value."""
        ...


def salt_of(meta: Meta) -> str | None:
    """Returns the salt; None if nothing was ever encrypted."""
    return meta.get(_SALT)


def check_sealing(salt: str | None, name: str, *, encrypt: bool) -> None:
    """Raises if the store needs the `cryptography` package and it is missing."""
    if salt is not None or encrypt:
        _library(name, encrypt=encrypt)


def open_sealing(meta: Meta, secret: bytes, name: str, *, encrypt: bool) -> Sealing:
    """Returns the `Sealing` for a store. Each store has its own salt, so one secret gives each a different key."""
    salt = salt_of(meta)
    if salt is None and not encrypt:
        return PLAIN
    maker, invalid = _library(name, encrypt=encrypt)
    if salt is None:
        salt = meta.make(_SALT, os.urandom(16).hex())
    cipher = maker(_derived(secret, bytes.fromhex(salt), b"carpool store, bodies"))
    words = _derived(secret, bytes.fromhex(salt), b"carpool store, words")
    return (Sealed if encrypt else Unsealing)(cipher, words, invalid)


def _library(name: str, *, encrypt: bool) -> tuple[Any, type[Exception]]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        wanted = "store.encrypt is on" if encrypt else f"The store {name} was encrypted"
        raise ConfigError(f"{wanted}, and that needs the package cryptography: pip install cryptography.") from None
    return AESGCM, InvalidTag


def _derived(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256, for one block of output."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, use + b"\x01", hashlib.sha256)
