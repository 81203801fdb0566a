"""Whose prompts are followed together, and what is remembered of refused edits."""

from __future__ import annotations

from carpool.core.model import CachingMode, Call, Entry, EntryKind, Lane, Usage
from carpool.core.ports import RawRequest
from carpool.core.upstream import Upstream
from carpool.dialects import ANTHROPIC
from carpool.engine.events import Stats
from carpool.engine.prompt_caches import PromptCaches
from tests.support.engine_context import AlikeClient

PLACE = "https://provider.invalid"
BODY = (
    b'{"model":"claude-sonnet-5","max_tokens":9,"messages":[{"role":"user","content":'
    b'[{"type":"text","text":"a","cache_control":{"type":"ephemeral"}}]}]}'
)
PROMPT = ANTHROPIC.prompt_chain(ANTHROPIC.parse(RawRequest("POST", "/v1/messages", "", (("x-api-key", "k"),), BODY)))
REFUSAL = b'{"error":{"message":"cache_control: too many"}}'


def caches(workspace: str = "") -> PromptCaches:
    names = {"anthropic": PLACE, "same": PLACE, "other": "https://elsewhere.invalid"}
    upstreams = {name: Upstream(name, url, ANTHROPIC, AlikeClient(), workspace) for name, url in names.items()}
    return PromptCaches(upstreams, Stats())


def call(credential: str = "c", ticket: int = 1) -> Call:
    return Call(
        ticket=ticket, provider="anthropic", dialect="anthropic", endpoint="/v1/messages", body=BODY, headers=(),
        credential=credential, model="claude-sonnet-5", arrived=0.0, prompt=PROMPT, caching=CachingMode.PLAN,
    )  # fmt: skip


def bought(lane: Lane, usage: Usage, at: float = 100.0, ticket: int = 1) -> Entry:
    return Entry(ticket, -1, at, lane, EntryKind.PURCHASE, "anthropic", "c", "m", usage)


def test_credentials_are_apart_unless_they_share_a_workspace() -> None:
    alone, shared = caches(), caches("main")
    assert alone.scope("anthropic", "c") != alone.scope("anthropic", "d")
    assert alone.scope("anthropic", "c") != alone.scope("same", "c")
    assert shared.scope("anthropic", "c") == shared.scope("same", "d")
    assert shared.scope("anthropic", "c") != shared.scope("other", "c")


def test_what_one_credential_wrote_is_expected_by_no_other() -> None:
    known, usage = caches(), Usage(cache_write_5m_tokens=2000)
    known.answered(call(), bought(Lane.NOW, usage), 110.0)
    for credential in ("d", "c"):
        known.answered(
            call(credential), bought(Lane.NOW, Usage(cache_read_tokens=0, input_tokens=2000), at=150.0), 160.0
        )
        assert known._stats.cache_expected_tokens == (2000 if credential == "c" else 0)


def test_a_batch_is_followed_from_its_admission_to_its_end() -> None:
    known = caches()
    known.admitted(call(), 5)
    assert known.may_edit
    planned = known.edit_in_batch(5, BODY)
    assert planned is not None
    assert planned[1].body == BODY.replace(b'"ephemeral"', b'"ephemeral","ttl":"1h"')
    assert known.edits_of(5) == "1 mark for 1h"
    known.collected(5, 100.0, Usage(cache_write_1h_tokens=2000), 200.0)
    assert known.edits_of(5) == ""
    known.admitted(call(), 6)
    known.collected(6, 3000.0, Usage(cache_read_tokens=2000), 3100.0)
    assert known._stats.cache_expected_tokens == 2000  # an hour, not five minutes


def test_a_model_that_refused_is_not_edited_any_more() -> None:
    known = caches()
    known.admitted(call(), 5)
    assert not known.refused_in_batch(5, 400, REFUSAL)  # it was not edited yet
    known.edit_in_batch(5, BODY)
    assert not known.refused_in_batch(5, 400, b'{"error":{"message":"prompt is too long"}}')
    assert known.refused_in_batch(5, 400, REFUSAL)
    assert known.edit_in_batch(5, BODY) is None
    assert known.edit_in_batch(99, BODY) is None
