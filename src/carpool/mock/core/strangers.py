"""Batches of other clients in the workspace."""

from carpool.mock.anthropic.digest import Digest, digest
from carpool.mock.openai.digest import digest as digest_openai
from carpool.mock.openai.intake import Contents

_BODY = {"model": "claude-haiku-4-5", "max_tokens": 16, "messages": [{"role": "user", "content": "not yours"}]}
_OPENAI_BODY = {"model": "gpt-6-luna", "messages": [{"role": "user", "content": "not yours"}]}


def stranger_requests(size: int, mean_output: int) -> tuple[list[str], list[Digest]]:
    return [f"theirs-{i}" for i in range(size)], [digest(_BODY, b"", mean_output, in_batch=True)] * size


def stranger_contents(size: int, mean_output: int) -> Contents:
    asked = digest_openai("chat", _OPENAI_BODY, mean_output)
    ids = [f"theirs-{i}" for i in range(size)]
    return Contents(asked.model, ids, [asked] * size, asked.input_tokens * size)
