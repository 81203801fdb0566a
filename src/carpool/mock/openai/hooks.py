"""Webhooks: signed events about ended batches, sent as Standard Webhooks requires, and retried until accepted."""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from carpool.mock.core.clock import Now
from carpool.mock.core.faults import FaultBox
from carpool.mock.openai.batch import OpenAIBatch
from carpool.mock.openai.config import OpenAIConfig
from carpool.mock.openai.post import post_over_http

Post = Callable[[str, Mapping[str, str], bytes], Awaitable[int]]
"""Posts a body to a URL and returns the status; OSError if there is no server."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One attempt to deliver an event; status 0 if there was no server."""

    at: float
    event_id: str
    type: str
    batch_id: str
    status: int


@dataclass(frozen=True, slots=True)
class _Event:
    id: str
    type: str
    batch_id: str
    body: bytes
    due: float


def sign(secret: str, event_id: str, stamp: int, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = hmac.digest(key, f"{event_id}.{stamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(signed).decode()}"


async def _sleep(stirred: asyncio.Event, seconds: float | None) -> None:
    """Until then, or until something changes."""
    try:
        async with asyncio.timeout(None if seconds is None else max(0.0, seconds)):
            await stirred.wait()
    except TimeoutError:
        return


class Hooks:
    def __init__(self, config: OpenAIConfig, box: FaultBox, rng: random.Random, now: Now) -> None:
        self.url = config.webhook_url
        self.secret = config.webhook_secret
        self.sent: list[Sent] = []
        self._config = config
        self._box = box
        self._rng = rng
        self._now = now
        self._waiting: list[_Event] = []
        self._wake: Callable[[], None] | None = None

    # -- events

    def announce(self, batch: OpenAIBatch) -> None:
        """A batch has ended."""
        if self.url is None or self._box.roll("hook_lost"):
            return
        event_id, kind = f"evt_{self._rng.getrandbits(96):024x}", f"batch.{batch.status}"
        created = int(batch.ends_at + batch.clock_offset)
        said = {"id": event_id, "object": "event", "type": kind, "created_at": created, "data": {"id": batch.id}}
        due = batch.ends_at + self._config.webhook_latency.draw(self._rng)
        if self._box.roll("hook_late"):
            due += self._box.faults.hook_late_s
        event = _Event(event_id, kind, batch.id, msgspec.json.encode(said), due)
        self._waiting += [event, event] if self._box.roll("hook_double") else [event]
        self.stir()

    def stir(self) -> None:
        """Something has changed, perhaps in another thread: wakes the delivery loop."""
        if self._wake is not None:
            self._wake()

    # -- delivery

    async def carry(self, advance: Callable[[], float | None], post: Post = post_over_http) -> None:
        """Delivers for ever. `advance` advances to the current time, and returns when it is needed next."""
        loop, stirred = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(stirred.set)

        self._wake = wake
        try:
            async with asyncio.TaskGroup() as deliveries:
                while True:
                    stirred.clear()
                    next_end = advance() if self.url is not None else None
                    now = self._now()
                    for event in [event for event in self._waiting if event.due <= now]:
                        self._waiting.remove(event)
                        deliveries.create_task(self._deliver(event, post))
                    times = [event.due for event in self._waiting] + ([] if next_end is None else [next_end])
                    await _sleep(stirred, min(times) - now if times else None)
        finally:
            self._wake = None

    async def _deliver(self, event: _Event, post: Post) -> None:
        wait = self._config.webhook_backoff_s
        for _ in range(self._config.webhook_attempts):
            status = await self._try(event, post)
            if 200 <= status < 300:
                return
            await asyncio.sleep(wait)
            wait *= 2

    async def _try(self, event: _Event, post: Post) -> int:
        if self.url is None:
            return 200  # the recipient is gone
        stamp = int(self._now() + self._box.faults.clock_offset_s)
        headers = {
            "content-type": "application/json",
            "user-agent": "OpenAI/1.0 (+https://platform.openai.com/docs/webhooks)",
            "webhook-id": event.id,
            "webhook-timestamp": str(stamp),
            "webhook-signature": sign(self.secret, event.id, stamp, event.body),
        }
        try:
            status = await post(self.url, headers, event.body)
        except (OSError, ValueError):  # no server, or not an HTTP server
            status = 0
        self.sent.append(Sent(self._now(), event.id, event.type, event.batch_id, status))
        return status
