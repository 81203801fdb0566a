"""The record of calls: sizes, times and prefix hashes, from which one's own traffic can be replayed under other
policies.

Every call leaves one `CallShape`, on every lane; what was bought for it is in the ledger. A call that goes straight
to `now` or `flex` is recorded when its answer has ended, one that waits on disk when it is admitted. Shapes are written
together every few seconds, so a crash loses the last ones: they are statistics, and no call waits for them.

Nothing of a body is kept. The hashes of prefixes are keyed with the store's secret, so nobody without it can test a
guess of what was asked, and with the credential, so calls of two credentials never seem to share anything.
"""

from __future__ import annotations

import asyncio
import struct
from functools import lru_cache
from hashlib import blake2b

from msgspec.structs import replace

from carpool.core.errors import CarpoolError
from carpool.core.model import CachingMode, Call, CallShape, Entry, Lane, Prefixes, PromptChain
from carpool.core.ports import Dialect, Parsed
from carpool.engine.context import EngineContext

WRITE_S = 5.0  # what a crash may lose
GROUP = 1024  # shapes written earlier, if so many come
MOST_WAITING = 100_000  # shapes kept while the store can't be written; more are dropped
MOST_PER_S = 4_000_000  # bytes of bodies, of which every one is read
ANY_CALL = 5_000  # as many bytes could be read in the time that any call takes besides
_HASHES = 8192  # cached: nearly every root, and most parents, were met before
_NUMBERS = struct.Struct("<QIq")


class Sample:
    """Which calls are recorded, so that recording takes about one per cent of a process's time at most.

    Where more comes than `MOST_PER_S` allows, only one in 2, 4, 8, … conversations is recorded, and its calls stand for
    so many. Those recorded at one share are among those recorded at a larger one, so few conversations are cut. A call
    that belongs to no cached conversation is drawn by itself.
    """

    def __init__(self) -> None:
        self._weight = 1
        self._since = 0.0
        self._offered = 0
        self._taken = 0
        self._most = MOST_PER_S

    def weight(self, now: float, number: int, size: int) -> int:
        """How many calls this one stands for; 0 if it is not recorded. `number` is the same for all calls that should
        be recorded together."""
        if not 0 <= now - self._since < 1.0:
            self._weight = 1
            while self._weight * MOST_PER_S * max(1.0, now - self._since) < self._offered:
                self._weight *= 2
            self._since, self._offered, self._taken, self._most = now, 0, 0, MOST_PER_S
        self._offered += size + ANY_CALL
        weight = self._weight
        if number & (weight - 1):
            return 0
        self._taken += size + ANY_CALL
        if self._taken > self._most:  # more comes than in the second before
            self._weight *= 2
            self._most += MOST_PER_S // 4
        return weight


class CallRecorder:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._records = context.policy.record_calls
        self._caching = CachingMode(context.policy.caching)
        self._key = context.keyring.derived("prefixes of prompts")
        self._hash = lru_cache(maxsize=_HASHES)(self._keyed_hash)
        self._sample = Sample()
        self._shapes: list[CallShape] = []
        self._writing: asyncio.Task[None] | None = None

    def described(self, dialect: Dialect, parsed: Parsed, call: Call, client: str) -> Call:
        """A call that has just arrived from this kind of client, with the shape to be recorded and the chain of its
        prompt. To read the whole prompt takes time, so of calls that go straight to `now` only the sample has a chain.
        """
        size = len(call.body)
        weight = self._sample.weight(
            call.arrived, call.ticket if call.conversation is None else call.conversation, size
        )
        mode = call.caching or self._caching
        waits = call.deadline is not None or call.task_terms is not None or call.lane not in (None, Lane.NOW)
        follows = mode is not CachingMode.OFF and (weight or waits or mode is CachingMode.PLAN)
        if not follows and not (weight and self._records):
            return call
        prompt = dialect.prompt_chain(parsed)
        if not weight or not self._records:
            return replace(call, prompt=prompt, caching=mode)
        asked = client, call.stream, parsed.tool_turn, call.deadline, call.max_output_tokens, size
        prefixes = None if prompt is None else self._prefixes(prompt, call)
        shape = CallShape(call.ticket, call.arrived, *asked, prefixes, weight=weight)
        return replace(call, shape=shape, prompt=prompt if follows else None, caching=mode)

    def _prefixes(self, prompt: PromptChain, call: Call) -> Prefixes:
        whose, positions, size = (call.credential, call.endpoint), prompt.positions, prompt.size
        root = self._hash(whose, 0, positions[prompt.root])
        parent = None if prompt.parent is None else self._hash(whose, root, positions[prompt.parent])
        parent_bytes = 0 if prompt.parent is None else size(prompt.parent)
        end = self._hash(whose, root, positions[-1])
        return Prefixes(root, size(prompt.root), parent, parent_bytes, end, size(-1))

    def _keyed_hash(self, whose: tuple[str, str], root: int, position: int) -> int:
        """63 bits, which every database can store."""
        text = "\n".join(whose).encode() + _NUMBERS.pack(root, position & 0xFFFFFFFF, position >> 32)
        return int.from_bytes(blake2b(text, digest_size=8, key=self._key).digest(), "big") >> 1

    def admitted(self, shape: CallShape | None) -> None:
        """A call is on disk, under its own ticket."""
        if shape is not None:
            self._add(shape)

    def answered(self, shape: CallShape, entry: Entry, *, whole: bool) -> None:
        """The answer to a call that is not on disk has ended. Unless it is `whole`, its time says nothing."""
        self._add(replace(shape, seconds=self._context.now() - entry.at) if whole else shape)

    def _add(self, shape: CallShape) -> None:
        self._shapes.append(shape)
        if self._writing is None:
            self._writing = self._context.background.spawn(self._write_later(), "record")
        if len(self._shapes) % GROUP == 0:
            self._context.background.spawn(self.flush(), "record")

    async def _write_later(self) -> None:
        while self._shapes:
            await self._context.clock.sleep(WRITE_S)
            await asyncio.shield(self._context.background.spawn(self.flush(), "record"))  # see `close`
        self._writing = None

    async def close(self) -> None:
        """Writes the rest at once, instead of when it would be due."""
        if self._writing is not None:
            self._writing.cancel()
        await self.flush()

    async def flush(self) -> None:
        """Writes what has come so far. What the store does not take now is tried again."""
        shapes, self._shapes = self._shapes, []
        try:
            if shapes:
                await self._context.store.record_shapes(shapes)
        except CarpoolError as error:
            self._context.trouble("recording calls", error)
            self._shapes = [*shapes, *self._shapes][:MOST_WAITING]
