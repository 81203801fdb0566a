"""Batches that somebody else put into the workspace."""

from carpool.mock.digest import Digest, digest

_BODY = {"model": "claude-haiku-4-5", "max_tokens": 16, "messages": [{"role": "user", "content": "not yours"}]}


def stranger_requests(size: int, mean_output: int) -> tuple[list[str], list[Digest]]:
    return [f"theirs-{i}" for i in range(size)], [digest(_BODY, b"", mean_output, in_batch=True)] * size
