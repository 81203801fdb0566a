"""OpenAI's prompt cache: automatic, from 1,024 tokens on, in steps of 128, by the longest prefix seen before."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, NamedTuple

from carpool.mock.core.blocks import canonical
from carpool.mock.openai.models import OpenAISpec

LEAST = 1024
STEP = 128
KEPT_S = 1800.0


class Prefixes(NamedTuple):
    """`keys[i]` and `tokens[i]` are the key and the length of the prefix that ends with block i."""

    keys: Sequence[bytes]
    tokens: Sequence[int]


class CacheUse(NamedTuple):
    read: int
    written: int


def prefixes(model: str, blocks: Sequence[Any]) -> Prefixes:
    keys: list[bytes] = []
    tokens: list[int] = []
    key, total = model.encode(), 0
    for block in blocks:
        text = canonical(block)
        key = sha256(key + text).digest()[:16]
        total += 1 + len(text) // 4
        keys.append(key)
        tokens.append(total)
    return Prefixes(keys, tokens)


class OpenAICache:
    """What one workspace has stored."""

    def __init__(self) -> None:
        self._until: dict[bytes, float] = {}

    def use(self, asked: Prefixes, spec: OpenAISpec, now: float) -> CacheUse:
        """One request's cache traffic: what it reads, and what it writes."""
        read = 0
        for key, tokens in zip(reversed(asked.keys), reversed(asked.tokens), strict=True):
            if tokens >= LEAST and self._until.get(key, 0.0) > now:
                read = _stepped(tokens)
                break
        for key, tokens in zip(asked.keys, asked.tokens, strict=True):
            if tokens >= LEAST:
                self._until[key] = now + KEPT_S
        total = asked.tokens[-1] if asked.tokens else 0
        written = _stepped(total) - read if spec.write is not None and total >= LEAST else 0
        return CacheUse(read, written)


def _stepped(tokens: int) -> int:
    return tokens // STEP * STEP
