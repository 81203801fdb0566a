"""Takes a batch in: checks the envelope, digests the members, draws their fate."""

from __future__ import annotations

import asyncio
import random
import re
from array import array
from collections.abc import Sequence

import msgspec

from carpool.mock.batch import FOREVER, Batch
from carpool.mock.config import MockConfig
from carpool.mock.digest import Digest, Failure, digest_or_failure
from carpool.mock.errors import invalid
from carpool.mock.faults import LINE_FAULTS, FaultBox

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_YIELD_EVERY = 1000


class _Member(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _Envelope(msgspec.Struct):
    requests: list[_Member]


_decoder = msgspec.json.Decoder(_Envelope)


def read_envelope(raw: bytearray, most: int) -> list[_Member]:
    """The members of a create; raises the 400 that an ill-formed one is answered with."""
    try:
        members = _decoder.decode(raw).requests
    except msgspec.ValidationError as error:
        raise invalid(f"requests: {error}") from error
    except msgspec.DecodeError as error:
        raise invalid(f"The request body is not valid JSON: {error}") from error
    if not members:
        raise invalid("requests: List should have at least 1 item")
    if len(members) > most:
        raise invalid(f"requests: List should have at most {most} items")
    seen: set[str] = set()
    for position, member in enumerate(members):
        if _CUSTOM_ID.fullmatch(member.custom_id) is None:
            raise invalid(f"requests.{position}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
        if member.custom_id in seen:
            raise invalid(f"requests.{position}.custom_id: duplicate custom_id {member.custom_id!r}")
        seen.add(member.custom_id)
    return members


async def digest_all(members: Sequence[_Member], mean_output: int) -> list[Digest | Failure]:
    """Digests every member, letting others run in between: a wide batch takes a second."""
    requests: list[Digest | Failure] = []
    for position, member in enumerate(members):
        if position % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        requests.append(digest_or_failure(member.params, mean_output))
    return requests


class Intake:
    """Makes batches. Everything random about a batch is drawn here, so that looking at it later changes nothing."""

    def __init__(self, config: MockConfig, rng: random.Random, box: FaultBox) -> None:
        self._config = config
        self._rng = rng
        self._box = box

    def make(
        self,
        workspace: str,
        credential: str,
        custom_ids: Sequence[str],
        requests: Sequence[Digest | Failure],
        now: float,
        stranger: bool = False,
    ) -> Batch:
        config, faults = self._config, self._box.faults
        starts, ends = self._draw_times(now, requests)
        batch = Batch(
            id=f"msgbatch_{self._rng.getrandbits(96):024x}",
            workspace=workspace,
            credential=credential,
            created=now,
            expires=now + config.expiry_s,
            archives=now + config.archive_s,
            seed=self._rng.getrandbits(64),
            custom_ids=custom_ids,
            requests=requests,
            starts=starts,
            ends=ends,
            line_faults=self._draw_line_faults(len(requests), stranger),
            unlucky=self._draw_unlucky(requests),
            listed_from=now + faults.list_lag_s if not stranger and self._box.roll("list_lag") else now,
            clock_offset=faults.clock_offset_s,
            stranger=stranger,
        )
        if not stranger and self._box.roll("batch_stuck"):
            batch.hold(now)
            if faults.stuck_s < FOREVER:
                batch.release(now + faults.stuck_s)
        return batch

    def _draw_times(self, now: float, requests: Sequence[Digest | Failure]) -> tuple[array[float], array[float]]:
        config, rng, count = self._config, self._rng, len(requests)
        if not config.per_request:
            end = now + config.batch_latency.draw(rng)
            start = max(now, end - config.batch_execution.draw(rng))
            return array("d", [start]) * count, array("d", [end]) * count
        ends = array("d", (now + config.batch_latency.draw(rng) for _ in range(count)))
        starts = array("d", (max(now, end - config.batch_execution.draw(rng)) for end in ends))
        return starts, ends

    def _draw_line_faults(self, count: int, stranger: bool) -> dict[str, frozenset[int]]:
        box = self._box
        return {
            name: frozenset(i for i in range(count) if box.roll(name))
            if not stranger and box.possible(name)
            else frozenset()
            for name in LINE_FAULTS
        }

    def _draw_unlucky(self, requests: Sequence[Digest | Failure]) -> frozenset[int]:
        rate = self._config.batch_cache_hit_rate
        if rate >= 1.0:
            return frozenset()
        planned = (i for i, request in enumerate(requests) if isinstance(request, Digest) and request.plan is not None)
        return frozenset(i for i in planned if self._rng.random() >= rate)
