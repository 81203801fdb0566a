"""Faults, each with its own probability, and each on demand.

A fault's name says where and how: `create_accepted_cut` is a create that was accepted and then lost its connection.
The last word decides what the client sees: `cut` a reset connection, `hang` silence, `500` `529` `429` `404` an answer,
`429_bare` one without `retry-after`, `429_burst` one to everybody for a while, `garbage` a 200 that is not JSON.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields

from carpool.mock.core.errors import ApiError, ConnectionCut
from carpool.mock.core.fault_list import LENGTHS


@dataclass(frozen=True, slots=True)
class Faults:
    # Creating a batch, before anything was accepted.
    create_cut: float = 0.0
    create_hang: float = 0.0
    create_500: float = 0.0
    create_529: float = 0.0
    create_429: float = 0.0
    create_429_bare: float = 0.0
    create_slow: float = 0.0
    # Creating a batch that exists, although the client never learns it from this answer.
    create_accepted_cut: float = 0.0
    create_accepted_hang: float = 0.0
    create_accepted_500: float = 0.0
    create_accepted_529: float = 0.0
    # Uploading a file (OpenAI), before it was stored, and when it is although the client never learns its name.
    upload_cut: float = 0.0
    upload_hang: float = 0.0
    upload_500: float = 0.0
    upload_529: float = 0.0
    upload_429: float = 0.0
    upload_accepted_cut: float = 0.0
    upload_accepted_hang: float = 0.0
    upload_accepted_500: float = 0.0
    # Uploaded files (OpenAI): creates don't find them for a while.
    file_lag: float = 0.0
    delete_500: float = 0.0
    # Created batches.
    batch_stuck: float = 0.0
    batch_forgotten: float = 0.0  # later the provider denies it: 404, and in no list; it runs and is billed
    token_limit: float = 0.0  # OpenAI: it fails as if too many tokens were waiting
    list_lag: float = 0.0
    stranger: float = 0.0
    # Polling batches (retrieve and list).
    poll_cut: float = 0.0
    poll_hang: float = 0.0
    poll_500: float = 0.0
    poll_529: float = 0.0
    poll_429: float = 0.0
    poll_429_bare: float = 0.0
    poll_404: float = 0.0
    poll_garbage: float = 0.0
    # Cancelling.
    cancel_500: float = 0.0
    cancel_429: float = 0.0
    cancel_accepted_cut: float = 0.0
    cancel_accepted_500: float = 0.0
    cancel_slow: float = 0.0
    cancel_forgets: float = 0.0  # OpenAI: a billed line is not reported, and the counts are lost
    # Fetching results.
    results_cut: float = 0.0
    results_hang: float = 0.0
    results_500: float = 0.0
    results_429: float = 0.0
    results_404: float = 0.0
    results_cut_midway: float = 0.0
    # Single lines, drawn per request when its batch is created. All but the last three were bought.
    line_missing: float = 0.0
    line_duplicate: float = 0.0
    line_unknown: float = 0.0
    line_malformed: float = 0.0
    line_api_error: float = 0.0
    line_overloaded: float = 0.0
    line_expired: float = 0.0
    # Synchronous calls, before acceptance.
    sync_cut: float = 0.0
    sync_500: float = 0.0
    sync_529: float = 0.0
    sync_429: float = 0.0
    sync_429_bare: float = 0.0
    sync_429_burst: float = 0.0
    flex_429: float = 0.0  # OpenAI: no capacity in the flex tier
    # Synchronous calls that were processed and are billed.
    sync_accepted_cut: float = 0.0
    sync_accepted_hang: float = 0.0
    sync_cut_midway: float = 0.0
    sync_stream_error: float = 0.0
    # Webhooks (OpenAI).
    hook_lost: float = 0.0
    hook_double: float = 0.0
    hook_late: float = 0.0
    # Durations and amounts.
    hang_s: float = 3600.0
    retry_after_s: int = 1
    burst_s: float = 2.0
    create_slow_s: float = 1.0
    stuck_s: float = float("inf")
    forget_after_s: float = 0.0
    forgotten_s: float = float("inf")
    list_lag_s: float = 5.0
    file_lag_s: float = 5.0
    hook_late_s: float = 60.0
    cancel_slow_s: float = 60.0
    clock_offset_s: float = 0.0


NAMES = tuple(field.name for field in fields(Faults) if field.name not in LENGTHS)
LINE_FAULTS = tuple(name for name in NAMES if name.startswith("line_"))


class FaultBox:
    """Decides at each occasion whether a fault occurs: a scripted one first, else by its probability."""

    def __init__(self, faults: Faults, rng: random.Random) -> None:
        self.faults = faults
        self.struck: Counter[str] = Counter()
        self._rng = rng
        self._scripted: Counter[str] = Counter()

    def script(self, name: str, times: int = 1) -> None:
        if name not in NAMES:
            raise ValueError(f"there is no fault {name!r}; known are {', '.join(NAMES)}")
        self._scripted[name] += times

    def roll(self, name: str) -> bool:
        if self._scripted[name]:
            self._scripted[name] -= 1
            self.struck[name] += 1
            return True
        chance: float = getattr(self.faults, name)
        # Without a probability nothing is drawn, so that one fault's setting does not affect another's random numbers.
        struck = chance > 0 and self._rng.random() < chance
        self.struck[name] += struck
        return struck

    def possible(self, name: str) -> bool:
        return bool(self._scripted[name] or getattr(self.faults, name))

    async def strike(self, names: Iterable[str], accepted: bool) -> None:
        """Raises the first of the faults `names` that occurs; returns if none does."""
        for name in names:
            if self.roll(name):
                await self._fail(name, accepted)

    async def _fail(self, name: str, accepted: bool) -> None:
        if name.endswith("_hang"):
            await asyncio.sleep(self.faults.hang_s)
            raise ConnectionCut(accepted)
        if name.endswith("_cut"):
            raise ConnectionCut(accepted)
        if name.endswith("_429"):
            headers = {"retry-after": str(self.faults.retry_after_s)}
            raise ApiError("rate_limit_error", "This request would exceed your rate limit.", headers)
        if name.endswith("_429_bare"):
            raise ApiError("rate_limit_error", "This request would exceed your rate limit.")
        if name.endswith("_404"):
            raise ApiError("not_found_error", "Not found")
        if name.endswith("_529"):
            raise ApiError("overloaded_error", "Overloaded")
        raise ApiError("api_error", "Internal server error")


BEFORE_CREATE = ("create_cut", "create_hang", "create_500", "create_529", "create_429", "create_429_bare")
AFTER_CREATE = ("create_accepted_cut", "create_accepted_hang", "create_accepted_500", "create_accepted_529")
BEFORE_UPLOAD = ("upload_cut", "upload_hang", "upload_500", "upload_529", "upload_429")
AFTER_UPLOAD = ("upload_accepted_cut", "upload_accepted_hang", "upload_accepted_500")
POLL = ("poll_cut", "poll_hang", "poll_500", "poll_529", "poll_429", "poll_429_bare", "poll_404")
BEFORE_CANCEL = ("cancel_500", "cancel_429")
AFTER_CANCEL = ("cancel_accepted_cut", "cancel_accepted_500")
RESULTS = ("results_cut", "results_hang", "results_500", "results_429", "results_404")
BEFORE_SYNC = ("sync_cut", "sync_500", "sync_529", "sync_429", "sync_429_bare")
AFTER_SYNC = ("sync_accepted_cut", "sync_accepted_hang")
