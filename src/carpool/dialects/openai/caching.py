"""Edits of a request to OpenAI for the prompt cache. It caches without marks; two members steer that."""

from __future__ import annotations

from typing import Final

import msgspec

from carpool.core.errors import BadCall
from carpool.core.model import CachePlan
from carpool.core.ports import EditedBody
from carpool.dialects import json_object

_KEY: Final = "prompt_cache_key"
_OPTIONS: Final = "prompt_cache_options"
_BREAKPOINT: Final = b'"prompt_cache_breakpoint"'  # within a text its quotes would be escaped
_BLAMED: Final = b"prompt_cache"


class SteeredCacheEdits:
    """`ports.CacheEdits`."""

    def edited(self, body: bytes, plan: CachePlan) -> EditedBody | None:
        try:
            document, edits = json_object.read(body), []
            if plan.one_shot and _OPTIONS not in document.values and _BREAKPOINT not in body:
                document = json_object.read(document.having(_OPTIONS, b'{"mode":"explicit"}'))
                edits.append("nothing written to the cache")
            if plan.key and _KEY not in document.values:
                document = json_object.read(document.having(_KEY, msgspec.json.encode(plan.key)))
                edits.append("a cache key")
        except BadCall:
            return None
        return EditedBody(document.text, ", ".join(edits)) if edits else None

    def ping(self, body: bytes) -> bytes | None:
        return None  # no request without output: it would have to be bought

    def blamed(self, status: int, body: bytes) -> bool:
        return status in (400, 422) and _BLAMED in body
