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
from carpool.dialects.provider_api import decode_or_none

TOLERANCE_S = 300.0
_PREFIX = "whsec_"


class _Data(msgspec.Struct):
    id: str


class _Event(msgspec.Struct):
    type: str
    data: _Data


_EVENT = msgspec.json.Decoder(_Event)


class StandardWebhooks:
    """`ports.WebhookReader`."""

    def read(self, secret: str, headers: Headers, body: bytes, now: float) -> WebhookEvent:
        """Parse a webhook. Raises `KeyRefused` unless its signature is valid and recent."""
        name, stamp = first(headers, "webhook-id") or "", first(headers, "webhook-timestamp") or ""
        if not name or not stamp.isascii() or not stamp.isdigit() or abs(int(stamp) - now) > TOLERANCE_S:
            raise KeyRefused("This webhook has no id, or its time is more than five minutes from now.")
        try:
            key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError("The webhook secret is not what OpenAI gives: whsec_ and base 64.") from None
        signed = b"v1," + base64.b64encode(hmac.digest(key, f"{name}.{stamp}.".encode() + body, "sha256"))
        # One signature for each valid secret, so two while a secret is being rotated.
        signatures = (first(headers, "webhook-signature") or "").encode().split()
        if not any(hmac.compare_digest(signed, signature) for signature in signatures):
            raise KeyRefused("This webhook's signature is not valid: check that the secret is that of its endpoint.")
        event = decode_or_none(_EVENT, body)
        if event is None:
            raise BadCall("This webhook does not carry an event.")
        return WebhookEvent(name, event.data.id if event.type.startswith("batch.") else None)
