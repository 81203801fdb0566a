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
from carpool.stores.operations.session import Content, PlainContents, Session

_SALT: Final = "sealing_salt"  # the name under which a store keeps its salt
_SEALED, _PACKED = b"\0\1", b"\0\2"
_SEALED_TEXT, _KEY_TEXT = "\1s", "\1k"
_NONCE: Final = 12

_package = msgspec.json.Decoder(tuple[str, str, int])


class Sealing(PlainContents):
    """Reads plain and encrypted values. Writes encrypted ones with `encrypt`, else plain ones, for a store whose
    encryption was switched off."""

    def __init__(self, cipher: Any, words: bytes, invalid: type[Exception], *, encrypt: bool) -> None:
        self._cipher = cipher  # AES-GCM
        self._words = words  # the key for texts, which must be encrypted to the same value every time
        self._invalid = invalid
        self._encrypting = encrypt
        self._encrypt_text = lru_cache(maxsize=1024)(self._encrypted_text)  # few texts, used often

    def bytes_in(self, ticket: int, data: bytes) -> bytes:
        return self._encrypt(_SEALED, ticket, data) if self._encrypting else super().bytes_in(ticket, data)

    def bytes_out(self, ticket: int, data: bytes) -> bytes:
        return self._decrypt(ticket, data) if data[:2] == _SEALED else super().bytes_out(ticket, data)

    def outcome_in(self, ticket: int, content: Content) -> Content:
        if not self._encrypting:
            return super().outcome_in(ticket, content)
        reason, headers, body = content
        head = msgspec.json.encode((reason, headers, len(body)))
        return "", "[]", self._encrypt(_PACKED, ticket, len(head).to_bytes(4, "big") + head + body)

    def outcome_out(self, ticket: int, content: Content) -> Content:
        if content[2][:2] != _PACKED:
            return super().outcome_out(ticket, content)
        opened = self._decrypt(ticket, content[2])
        size = int.from_bytes(opened[:4], "big")
        reason, headers, _ = _package.decode(opened[4 : 4 + size])
        return reason, headers, opened[4 + size :]

    def text_in(self, text: str) -> str:
        return self._encrypt_text(text) if self._encrypting else super().text_in(text)

    def text_out(self, text: str) -> str:
        if text[:2] != _SEALED_TEXT:
            return super().text_out(text)
        try:
            raw = base64.b64decode(text[2:])
            opened: bytes = self._cipher.decrypt(raw[:_NONCE], raw[_NONCE:], _SEALED_TEXT.encode())
            return opened.decode("utf-8", "surrogatepass")
        except (self._invalid, ValueError):
            raise StoreCorrupt("A text in the store was changed, and can't be decrypted.") from None

    def key_forms(self, key: str) -> list[str]:
        digest = hmac.digest(self._words, b"key\n" + key.encode("utf-8", "surrogatepass"), "sha256")
        forms = [*super().key_forms(key), _KEY_TEXT + base64.b64encode(digest).decode()]
        return forms[::-1] if self._encrypting else forms

    def _encrypt(self, kind: bytes, ticket: int, data: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        sealed: bytes = self._cipher.encrypt(nonce, data, kind + ticket.to_bytes(8, "big"))
        return kind + nonce + sealed

    def _decrypt(self, ticket: int, data: bytes) -> bytes:
        kind, nonce, sealed = data[:2], data[2 : 2 + _NONCE], data[2 + _NONCE :]
        try:
            opened: bytes = self._cipher.decrypt(nonce, sealed, kind + ticket.to_bytes(8, "big"))
        except self._invalid:
            raise StoreCorrupt("The stored data of a call was changed, and can't be decrypted.") from None
        return opened

    def _encrypted_text(self, text: str) -> str:
        """Encrypts deterministically, with a nonce derived from the text, so that an equal text can be looked up."""
        raw = text.encode("utf-8", "surrogatepass")
        nonce = hmac.digest(self._words, raw, "sha256")[:_NONCE]
        sealed = self._cipher.encrypt(nonce, raw, _SEALED_TEXT.encode())
        return _SEALED_TEXT + base64.b64encode(nonce + sealed).decode()


def unseal(session: Session, *, encrypt: bool) -> None:
    """Sets the session's contents. Each store has its own salt, so one secret gives each a different key. Without a
    salt, nothing in a store was ever encrypted."""
    if (library := check_sealing(session, encrypt=encrypt)) is None:
        return
    cipher, invalid = library
    salt = bytes.fromhex(session.make_meta(_SALT, os.urandom(16).hex()))
    words = _derived(session.pepper, salt, b"carpool store, words")
    bodies = cipher(_derived(session.pepper, salt, b"carpool store, bodies"))
    session.contents = Sealing(bodies, words, invalid, encrypt=encrypt)


def check_sealing(session: Session | None, *, encrypt: bool) -> tuple[Any, type[Exception]] | None:
    """Returns the cipher, and its error, if the store needs them; raises if the package `cryptography` is missing.
    `session` None: the store does not exist yet."""
    encrypted = session is not None and session.meta(_SALT) is not None
    if not encrypt and not encrypted:
        return None
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        wanted = "store.encrypt is on" if encrypt or session is None else f"The store {session.name} was encrypted"
        raise ConfigError(f"{wanted}, and that needs the package cryptography: pip install cryptography.") from None
    return AESGCM, InvalidTag


def _derived(secret: bytes, salt: bytes, use: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256, for one block of output."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, use + b"\x01", hashlib.sha256)
