"""Verify and parse OpenAI's webhooks about batches (signed as in Standard Webhooks)."""

from __future__ import annotations

import base64
import binascii
import hmac

import msgspec

from carpool.core.errors import BadCall, ConfigError, KeyRefused
from carpool.core.model import Headers
from carpool.core.ports import WebhookEvent
from carpool.dialects.headers import first

TOLERANCE_S = 300.0
_PREFIX = "whsec_"
_VERSION = "v1"


class _Data(msgspec.Struct):
    id: str


class _Event(msgspec.Struct):
    type: str
    data: _Data


_EVENT = msgspec.json.Decoder(_Event)


def read_webhook(secret: str, headers: Headers, body: bytes, now: float) -> WebhookEvent:
    """Parse a webhook. Raises `KeyRefused` unless its signature is valid and recent."""
    name, stamp = first(headers, "webhook-id") or "", first(headers, "webhook-timestamp") or ""
    if not name or not stamp.isascii() or not stamp.isdigit() or abs(int(stamp) - now) > TOLERANCE_S:
        raise KeyRefused("This webhook has no id, or its time is more than five minutes from now.")
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("The webhook secret is not what OpenAI gives: whsec_ and base 64.") from None
    signed = hmac.digest(key, f"{name}.{stamp}.".encode() + body, "sha256")
    if not any(hmac.compare_digest(signed, one) for one in _signatures(first(headers, "webhook-signature") or "")):
        raise KeyRefused("The signature of this webhook is not valid: check that the secret is that of its endpoint.")
    try:
        event = _EVENT.decode(body)
    except (ValueError, RecursionError):
        raise BadCall("This webhook does not carry an event.") from None
    return WebhookEvent(name, event.data.id if event.type.startswith("batch.") else None)


def _signatures(text: str) -> list[bytes]:
    """The signatures of a webhook: one per valid secret, so two while a secret is being rotated."""
    signatures = []
    for part in text.split():
        version, _, value = part.partition(",")
        if version == _VERSION:
            try:
                signatures.append(base64.b64decode(value, validate=True))
            except (binascii.Error, ValueError):
                continue
    return signatures
