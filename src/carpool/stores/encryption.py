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
from typing import Any, Final

import msgspec

from carpool.core.errors import ConfigError, StoreCorrupt

SALT: Final = "sealing_salt"  # the name under which a store keeps its salt
_PLAIN, _SEALED, _PACKED = b"\0\0", b"\0\1", b"\0\2"
_PLAIN_TEXT, _SEALED_TEXT, _KEY_TEXT = "\1p", "\1s", "\1k"
_NONCE: Final = 12

_package = msgspec.json.Decoder(tuple[str, str, int])

Content = tuple[str, str, bytes]  # of an outcome: reason, headers, body


class Sealing:
    """Reads plain values, and encrypted ones if there is a `cipher` (AES-GCM). Writes encrypted ones with `encrypt`;
    without it, for a store whose encryption was switched off, plain ones."""

    def __init__(
        self, cipher: Any = None, words: bytes = b"", invalid: type[Exception] = ValueError, *, encrypt: bool = False
    ) -> None:
        self._cipher = cipher
        self._words = words  # the key for texts, which must be encrypted to the same value every time
        self._invalid = invalid
        self._encrypting = encrypt
        self._encrypt_text = lru_cache(maxsize=1024)(self._encrypted_text)  # few texts, used often

    def bytes_in(self, ticket: int, data: bytes) -> bytes:
        if self._encrypting:
            return self._encrypt(_SEALED, ticket, data)
        return _PLAIN + data if data[:1] == b"\0" else data

    def bytes_out(self, ticket: int, data: bytes) -> bytes:
        if data[:1] != b"\0":
            return data
        return data[2:] if data[:2] == _PLAIN else self._decrypt(_SEALED, ticket, data)

    def outcome_in(self, ticket: int, content: Content) -> Content:
        reason, headers, body = content
        if not self._encrypting:
            return reason, headers, self.bytes_in(ticket, body)
        head = msgspec.json.encode((reason, headers, len(body)))
        return "", "[]", self._encrypt(_PACKED, ticket, len(head).to_bytes(4, "big") + head + body)

    def outcome_out(self, ticket: int, content: Content) -> Content:
        reason, headers, body = content
        if body[:2] != _PACKED:
            return reason, headers, self.bytes_out(ticket, body)
        opened = self._decrypt(_PACKED, ticket, body)
        size = int.from_bytes(opened[:4], "big")
        reason, headers, _ = _package.decode(opened[4 : 4 + size])
        return reason, headers, opened[4 + size :]

    def text_in(self, text: str) -> str:
        return self._encrypt_text(text) if self._encrypting else _escape(text)

    def text_out(self, text: str) -> str:
        if text[:1] != "\1":
            return text
        return text[2:] if text[:2] == _PLAIN_TEXT else self._decrypt_text(text)

    def key_forms(self, key: str) -> list[str]:
        """Returns every form in which a client's key may be stored, the current one first. It is only ever compared."""
        if self._cipher is None:
            return [_escape(key)]
        digest = hmac.digest(self._words, b"key\n" + key.encode("utf-8", "surrogatepass"), "sha256")
        forms = [_escape(key), _KEY_TEXT + base64.b64encode(digest).decode()]
        return forms[::-1] if self._encrypting else forms

    def _encrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._cipher.encrypt(nonce, data, _bound(kind, ticket))
        return kind + nonce + sealed

    def _decrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        self._check_cipher()
        try:
            nonce, sealed = data[2 : 2 + _NONCE], data[2 + _NONCE :]
            opened: bytes = self._cipher.decrypt(nonce, sealed, _bound(kind, ticket))
        except self._invalid:
            raise StoreCorrupt("What the store keeps of a call was changed, and can't be read.") from None
        return opened

    def _encrypted_text(self, text: str) -> str:
        """Encrypts deterministically, with a nonce derived from the text, so that an equal text can be looked up."""
        raw = text.encode("utf-8", "surrogatepass")
        nonce = hmac.digest(self._words, raw, "sha256")[:_NONCE]
        sealed = self._cipher.encrypt(nonce, raw, _SEALED_TEXT.encode())
        return _SEALED_TEXT + base64.b64encode(nonce + sealed).decode()

    def _decrypt_text(self, text: str) -> str:
        self._check_cipher()
        try:
            raw = base64.b64decode(text[2:])
            opened: bytes = self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], _SEALED_TEXT.encode())
            return opened.decode("utf-8", "surrogatepass")
        except (self._invalid, ValueError):
            raise StoreCorrupt("A word that the store keeps was changed, and can't be read.") from None

    def _check_cipher(self) -> None:
        if self._cipher is None:
            raise StoreCorrupt("The store holds what was encrypted, but not what it takes to read it.")


PLAIN = Sealing()


def _escape(text: str) -> str:
    return _PLAIN_TEXT + text if text[:1] == "\1" else text


def _bound(kind: bytes, ticket: int) -> bytes:
    return kind + ticket.to_bytes(8, "big")


def new_salt() -> str:
    return os.urandom(16).hex()


def open_sealing(salt: str | None, secret: bytes, name: str, *, encrypt: bool) -> Sealing:
    """Returns the `Sealing` for a store. Without a salt, nothing in it was ever encrypted."""
    if salt is None:
        return PLAIN
    maker, invalid = _library(name, encrypt=encrypt)
    cipher = maker(_derived(secret, bytes.fromhex(salt), b"carpool store, bodies"))
    return Sealing(cipher, _derived(secret, bytes.fromhex(salt), b"carpool store, words"), invalid, encrypt=encrypt)


def check_sealing(salt: str | None, name: str, *, encrypt: bool) -> None:
    """Raises if the store needs the `cryptography` package and it is missing."""
    if salt is not None or encrypt:
        _library(name, encrypt=encrypt)


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
