"""Check the guarantees on the final state of a run. Each check yields a sentence per violation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise

from carpool.core.bounded import backoff
from carpool.core.lifecycle import UNFINISHED
from carpool.core.model import Batch as Row
from carpool.core.model import (
    Entry,
    EntryKind,
    Lane,
    Outcome,
    OutcomeKind,
    RecordedPurchase,
    ticket_number,
    ticket_text,
)
from carpool.dialects.headers import retry_after
from carpool.engine import Reply
from carpool.mock import Batch, Charge, OpenAIBatch
from carpool.sim.agents import SimTurn
from carpool.sim.requests import is_its_answer, names
from carpool.sim.world import World

MAX_BATCHES = 100_000  # per world
LATE_S = 3.0
SLOWEST_SYNC_S = 5.0  # for a turn on `now`, where nothing fails
FIRST_PAUSE_S = 0.625  # longest pause before the first retry; doubles with each further one
LONGEST_PAUSE_S = 37.5
# Faults that may leave a batch purchase or its response unknown.
UNCLEAR_CREATES = ("cut", "hang", "500", "529", "accepted_cut", "accepted_hang", "accepted_500", "accepted_529")
DENYING = ("batch_forgotten", "poll_404", "results_404")
DOUBTFUL = (
    *(f"create_{name}" for name in UNCLEAR_CREATES),
    "line_missing",
    "line_malformed",
    "cancel_forgets",
    *DENYING,
)
HIDING = (
    "list_lag",
    "line_missing",
    "line_malformed",
    "line_unknown",
    "create_hang",
    "create_accepted_hang",
    *DENYING,
)

Check = Callable[["RunRecords"], Iterable[str]]


class RunRecords:
    """A world with its ledger and bill grouped by logical call."""

    def __init__(
        self,
        world: World,
        entries: dict[int, list[Entry]],
        outcomes: dict[int, Outcome],
        counts: dict[str, int],
        abandoned: dict[str, Row],
        recorded: list[RecordedPurchase],
    ) -> None:
        self.world = world
        self.entries = entries
        self.outcomes = outcomes  # in the store
        self.counts = counts
        self.abandoned = abandoned  # abandoned batches, by nonce
        self.recorded = recorded  # what the record of calls has, with the ledger
        self.charges: dict[tuple[str, str], list[Charge]] = defaultdict(list)  # by provider and fingerprint
        for name, provider in world.providers.items():
            for charge in provider.bill.charges:
                self.charges[name, charge.fingerprint].append(charge)

    @property
    def batches(self) -> Iterable[tuple[str, Batch]]:
        """Every batch of this fleet, with the name of its provider."""
        for name, provider in self.world.providers.items():
            yield from ((name, batch) for batch in provider.batches if not batch.stranger)

    def billed(self, turn: SimTurn) -> Counter[tuple[Lane, int]]:
        """The provider's charges for a turn by lane. Each charge is counted once."""
        found: Counter[tuple[Lane, int]] = Counter()
        for fingerprint, flex in names(turn.plan, turn.body):
            for charge in self.charges.pop((turn.agent.provider, fingerprint), ()):
                if not charge.nano_usd:
                    continue  # moderations are free
                sync = Lane.FLEX if flex else Lane.NOW
                found[Lane.BATCH if charge.kind == "batch" else sync, charge.nano_usd] += 1
        return found

    def of(self, turn: SimTurn) -> list[Entry]:
        return [entry for call in turn.calls for entry in self.entries.get(call.ticket, ())]


async def read_records(world: World) -> RunRecords:
    tickets = {call.ticket for turn in world.turns for call in turn.calls}
    entries = {ticket: await world.store.entries(ticket) for ticket in tickets}
    made = await world.store.listed_batches(None, None, MAX_BATCHES)
    abandoned = {batch.nonce: batch for batch in made if batch.abandoned}
    outcomes = {settled.ticket: settled.outcome for settled in await world.store.outcomes(sorted(tickets))}
    recorded: list[RecordedPurchase] = []
    page = await world.store.shapes(0.0, 0)
    while page is not None:
        recorded += page[1]
        page = await world.store.shapes(0.0, page[0])
    return RunRecords(world, entries, outcomes, dict(await world.store.counts()), abandoned, recorded)


async def problems(world: World) -> list[str]:
    records = await read_records(world)
    return [sentence for check in CHECKS for sentence in check(records)]


def everybody_is_answered(records: RunRecords) -> Iterable[str]:
    if records.world.stuck:
        yield f"The run got stuck: {records.world.stuck}."
    for turn in records.world.turns:
        if turn.reply is None and not turn.client_gave_up:
            yield f"{_name(turn)} never got an answer. It was told: {turn.errors[-3:]}"


def replies_are_the_providers(records: RunRecords) -> Iterable[str]:
    for turn in records.world.turns:
        outcome = turn.reply.outcome if turn.reply else None
        if outcome is None or outcome.kind is not OutcomeKind.SUCCEEDED:
            continue
        if not is_its_answer(turn.plan, turn.body, outcome.body):
            yield f"{_name(turn)} got somebody else's answer: {outcome.body[:200]!r}."


def first_answers_stay(records: RunRecords) -> Iterable[str]:
    """A call is settled once; later results change nothing."""
    for turn in records.world.turns:
        kept = records.outcomes.get(turn.reply.ticket) if turn.reply else None
        if kept is not None and turn.reply and kept.body != turn.reply.outcome.body:
            yield f"{_name(turn)} got one answer, and the store keeps another: {kept.body[:200]!r}."
    settled = records.counts.get("tickets.settled", 0)
    if settled != len(records.outcomes):
        yield f"The store counts {settled} settled calls, and keeps {len(records.outcomes)} outcomes."


def mistakes_come_back(records: RunRecords) -> Iterable[str]:
    """A client's mistake returns as the provider's 400, unless the connection broke, or the deadline passed first."""
    for turn in records.world.turns:
        if turn.reply is None or "[error:" not in turn.plan.text or turn.reply.outcome.status in (400, 502, 504):
            continue
        if not _no_room_in_time(records, turn, turn.reply):
            yield f"{_name(turn)} made a mistake and got {turn.reply.outcome.status} instead of its 400."


def _no_room_in_time(records: RunRecords, turn: SimTurn, reply: Reply) -> bool:
    """Whether the deadline passed, or the reply is the provider's refusal with no time left for a retry."""
    path, words, outcome = turn.plan.endpoint, f'"{turn.plan.text}'.encode(), reply.outcome
    told = [status for (where, body), status in records.world.refused.items() if where == path and words in body]
    deadlines = [call.deadline for call in turn.calls if call.ticket == reply.ticket and call.deadline is not None]
    if not deadlines or not (outcome.status == 429 or outcome.status >= 500):
        return False
    if outcome.kind is OutcomeKind.DEADLINE:
        return outcome.at >= max(deadlines)
    tries = sum(entry.lane is not Lane.BATCH for entry in records.entries.get(reply.ticket, ()))
    pause = max(backoff(tries, FIRST_PAUSE_S, LONGEST_PAUSE_S), retry_after(outcome.headers) or 0.0)
    return told[-1:] == [outcome.status] and outcome.at + pause >= max(deadlines)


def ledger_is_the_bill(records: RunRecords) -> Iterable[str]:
    """Every charge has a ledger entry, exact to the nano-dollar; an unknown entry stands for one charge or none."""
    for turn in records.world.turns:
        entries, billed = records.of(turn), records.billed(turn)
        known = Counter((e.lane, e.paid) for e in entries if e.paid)
        for (lane, paid), times in (known - billed).items():
            yield f"{_name(turn)}: the ledger has {times} times {paid} (on {lane}) that nobody billed."
        unknown = sum(entry.paid is None for entry in entries)
        missing = billed - known
        if missing.total() > unknown:
            yield f"{_name(turn)}: billed {dict(missing)}, and only {unknown} purchases stand as unknown."
    for (provider, _), charges in records.charges.items():
        yield f"{provider} sold what nobody asked for: {charges[0].custom_id} ({len(charges)} charges)."


def second_purchases_are_recorded(records: RunRecords) -> Iterable[str]:
    for turn in records.world.turns:
        for call in turn.calls:
            entries = records.entries.get(call.ticket, ())
            plain = [entry for entry in entries if entry.kind is EntryKind.PURCHASE and entry.paid]
            if len(plain) > 1:
                yield f"{_name(turn)}: {ticket_text(call.ticket)} was bought {len(plain)} times as if for the first."


def nobody_buys_again_by_coming_back(records: RunRecords) -> Iterable[str]:
    """If it is certain which processes are dead, a client that returns without its full response finds its ticket,
    whenever and however often it disconnected, and nothing is bought twice."""
    plan = records.world.plan
    if plan.stops or not all(crash.clean for crash in plan.crashes):
        return
    for turn in records.world.turns:
        tickets = {entry.ticket for entry in records.of(turn) if entry.lane is Lane.BATCH and entry.paid}
        if len(tickets) > 1:
            yield f"{_name(turn)} came back, and its call was bought under {len(tickets)} tickets."


def what_shows_itself_is_found(records: RunRecords) -> Iterable[str]:
    """An accepted create is abandoned only if some fault hid its proof."""
    plan = records.world.plan
    for provider, batch in records.batches:
        faults = plan.mocks[provider].faults
        if plan.crashes or any(getattr(faults, name) for name in HIDING):
            continue
        if batch.custom_ids and batch.custom_ids[0].partition("-")[0] in records.abandoned:
            yield f"{provider}'s batch {batch.id} was ours and there to be seen, and was given up."


def what_was_never_sent_is_not_doubted(records: RunRecords) -> Iterable[str]:
    """A batch is abandoned as unknown only if its create may have been sent."""
    for nonce, batch in records.abandoned.items():
        if batch.unsent:
            yield f"Batch {nonce} was given up as unknown, and its create was never sent."


def doubts_have_a_cause(records: RunRecords) -> Iterable[str]:
    """The purchases of a batch are known and complete, unless some fault hides them."""
    plan = records.world.plan
    for turn in records.world.turns:
        faults = plan.mocks[turn.agent.provider].faults
        if plan.crashes or any(getattr(faults, name) for name in DOUBTFUL):
            continue
        # The usage is known, and only the price table lacks the model.
        if any(e.paid is None and e.usage is None and e.lane is Lane.BATCH for e in records.of(turn)):
            yield f"{_name(turn)}: a purchase in a batch stands as unknown, and nothing in this world hid it."
        if turn.reply is not None and turn.reply.outcome.kind is OutcomeKind.LOST:
            yield f"{_name(turn)} was told that its answer is lost, and nothing in this world lost it."


def no_call_is_in_two_live_batches(records: RunRecords) -> Iterable[str]:
    rides: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for _, batch in records.batches:
        for custom_id in batch.custom_ids:
            nonce, _, ticket = custom_id.partition("-")
            rides[ticket].append((batch.created, batch.ends_at, nonce))
    for ticket, spans in rides.items():
        for (_, end, nonce), (start, _, other) in pairwise(sorted(spans)):
            if start < end and not {nonce, other} & records.abandoned.keys():
                yield f"Ticket {ticket} was in two live batches, {nonce} and {other}, and neither was given up."


def nothing_mixes(records: RunRecords) -> Iterable[str]:
    calls = {call.ticket: (turn, call) for turn in records.world.turns for call in turn.calls}
    for provider, batch in records.batches:
        riders = [calls[ticket_number(custom_id.partition("-")[2])] for custom_id in batch.custom_ids]
        if len({(call.credential, call.headers) for _, call in riders}) > 1:
            yield f"Batch {batch.id} mixes calls of different credentials, versions or betas."
        if any(turn.agent.key != batch.credential for turn, _ in riders):
            yield f"Batch {batch.id} was bought with somebody else's key."
        if any(turn.agent.provider != provider for turn, _ in riders):
            yield f"Batch {batch.id} was bought at {provider}, and some of its calls are another provider's."
        if isinstance(batch, OpenAIBatch) and len({(call.model, call.endpoint) for _, call in riders}) > 1:
            yield f"Batch {batch.id} mixes models or endpoints, which {provider} does not allow."


def files_are_flawless(records: RunRecords) -> Iterable[str]:
    """carpool's files are always valid; only a model may turn out not to be offered."""
    for provider, batch in records.batches:
        flaw = batch.flaw if isinstance(batch, OpenAIBatch) else None
        if flaw is not None and flaw["code"] != "model_not_found":
            yield f"{provider} could not read the file of batch {batch.id}: {flaw['message']}"


def strangers_are_left_alone(records: RunRecords) -> Iterable[str]:
    for name, provider in records.world.providers.items():
        strangers = [batch for batch in provider.batches if batch.stranger]
        for batch in strangers:
            if batch.id in provider.canceled:
                yield f"A stranger's batch was cancelled at {name}: {batch.id}."
            left = (batch.output_file_id, batch.error_file_id) if isinstance(batch, OpenAIBatch) else ()
            for file_id in {file_id for file_id in left if file_id}.difference(provider.files):
                yield f"A stranger's file was deleted at {name}: {file_id}."


def deadlines_are_kept(records: RunRecords) -> Iterable[str]:
    if not records.world.plan.fault_free:
        return
    for turn in records.world.turns:
        if turn.plan.budget is None or turn.interrupted or turn.reply is None:
            continue
        late = turn.answered_at - turn.asked_at - turn.plan.budget
        if late > LATE_S and turn.plan.budget > LATE_S:
            yield f"{_name(turn)} was {late:.1f} s late, and nothing in this world excuses that."


def tasks_are_kept(records: RunRecords) -> Iterable[str]:
    """A task that fits on `now` is done in time, whatever its batches do; a turn that is asked too late is told so."""
    if not records.world.plan.fault_free:
        return
    tasks: dict[str, list[SimTurn]] = defaultdict(list)
    for turn in records.world.turns:
        if turn.agent.task_budget is not None:
            tasks[turn.agent.name].append(turn)
    for name, turns in tasks.items():
        if any(turn.interrupted or turn.reply is None for turn in turns):
            continue
        agent, begun = turns[0].agent, turns[0].asked_at
        deadline = begun + (agent.task_budget or 0.0)
        needed = sum(turn.plan.pause + SLOWEST_SYNC_S for turn in turns)
        if turns[-1].answered_at > deadline + LATE_S and begun + needed < deadline:
            yield f"The task {name} was {turns[-1].answered_at - deadline:.1f} s late, and it fits on now."
        for turn in turns:
            reason = turn.reply.reason if turn.reply is not None else ""
            if turn.asked_at > deadline + LATE_S and "past its deadline" not in reason:
                yield f"{_name(turn)} was asked after its task's deadline, and was told only: {reason}"


def missed_deadlines_have_a_reason(records: RunRecords) -> Iterable[str]:
    for turn in records.world.turns:
        outcome = turn.reply.outcome if turn.reply else None
        if outcome is not None and outcome.kind is OutcomeKind.DEADLINE and not outcome.reason:
            yield f"{_name(turn)} missed its deadline, and nobody says why."


def nothing_is_left_over(records: RunRecords) -> Iterable[str]:
    for name, count in records.counts.items():
        kind, _, state = name.partition(".")
        if count and (kind == "tickets" and state not in ("settled", "sending")):
            yield f"{count} tickets are left {state}."
        if count and kind == "batches" and state in UNFINISHED:
            yield f"{count} batches are left {state}."


def only_leaders_make_batches(records: RunRecords) -> Iterable[str]:
    for process in records.world.processes:
        yield from process.without_lead


def purchases_are_recorded_once(records: RunRecords) -> Iterable[str]:
    """A crash may lose a record of calls, but nothing is in it twice, and it agrees with what was asked and bought."""
    tickets = {call.ticket: turn for turn in records.world.turns for call in turn.calls}
    times: Counter[tuple[int, int]] = Counter()
    for call, entry, answered in ((row.call, row.entry, row.answered) for row in records.recorded):
        turn = tickets.get(entry.ticket)
        if turn is None:  # its client never learned the ticket
            continue
        times[entry.ticket, entry.purchase] += 1
        if entry not in records.entries[entry.ticket]:
            yield f"{_name(turn)} is recorded with a purchase that the ledger lacks."
        if call.deadline is None and turn.plan.budget is not None:
            yield f"{_name(turn)} is recorded without its deadline."
        if answered is not None and answered < call.arrived:
            yield f"{_name(turn)} is recorded as answered before it came."
    yield from (f"{ticket_text(key[0])} is recorded {count} times." for key, count in times.items() if count > 1)


def no_task_died(records: RunRecords) -> Iterable[str]:
    for process in records.world.processes:
        if process.engine.failures:
            yield f"{process.engine.failures} background tasks of {process.name} failed."
        for reason in process.illegal:
            yield f"{process.name} tried a forbidden move. {reason}"


def _name(turn: SimTurn) -> str:
    return f"{turn.plan.text!r} ({', '.join(ticket_text(call.ticket) for call in turn.calls)})"


CHECKS: tuple[Check, ...] = (
    everybody_is_answered,
    replies_are_the_providers,
    first_answers_stay,
    mistakes_come_back,
    ledger_is_the_bill,
    second_purchases_are_recorded,
    nobody_buys_again_by_coming_back,
    what_shows_itself_is_found,
    what_was_never_sent_is_not_doubted,
    doubts_have_a_cause,
    no_call_is_in_two_live_batches,
    nothing_mixes,
    files_are_flawless,
    strangers_are_left_alone,
    deadlines_are_kept,
    tasks_are_kept,
    missed_deadlines_have_a_reason,
    nothing_is_left_over,
    only_leaders_make_batches,
    purchases_are_recorded_once,
    no_task_died,
)
