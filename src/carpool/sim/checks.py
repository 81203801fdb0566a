"""The promises, checked on what a run left behind. Each check says in sentences what is wrong; nothing means clean."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

import msgspec

from carpool.lifecycle import UNFINISHED
from carpool.mock import Charge, expected_text
from carpool.model import Entry, EntryKind, Lane, OutcomeKind, ticket_number, ticket_text
from carpool.sim.agents import Turn
from carpool.sim.world import World

LATE_S = 3.0
BLINDING = ("list_lag", "line_missing", "line_malformed", "line_unknown", "create_hang", "create_accepted_hang")

Check = Callable[["Books"], Iterable[str]]


class Books:
    """A world with its ledger and bill sorted by logical call."""

    def __init__(
        self, world: World, entries: dict[int, list[Entry]], counts: dict[str, int], abandoned: set[str]
    ) -> None:
        self.world = world
        self.entries = entries
        self.counts = counts
        self.abandoned = abandoned  # nonces of batches that were given up as unknown
        self.charges: dict[str, list[Charge]] = defaultdict(list)
        for charge in world.provider.bill.charges:
            self.charges[charge.fingerprint].append(charge)

    def of(self, turn: Turn) -> list[Entry]:
        return [entry for call in turn.calls for entry in self.entries.get(call.ticket, ())]


async def open_books(world: World) -> Books:
    tickets = {call.ticket for turn in world.turns for call in turn.calls}
    entries = {ticket: await world.store.entries(ticket) for ticket in tickets}
    given_up = [await world.store.batch(number) for process in world.processes for number in process.abandoned]
    nonces = {batch.nonce for batch in given_up if batch is not None}
    return Books(world, entries, dict(await world.store.counts()), nonces)


async def problems(world: World) -> list[str]:
    books = await open_books(world)
    return [sentence for check in CHECKS for sentence in check(books)]


def everybody_is_answered(books: Books) -> Iterable[str]:
    if books.world.stuck:
        yield f"The run got stuck: {books.world.stuck}."
    for turn in books.world.turns:
        if turn.reply is None:
            yield f"{_name(turn)} never got an answer. It was told: {turn.errors[-3:]}"


def replies_are_the_providers(books: Books) -> Iterable[str]:
    for turn in books.world.turns:
        outcome = turn.reply.outcome if turn.reply else None
        if outcome is None or outcome.kind is not OutcomeKind.SUCCEEDED:
            continue
        message = msgspec.json.decode(outcome.body)
        text = "".join(block.get("text", "") for block in message["content"])
        if "[tool]" not in turn.plan.text and text != expected_text(turn.body):
            yield f"{_name(turn)} got somebody else's answer: {text!r}."


def mistakes_come_back(books: Books) -> Iterable[str]:
    for turn in books.world.turns:
        if turn.reply and "[error:" in turn.plan.text and turn.reply.outcome.status not in (400, 502, 504):
            yield f"{_name(turn)} made a mistake and got {turn.reply.outcome.status} instead of its 400."


def ledger_is_the_bill(books: Books) -> Iterable[str]:
    """Every charge has its line, to the nano-dollar; an unknown line may stand for one charge or for none."""
    for turn in books.world.turns:
        entries, charges = books.of(turn), books.charges.pop(turn.fingerprint, [])
        known = Counter((e.lane is Lane.BATCH, e.paid) for e in entries if e.paid)
        billed = Counter((c.kind == "batch", c.nano_usd) for c in charges)
        for (batch, paid), times in (known - billed).items():
            yield f"{_name(turn)}: the ledger has {times} times {paid} (batch: {batch}) that nobody billed."
        unknown = sum(entry.paid is None for entry in entries)
        missing = billed - known
        if missing.total() > unknown:
            yield f"{_name(turn)}: billed {dict(missing)}, and only {unknown} purchases stand as unknown."
    for charges in books.charges.values():
        yield f"Something was bought that nobody asked for: {charges[0].custom_id} ({len(charges)} charges)."


def second_purchases_are_recorded(books: Books) -> Iterable[str]:
    for turn in books.world.turns:
        for call in turn.calls:
            entries = books.entries.get(call.ticket, ())
            plain = [entry for entry in entries if entry.kind is EntryKind.PURCHASE and entry.paid]
            if len(plain) > 1:
                yield f"{_name(turn)}: {ticket_text(call.ticket)} was bought {len(plain)} times as if for the first."


def nobody_buys_again_by_coming_back(books: Books) -> Iterable[str]:
    """Where it is certain who is dead, a client that comes back finds its ticket, and no second one is bought."""
    plan = books.world.plan
    if plan.engines > 1 or not all(crash.clean for crash in plan.crashes):
        return
    for turn in books.world.turns:
        tickets = {entry.ticket for entry in books.of(turn) if entry.lane is Lane.BATCH and entry.paid}
        if len(tickets) > 1:
            yield f"{_name(turn)} came back, and its call was bought under {len(tickets)} tickets."


def what_shows_itself_is_found(books: Books) -> Iterable[str]:
    """A create that was accepted is given up only where something kept its proof from us."""
    faults = books.world.plan.mock.faults
    hidden = (name for name in BLINDING if getattr(faults, name))
    if any(hidden) or books.world.plan.crashes:
        return
    for batch in books.world.provider.batches:
        if not batch.stranger and batch.custom_ids[0].partition("-")[0] in books.abandoned:
            yield f"Batch {batch.id} was ours and there to be seen, and was given up."


def no_call_is_in_two_live_batches(books: Books) -> Iterable[str]:
    rides: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for batch in books.world.provider.batches:
        if not batch.stranger:
            for custom_id in batch.custom_ids:
                nonce, _, ticket = custom_id.partition("-")
                rides[ticket].append((batch.created, batch.ends_at, nonce))
    for ticket, spans in rides.items():
        for (_, end, nonce), (start, _, other) in pairwise(sorted(spans)):
            if start < end and not {nonce, other} & books.abandoned:
                yield f"Ticket {ticket} was in two live batches, {nonce} and {other}, and neither was given up."


def nothing_mixes(books: Books) -> Iterable[str]:
    calls = {call.ticket: (turn, call) for turn in books.world.turns for call in turn.calls}
    for batch in books.world.provider.batches:
        if batch.stranger:
            continue
        riders = [calls[ticket_number(custom_id.partition("-")[2])] for custom_id in batch.custom_ids]
        if len({(call.credential, call.headers) for _, call in riders}) > 1:
            yield f"Batch {batch.id} mixes calls of different credentials, versions or betas."
        if any(turn.agent.key != batch.credential for turn, _ in riders):
            yield f"Batch {batch.id} was bought with somebody else's key."


def strangers_are_left_alone(books: Books) -> Iterable[str]:
    strangers = {batch.id for batch in books.world.provider.batches if batch.stranger}
    for batch_id in strangers.intersection(books.world.provider.canceled):
        yield f"A stranger's batch was cancelled: {batch_id}."


def deadlines_are_kept(books: Books) -> Iterable[str]:
    if not books.world.plan.calm:
        return
    for turn in books.world.turns:
        if turn.plan.budget is None or turn.interrupted or turn.reply is None:
            continue
        late = turn.answered_at - turn.asked_at - turn.plan.budget
        if late > LATE_S and turn.plan.budget > LATE_S:
            yield f"{_name(turn)} was {late:.1f} s late, and nothing in this world excuses that."


def nothing_is_left_over(books: Books) -> Iterable[str]:
    for name, count in books.counts.items():
        kind, _, state = name.partition(".")
        if count and (kind == "tickets" and state not in ("settled", "sending")):
            yield f"{count} tickets are left {state}."
        if count and kind == "batches" and state in UNFINISHED:
            yield f"{count} batches are left {state}."


def only_leaders_make_batches(books: Books) -> Iterable[str]:
    for process in books.world.processes:
        yield from process.usurped


def no_task_died(books: Books) -> Iterable[str]:
    for process in books.world.processes:
        if process.engine.failures:
            yield f"{process.engine.failures} background tasks of {process.name} failed."
        for reason in process.illegal:
            yield f"{process.name} tried a forbidden move. {reason}"


def _name(turn: Turn) -> str:
    return f"{turn.plan.text!r} ({', '.join(ticket_text(call.ticket) for call in turn.calls)})"


CHECKS: tuple[Check, ...] = (
    everybody_is_answered,
    replies_are_the_providers,
    mistakes_come_back,
    ledger_is_the_bill,
    second_purchases_are_recorded,
    nobody_buys_again_by_coming_back,
    what_shows_itself_is_found,
    no_call_is_in_two_live_batches,
    nothing_mixes,
    strangers_are_left_alone,
    deadlines_are_kept,
    nothing_is_left_over,
    only_leaders_make_batches,
    no_task_died,
)
