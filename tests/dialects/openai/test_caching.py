"""Members that steer the prompt cache: set only where the client set none."""

from __future__ import annotations

import pytest

from carpool.core.model import CachePlan
from carpool.dialects import OPENAI
from carpool.dialects.openai import OpenAI
from carpool.dialects.openai.caching import SteeredCacheEdits
from carpool.dialects.openai.providers import COMPATIBLE_PROVIDERS

EDITS = SteeredCacheEdits()
BODY = b'{"model":"m", "messages":[{"role":"user","content":"a"}] }'


def test_only_openai_itself_has_them() -> None:
    assert isinstance(OPENAI.caching, SteeredCacheEdits)
    assert OpenAI(COMPATIBLE_PROVIDERS["groq"]).caching is None


def test_both_members_are_added() -> None:
    found = EDITS.edited(BODY, CachePlan(one_shot=True, key="a-1"))
    assert found is not None
    assert found.body == (
        b'{"model":"m", "messages":[{"role":"user","content":"a"}],"prompt_cache_options":{"mode":"explicit"},'
        b'"prompt_cache_key":"a-1" }'
    )
    assert found.edits == "nothing written to the cache, a cache key"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt_cache_options":{"mode":"implicit"},"prompt_cache_key":"k"}',
        b'{"messages":[{"content":[{"prompt_cache_breakpoint":{}}]}],"prompt_cache_key":"k"}',
        b"[]",
    ],
)
def test_what_the_client_says_stays(body: bytes) -> None:
    assert EDITS.edited(body, CachePlan(one_shot=True, key="a-1")) is None


def test_nothing_planned_nothing_changed() -> None:
    assert EDITS.edited(BODY, CachePlan(ttl="1h", mark_end=True)) is None
    assert EDITS.ping(BODY) is None


def test_which_errors_may_be_due_to_an_edit() -> None:
    assert EDITS.blamed(400, b'{"error":{"message":"Unknown parameter: prompt_cache_options."}}')
    assert not EDITS.blamed(400, b'{"error":{"message":"Unknown parameter: store."}}')
