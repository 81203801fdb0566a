"""Embeddings of the mock: the same vector for the same text, model and length, with norm one."""

import base64
import math
import random
import struct
from hashlib import sha256
from typing import Any

from carpool.mock.core.blocks import canonical
from carpool.mock.openai.models import OpenAISpec

Body = dict[str, Any]


def inputs_of(body: Body) -> list[Any]:
    """One input each: a text, or its tokens."""
    given = body["input"]
    if isinstance(given, str) or all(isinstance(one, int) for one in given):
        return [given]
    return list(given)


def tokens_of(one: Any) -> int:
    return 1 + len(one.encode()) // 4 if isinstance(one, str) else len(one)


def embeddings(body: Body, spec: OpenAISpec) -> Body:
    inputs = inputs_of(body)
    length = body.get("dimensions") or spec.dimensions
    vectors = (_vector(spec.id, one, length) for one in inputs)
    encode = _base64 if body.get("encoding_format") == "base64" else list
    total = sum(map(tokens_of, inputs))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encode(vector)} for index, vector in enumerate(vectors)
        ],
        "model": body["model"],
        "usage": {"prompt_tokens": total, "total_tokens": total},
    }


def _vector(model: str, one: Any, length: int) -> list[float]:
    rng = random.Random(sha256(canonical([model, one, length])).digest())  # noqa: S311 - a simulation, not a secret
    raw = [rng.gauss(0.0, 1.0) for _ in range(length)]
    norm = math.sqrt(sum(value * value for value in raw))
    # As they are sent: four bytes each.
    return list(struct.unpack(f"<{length}f", struct.pack(f"<{length}f", *(value / norm for value in raw))))


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
