"""Accepts a batch: checks the request, digests its members, draws their outcomes."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

import msgspec

from carpool.mock.anthropic.digest import Digest, Failure, digest_or_failure
from carpool.mock.anthropic.message_batch import MessageBatch
from carpool.mock.core.config import MockConfig
from carpool.mock.core.errors import invalid
from carpool.mock.core.fate import Fate
from carpool.mock.core.faults import FaultBox

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_YIELD_EVERY = 1000


class _Member(msgspec.Struct, gc=False):
    custom_id: str
    params: msgspec.Raw


class _Envelope(msgspec.Struct):
    requests: list[_Member]


_decoder = msgspec.json.Decoder(_Envelope)


def read_envelope(raw: bytearray, most: int) -> list[_Member]:
    """The members of a create; raises the 400 for a malformed one."""
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
    """Digests every member, yielding to the event loop in between: a large batch takes a second."""
    requests: list[Digest | Failure] = []
    for position, member in enumerate(members):
        if position % _YIELD_EVERY == 0:
            await asyncio.sleep(0)
        requests.append(digest_or_failure(member.params, mean_output))
    return requests


class Intake:
    """Creates a batch from the members."""

    def __init__(self, config: MockConfig, rng: random.Random, box: FaultBox) -> None:
        self._fate = Fate(config, rng, box)

    def make(
        self,
        workspace: str,
        credential: str,
        custom_ids: Sequence[str],
        requests: Sequence[Digest | Failure],
        now: float,
        stranger: bool = False,
    ) -> MessageBatch:
        fate, config = self._fate, self._fate.config
        starts, ends = fate.times(now, requests, config.batch_latency)
        batch = MessageBatch(
            id=f"msgbatch_{fate.rng.getrandbits(96):024x}",
            workspace=workspace,
            credential=credential,
            created=now,
            expires=now + config.expiry_s,
            archives=now + config.archive_s,
            seed=fate.rng.getrandbits(64),
            custom_ids=custom_ids,
            requests=requests,
            starts=starts,
            ends=ends,
            line_faults=fate.line_faults(len(requests), stranger),
            unlucky=self._draw_unlucky(requests),
            listed_from=fate.listed_from(now, stranger),
            clock_offset=fate.box.faults.clock_offset_s,
            stranger=stranger,
        )
        fate.may_stick(batch, now)
        fate.may_be_forgotten(batch, now)
        return batch

    def _draw_unlucky(self, requests: Sequence[Digest | Failure]) -> frozenset[int]:
        rate, rng = self._fate.config.batch_cache_hit_rate, self._fate.rng
        if rate >= 1.0:
            return frozenset()
        planned = (i for i, request in enumerate(requests) if isinstance(request, Digest) and request.plan is not None)
        return frozenset(i for i in planned if rng.random() >= rate)
