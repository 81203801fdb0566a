"""Random operations on SQLite and PostgreSQL: every answer must be the same, and what stands afterwards too."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from carpool.core.errors import CarpoolError
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import CallRow, EntryKind, Intent, Lane, Settlement
from carpool.core.ports import Store
from carpool.stores import SqliteStore
from carpool.stores.postgres import PostgresStore
from tests.support.postgres import swept_url
from tests.support.stores import CRED, LEASE, ME, OTHER, STRANGER, T0, admission, attempt, entry, outcome

SEED = int(os.environ.get("CARPOOL_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
STEPS = 400
CREDENTIALS = [CRED, STRANGER]
ENGINES = [ME, OTHER, "engine-3"]
ACCOUNTS = ["account-a", "account-b"]
TEXTS = ["", "plain", "ünïcödé", "\x01p marked", 'quo\'te "s" \\ %s :name ?', "line\nbreak", "x" * 5000]

Asked = tuple[str, tuple[Any, ...], dict[str, Any]]


@pytest.fixture
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Store, Store]]:
    """In the caller's thread, as the simulator drives them; one is encrypted where the test asks for it."""
    secret, sealed = b"a secret of the test", request.param == "sealed"
    both = (
        await SqliteStore.open(None, threaded=False, secret=secret),
        await PostgresStore.open(swept_url(), threaded=False, own_clock=False, secret=secret, encrypt=sealed),
    )
    yield both
    for one in both:
        await one.aclose()


class Dice:
    """Draws operations. What it draws depends on the seed and on what it drew before, never on an answer."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.now, self.tickets, self.batches = T0, 0, 0

    def operation(self) -> Asked:
        self.now += self._dice.choice((0.0, 0.5, 7.0))
        name = self._dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        asked = getattr(self, name)()
        return (name, asked[:-1], asked[-1]) if isinstance(asked[-1], dict) else (name, asked, {})

    def _one(self, *among: Any) -> Any:
        return self._dice.choice(among)

    def _ticket(self) -> int:
        return self._dice.randrange(1, self.tickets + 2)

    def _tickets(self) -> list[int]:
        return [self._ticket() for _ in range(self._dice.randrange(6))]

    def _batch(self) -> int:
        return self._dice.randrange(1, self.batches + 2)

    def _credentials(self) -> list[str]:
        return self._dice.sample([*CREDENTIALS, "never seen"], self._dice.randrange(4))

    def _engine(self) -> str:
        return str(self._one(*ENGINES))

    # engines

    def join(self) -> Any:
        return (self._engine(), self.now, LEASE, self._one(None, 30.0))

    def leave(self) -> Any:
        return (self._engine(),)

    def lead(self) -> Any:
        return (self._engine(), self._dice.sample(ACCOUNTS, self._dice.randrange(3)), self.now)

    def take_over(self) -> Any:
        return (self._engine(), self._credentials(), self.now)

    # calls

    def admit_all(self) -> Any:
        return ([self._admission() for _ in range(self._one(1, 1, 2, 3, 9))],)

    def _admission(self) -> Any:
        self.tickets += 1
        return admission(
            self.tickets,
            fingerprint=self._one(*range(12), 2**64 - 1, self.tickets * 7919),
            credential=self._one(*CREDENTIALS),
            lane=self._one(Lane.BATCH, Lane.BATCH, Lane.NOW),
            awaiter=self._one(*ENGINES, None),
            rescue_at=self._one(None, self.now + self._dice.randrange(100)),
            deadline=self._one(None, self.now + 200),
            arrived=self.now,
            key=self._one(None, None, None, f"key-{self._dice.randrange(8)}", TEXTS[4], TEXTS[6]),
            retry=self._dice.random() < 0.3,
            body=self._dice.randbytes(self._one(0, 1, 9, 3000)),
            model=self._one("m", "n"),
            reason=self._one(*TEXTS),
            tags=self._one(None, {"team": "ci", TEXTS[4]: TEXTS[2]}),
        )

    def await_ticket(self) -> Any:
        return (self._ticket(), self._one(None, *ENGINES))

    def stop_awaiting(self) -> Any:
        return (self._ticket(), self._engine())

    def delivered(self) -> Any:
        return (self._tickets(), self.now)

    def cancel(self) -> Any:
        return (self._ticket(), outcome("cancelled", at=self.now))

    def start_sending(self) -> Any:
        kind = self._one(EntryKind.PURCHASE, EntryKind.RESCUE)
        return (attempt(self._ticket(), self._one(1, 2, 3), kind), self._engine(), self.now)

    def stop_sending(self) -> Any:
        return (self._ticket(),)

    # batches

    def intend(self) -> Any:
        self.batches += 1  # perhaps
        limits = (self._dice.randrange(8), self._one(0, 10, 5000, 10**9))
        account = self._one(None, None, *ACCOUNTS)
        return (Intent(self._one(1, 2, 3, 4), f"nonce-{self.batches}", *limits, self._engine(), self.now, account),)

    def move(self) -> Any:
        target = self._one(*BatchState, BatchState.OPEN, BatchState.ENDED)
        changes = self._one({}, {"note": self._one(*TEXTS), "sent_at": self.now, "abandoned": True, "expires_at": None})
        changes = changes | ({"provider_id": f"p-{self._batch()}"} if target is BatchState.OPEN else {})
        return (self._batch(), target, changes)

    def annotate(self) -> Any:
        return (self._batch(), {"note": self._one(*TEXTS), "clock_offset": self._dice.random()})

    def release(self) -> Any:
        return (self._batch(), self._one(*BatchState), self._one(Lane.NOW, Lane.BATCH), self.now, self._one(*TEXTS))

    def suspect(self) -> Any:
        return (self._batch(), f"p-{self._batch()}", self._one("watched", "stranger"))

    def tidy(self) -> Any:
        return (self._batch(), self._ticket(), self._one(1, 3, 1000))

    # settling and books

    def settle(self) -> Any:
        return ([self._settlement() for _ in range(self._one(1, 2, 5, 12))], self.now)

    def _settlement(self) -> Settlement:
        ticket = self._ticket()
        purchase = self._one(self._batch(), -1, -2)
        line = entry(
            ticket,
            purchase,
            kind=self._one(EntryKind.PURCHASE, EntryKind.RESCUE),
            paid=self._one(None, 3, 2**40),
            would=self._one(None, 7),
            tags=self._one(None, {"a": "b"}),
            credential=self._one(*CREDENTIALS),
            at=self.now,
        )
        if self._dice.random() < 0.6:
            return Settlement(ticket, outcome(self._one(*TEXTS) or "\0"), self._one(None, line, line))
        return Settlement(ticket, None, self._one(None, line), self._one(None, Lane.NOW, Lane.BATCH), self._one(*TEXTS))

    def record(self) -> Any:
        return (entry(self._ticket() + 10**6, -1, paid=self._one(None, 5), credential=self._one(*CREDENTIALS)),)

    def remember(self) -> Any:
        return (self._one("k", "l"), self._one(*TEXTS[1:6]), self._one(*TEXTS), self.now)

    def retain(self) -> Any:
        return (self.now - self._dice.randrange(100), self.now - self._dice.randrange(300), self._one(1, 5, 10_000))


WEIGHTS = {"admit_all": 10, "settle": 7, "intend": 5, "move": 6, "start_sending": 4, "await_ticket": 4, "delivered": 3}
WEIGHTS |= {"cancel": 1, "stop_sending": 2, "release": 2, "take_over": 2, "join": 3, "leave": 1, "retain": 1, "lead": 2}
WEIGHTS |= {"stop_awaiting": 2, "suspect": 1, "annotate": 1, "tidy": 1, "record": 1, "remember": 1}


async def _answer(store: Store, asked: Asked) -> object:
    name, arguments, more = asked
    try:
        return _comparable(await getattr(store, name)(*arguments, **more))
    except CarpoolError as error:
        return type(error)


def _comparable(answer: Any) -> object:
    if isinstance(answer, list):
        return [type(one) if isinstance(one, CarpoolError) else one for one in answer]
    return answer


def _row(one: CallRow) -> CallRow:
    """That somebody dead once awaited what is settled and delivered is remembered by SQLite only, and means nothing."""
    return replace(one, awaited=False) if one.delivered_at is not None else one


async def _standing(store: Store, dice: Dice) -> dict[str, object]:
    """Everything that a store can be asked."""
    tickets = range(1, dice.tickets + 1)
    found: dict[str, object] = {
        "views": await store.views(tickets),
        "outcomes": await store.outcomes(tickets),
        "pools": sorted(await store.pools(CREDENTIALS), key=lambda view: view.pool),
        "due": await store.due(CREDENTIALS, dice.now + 50, 10_000),
        "due to one": await store.due(CREDENTIALS, dice.now + 50, 3, ME),
        "next": [await store.next_due(CREDENTIALS), await store.next_due([CRED], OTHER)],
        "counts": {name: count for name, count in (await store.counts()).items() if count},
        "totals": [await store.totals(), await store.totals([CRED]), await store.totals([])],
        "leaders": await store.leaders(dice.now),
        "memory": [await store.recall("k"), await store.recall("l")],
        "known": [await store.known_provider_ids(one) for one in CREDENTIALS],
        "calls": [_row(one) for one in await store.listed_calls(None, None, 10_000)],
        "own calls": await store.listed_calls(dice.tickets, TicketState.QUEUED, 5, [CRED]),
        "settled": [_row(one) for one in await store.listed_calls(None, TicketState.SETTLED, 7)],
        "batches": await store.listed_batches(None, None, 10_000),
        "own batches": await store.listed_batches(None, BatchState.OPEN, 5, [CRED]),
    }
    for number in range(1, dice.batches + 1):
        found[f"batch {number}"] = [
            await store.batch(number),
            await store.open_calls(number),
            await store.suspects(number),
            await store.unmentioned(number, 0, 10),
            [line async for chunk in store.lines(number) for line in chunk],
        ]
    for ticket in tickets:
        found[f"call {ticket}"] = [
            await store.entries(ticket),
            await store.sendable_call(ticket),
            await store.attempts(ticket),
        ]
    return found


@pytest.mark.parametrize(("stores", "number"), [("plain", 0), ("sealed", 1)], indirect=["stores"])
async def test_two_databases_give_the_same_answers(stores: tuple[Store, Store], number: int) -> None:
    seed = SEED + number
    print(f"replay with CARPOOL_TEST_SEED={seed}")
    dice = Dice(seed)
    for step in range(STEPS):
        asked = dice.operation()
        first, second = [await _answer(store, asked) for store in stores]
        assert first == second, f"step {step}: {asked[0]}"
        if step % 100 == 99:
            left, right = [await _standing(store, dice) for store in stores]
            for what in left:
                assert left[what] == right[what], f"step {step}: {what}"
