"""What the engine knows of the providers' prompt caches and of the conversations that use them, and what it changes in
requests for their sake.

A call that goes straight to `now` or `flex` carries the chain of its prompt until it is answered. A call on disk leaves
its chain here until its batch is collected. Of very many, of those that another process admitted, and after a restart,
the chain is not known: then the index does not hear of their prefixes, and they are sent as they came.

A body is edited right before it is sent. What is stored, and what tells that two calls are equal, is the client's body.
If the provider refuses an edited request in words that may mean the edit, it is sent once more as it came, and requests
to that model are not edited any more until carpool is started again.

Credentials are kept apart. Those of a provider with a `workspace` in the config are known to share one cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from carpool.core.bounded import BoundedMap
from carpool.core.model import CachePlan, CachingMode, Call, Entry, Lane, Usage
from carpool.core.ports import EditedBody
from carpool.core.upstream import Upstream
from carpool.engine.events import Stats
from carpool.planners.agents import Agents
from carpool.planners.caching.index import PrefixIndex, Surface
from carpool.planners.caching.plan import UNCHANGED, marked, plan_for
from carpool.planners.routing import Capabilities

MAX_WAITING = 10_000  # chains of calls on disk; that of a long conversation takes 5 KB
MAX_REFUSED = 1_000  # models


class EditedCall(NamedTuple):
    """A call whose body is edited, and what was changed."""

    call: Call
    edits: str


class _Waiting(Struct):
    """The prompt of a call on disk."""

    call: Call  # without its body
    edits: str = ""  # in the batch that it is in
    applied: CachePlan = UNCHANGED


class PromptCaches:
    may_edit = False  # whether there was a call for a batch that may be edited

    def __init__(self, upstreams: Mapping[str, Upstream], stats: Stats) -> None:
        self.index = PrefixIndex()
        self.agents = Agents()
        self.capabilities = Capabilities()
        self._upstreams = upstreams
        self._stats = stats
        self._waiting: BoundedMap[int, _Waiting] = BoundedMap(MAX_WAITING)
        self._refused: BoundedMap[tuple[str, str], None] = BoundedMap(MAX_REFUSED)  # provider and model
        self.scope = lru_cache(maxsize=8192)(self._scope_of)

    def _scope_of(self, provider: str, credential: str) -> int:
        upstream = self._upstreams[provider]
        whose = (upstream.base_url, upstream.workspace) if upstream.workspace else (provider, credential, "")
        return int.from_bytes(blake2b("\n".join(whose).encode(), digest_size=7).digest(), "big")

    # ------------------------------------------------------------ edits

    def plan(self, call: Call, lane: Lane) -> CachePlan:
        if call.caching is not CachingMode.PLAN or call.prompt is None:
            return UNCHANGED
        dialect = self._upstreams[call.provider].dialect
        if dialect.caching is None or (call.provider, call.model) in self._refused:
            return UNCHANGED
        return plan_for(call, lane, self.capabilities.of(call.provider, dialect, call.model).cacheable_tokens)

    def edited(self, call: Call, body: bytes) -> tuple[EditedCall, bytes] | None:
        """A call for `now` with the marks that it is sent with, and this body of it after the edits; None if nothing is
        to be changed."""
        plan, edits = self.plan(call, Lane.NOW), self._upstreams[call.provider].dialect.caching
        edited = None if plan == UNCHANGED or edits is None else edits.edited(body, plan)
        if edited is None or call.prompt is None:
            return None
        return EditedCall(replace(call, prompt=marked(call.prompt, plan)), edited.edits), edited.body

    def refused(self, call: Call, status: int, body: bytes) -> bool:
        """Whether an error may be due to the edits of a call. Then its model gets none any more."""
        edits = self._upstreams[call.provider].dialect.caching
        if edits is None or not edits.blamed(status, body):
            return False
        self._refused[call.provider, call.model] = None
        return True

    # ------------------------------------------------------------ conversations

    def asked(self, call: Call, tokens: int, lane: Lane | None, now: float) -> None:
        """A turn of a conversation has come, and goes to this lane; None if that says nothing of where it belongs."""
        if call.prompt is not None:
            conversation = (self.scope(call.provider, call.credential), call.prompt.conversation)
            self.agents.asked(conversation, call.agent, tokens, now)
            if lane is not None:
                self.agents.sent(conversation, in_batch=lane is Lane.BATCH)

    # ------------------------------------------------------------ calls in batches

    def admitted(self, call: Call, ticket: int) -> None:
        """A call is on disk, under this ticket."""
        if call.prompt is not None:
            self._waiting[ticket] = _Waiting(replace(call, body=b"", shape=None))
            self.may_edit |= call.caching is CachingMode.PLAN

    def edit_in_batch(self, ticket: int, body: bytes) -> tuple[CachePlan, EditedBody] | None:
        """A call's body as it goes into a batch; None if nothing is to be changed."""
        waiting = self._waiting.get(ticket)
        if waiting is None:
            return None
        waiting.edits, waiting.applied = "", UNCHANGED
        plan, edits = self.plan(waiting.call, Lane.BATCH), self._upstreams[waiting.call.provider].dialect.caching
        edited = None if plan == UNCHANGED or edits is None else edits.edited(body, plan)
        if edited is None:
            return None
        waiting.edits, waiting.applied = edited.edits, plan
        return plan, edited

    def refused_in_batch(self, ticket: int, status: int, body: bytes) -> bool:
        """Whether a call failed in its batch because of its edits, perhaps. It then has none any more."""
        waiting = self._waiting.get(ticket)
        return waiting is not None and bool(waiting.edits) and self.refused(waiting.call, status, body)

    def edits_of(self, ticket: int) -> str:
        """What was changed in a call that is in a batch."""
        waiting = self._waiting.get(ticket)
        return "" if waiting is None else waiting.edits

    # ------------------------------------------------------------ answers

    def answered(self, call: Call, entry: Entry, now: float) -> None:
        """A call was answered on `now` or `flex`."""
        waiting = self._waiting.pop(call.ticket, None) if call.prompt is None else None  # rescued
        self._answered(call if waiting is None else waiting.call, UNCHANGED, entry.lane, entry.at, entry.usage, now)

    def collected(self, ticket: int, sent: float, usage: Usage | None, now: float) -> None:
        """A call was answered in a batch that was sent at this time."""
        if (waiting := self._waiting.pop(ticket, None)) is not None:
            self._answered(waiting.call, waiting.applied, Lane.BATCH, sent, usage, now)

    def _answered(
        self, call: Call, plan: CachePlan, lane: Lane, started: float, usage: Usage | None, now: float
    ) -> None:
        if usage is None or call.prompt is None:
            return
        scope = self.scope(call.provider, call.credential)
        seconds = now - started if lane is Lane.NOW else None
        self.agents.answered((scope, call.prompt.conversation), usage.output_tokens, now, seconds)
        prompt = call.prompt if plan is UNCHANGED else marked(call.prompt, plan)
        surface = Surface.BATCH if lane is Lane.BATCH else Surface.SYNCHRONOUS
        expected = self.index.lookup(scope, prompt, surface, started)
        self._stats.cache_expected_tokens += 0 if expected is None else expected.tokens
        self._stats.cache_read_tokens += usage.cache_read_tokens
        dialect = self._upstreams[call.provider].dialect
        least = self.capabilities.of(call.provider, dialect, call.model).cacheable_tokens or 0
        self.index.answered(scope, prompt, surface, started, usage, least)
