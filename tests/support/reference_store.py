"""The store's contract in plain Python: slow, in memory, and short enough to be believed.

Only what a random run needs. Where it and a store disagree, one of them does not do what the prose says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from carpool.core.errors import IllegalMove, KeyConflict
from carpool.core.lifecycle import UNFINISHED, BatchState, TicketState, check_batch_move
from carpool.core.model import Admission, Admitted, Entry, EntryKind, Intent, Lane, OpenCalls, Outcome, Settlement
from tests.support.stores import LEASE

OPEN = (TicketState.QUEUED, TicketState.BOARDED, TicketState.SENDING)


@dataclass
class PlainCall:
    admission: Admission
    state: TicketState
    lane: Lane
    awaiter: str | None
    rescue_at: float
    deadline: float | None
    batch: int | None = None
    requeues: int = 0
    outcome: Outcome | None = None
    winner: int | None = None
    settled_at: float = 0.0
    delivered_at: float | None = None
    sender: str | None = None


@dataclass
class PlainBatch:
    state: BatchState
    owner: str
    credential: str
    provider_id: str | None = None
    suspects: dict[str, str] = field(default_factory=dict)


@dataclass
class PlainStore:
    calls: dict[int, PlainCall] = field(default_factory=dict)
    batches: dict[int, PlainBatch] = field(default_factory=dict)
    entries: dict[tuple[int, int], Entry] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)

    # engines

    def join(self, engine: str, now: float) -> None:
        self.leases[engine] = now + LEASE

    def take_over(self, engine: str, credentials: list[str], now: float) -> int:
        live = {name for name, until in self.leases.items() if until >= now}
        dead = [
            batch
            for batch in self.batches.values()
            if batch.state in UNFINISHED and batch.owner not in live and batch.credential in credentials
        ]
        for batch in dead:
            batch.owner = engine
            batch.state = BatchState.UNKNOWN if batch.state is BatchState.SUBMITTING else batch.state
        for call in self.calls.values():
            behind = call.sender or call.awaiter
            if call.state is TicketState.SENDING and behind not in live:
                call.sender = None
                if self._unfinished(call.batch):
                    call.state = TicketState.BOARDED
                elif call.lane is Lane.BATCH:
                    call.state, call.batch = TicketState.QUEUED, None
            if call.awaiter not in live:
                call.awaiter = None
        return len(dead)

    def _unfinished(self, number: int | None) -> bool:
        return number is not None and self.batches[number].state in UNFINISHED

    # calls

    def admit(self, admission: Admission) -> Admitted:
        ticket = self._earlier(admission)
        if ticket is None:
            return self._fresh(admission)
        call = self.calls[ticket]
        call.awaiter = admission.awaiter or call.awaiter
        if call.state in OPEN:
            rescue_at = inf if admission.rescue_at is None else admission.rescue_at
            call.deadline = admission.call.deadline
            call.rescue_at = rescue_at if call.lane is Lane.BATCH else min(call.rescue_at, rescue_at)
        return Admitted(ticket, False, call.state, call.lane, call.deadline, call.outcome)

    def _earlier(self, admission: Admission) -> int | None:
        new = admission.call
        mine = {n: c for n, c in self.calls.items() if c.admission.call.credential == new.credential}
        if new.key is not None:
            for number, call in mine.items():
                if call.admission.call.key == new.key:
                    if call.admission.call.fingerprint != new.fingerprint:
                        raise KeyConflict
                    return number
            return None
        same = {n: c for n, c in mine.items() if c.admission.call.fingerprint == new.fingerprint}
        free = [n for n, c in same.items() if c.delivered_at is None and c.awaiter is None]
        if free:
            return min(free, key=lambda n: (same[n].admission.call.arrived, n))
        lately = [
            (c.delivered_at, n)
            for n, c in same.items()
            if c.delivered_at is not None and c.outcome and c.delivered_at >= new.arrived - 60
        ]
        return max(lately)[1] if lately and new.retry else None

    def _fresh(self, admission: Admission) -> Admitted:
        state = TicketState.QUEUED if admission.lane is Lane.BATCH else TicketState.SENDING
        rescue_at = inf if admission.rescue_at is None else admission.rescue_at
        call = admission.call
        self.calls[call.ticket] = PlainCall(
            admission, state, admission.lane, admission.awaiter, rescue_at, call.deadline
        )
        return Admitted(call.ticket, True, state, admission.lane, call.deadline)

    def delivered(self, ticket: int, now: float) -> None:
        if ticket in self.calls:
            self.calls[ticket].delivered_at, self.calls[ticket].awaiter = now, None

    def cancel(self, ticket: int, outcome: Outcome) -> bool:
        call = self.calls.get(ticket)
        if call is None or call.state is not TicketState.QUEUED:
            return False
        call.state, call.outcome, call.settled_at = TicketState.SETTLED, outcome, outcome.at
        call.delivered_at = 0.0  # nobody will come for it
        self.told.append(ticket)
        return True

    def waiting(self, credential: str) -> list[int]:
        """The calls that wait for a batch, the most pressing first."""
        found = [
            number
            for number, call in self.calls.items()
            if call.state is TicketState.QUEUED
            and call.lane is Lane.BATCH
            and call.admission.call.credential == credential
        ]
        return sorted(found, key=lambda n: (self.calls[n].rescue_at, self.calls[n].admission.call.arrived, n))

    def due(self, until: float) -> list[int]:
        found = [
            (call.rescue_at, number)
            for number, call in self.calls.items()
            if call.state in (TicketState.QUEUED, TicketState.BOARDED)
            and call.rescue_at <= until
            and (call.awaiter is not None or call.lane is Lane.NOW)
        ]
        return [number for _, number in sorted(found)]

    def start_sending(self, entry: Entry, engine: str, now: float) -> bool:
        call = self.calls.get(entry.ticket)
        if call is None or call.state is TicketState.SETTLED:
            return False
        if call.sender not in (None, engine) and self.leases.get(call.sender or "", -inf) >= now:
            return False
        call.state, call.sender = TicketState.SENDING, engine
        self._write(entry, late=False)
        return True

    def stop_sending(self, ticket: int) -> bool:
        call = self.calls.get(ticket)
        if call is None or call.state is not TicketState.SENDING or not self._unfinished(call.batch):
            return False
        call.state, call.sender = TicketState.BOARDED, None
        call.rescue_at = inf if call.deadline is None else call.deadline
        return True

    def retain(self, before: float, undelivered_before: float) -> int:
        gone = [
            number
            for number, call in self.calls.items()
            if call.state is TicketState.SETTLED
            and not self._unfinished(call.batch)
            and (
                call.settled_at < undelivered_before
                if call.delivered_at is None
                else max(call.delivered_at, call.settled_at) < before
            )
        ]
        for number in gone:
            del self.calls[number]
        return len(gone)

    # batches

    def claimable(self, intent: Intent, credential: str) -> list[int]:
        """The most pressing of those that wait; what is awaited and due travels on `now`."""
        calls = {ticket: self.calls[ticket] for ticket in self.waiting(credential)}
        claimed: list[int] = []
        total = 0
        for ticket in [n for n, c in calls.items() if c.awaiter is None or c.rescue_at > intent.at][: intent.max_count]:
            total += len(self.calls[ticket].admission.call.body)
            if claimed and total > intent.max_bytes:
                break
            claimed.append(ticket)
        return claimed

    def intend(self, intent: Intent, number: int, credential: str) -> list[int]:
        claimed = self.claimable(intent, credential)
        for ticket in claimed:
            self.calls[ticket].state, self.calls[ticket].batch = TicketState.BOARDED, number
        self.batches[number] = PlainBatch(BatchState.SUBMITTING, intent.owner, credential)
        return claimed

    def move(self, number: int, target: BatchState, **changes: str) -> None:
        if number not in self.batches:
            raise IllegalMove
        check_batch_move(self.batches[number].state, target)
        self.batches[number].state = target
        self.batches[number].provider_id = changes.get("provider_id", self.batches[number].provider_id)

    def release(self, number: int, target: BatchState, lane: Lane, now: float) -> int:
        self.move(number, target)
        aboard = [c for c in self.calls.values() if c.batch == number and c.state is TicketState.BOARDED]
        for call in aboard:
            self._queue(call, lane, now, counts=target is not BatchState.REFUSED)
        for call in self.calls.values():
            if call.batch == number and call.state is TicketState.SENDING:
                call.batch = None
        return len(aboard)

    def _queue(self, call: PlainCall, lane: Lane, now: float, counts: bool = True) -> None:
        call.requeues += counts and call.state is TicketState.BOARDED
        call.state, call.batch, call.lane = TicketState.QUEUED, None, lane
        if lane is not Lane.BATCH:
            call.rescue_at = min(call.rescue_at, now)

    def open_calls(self, number: int) -> OpenCalls:
        aboard = [c for c in self.calls.values() if c.batch == number and c.state in OPEN]
        pressed = [c.rescue_at for c in aboard if c.awaiter is not None and c.rescue_at < inf]
        return OpenCalls(len(aboard), len(aboard) - len(pressed), max(pressed, default=None))

    def unmentioned(self, number: int, after: int, limit: int) -> list[int]:
        aboard = sorted(ticket for ticket, call in self.calls.items() if call.batch == number)
        return [ticket for ticket in aboard if ticket > after and (ticket, number) not in self.entries][:limit]

    def known_provider_ids(self, credential: str) -> set[str]:
        mine = [batch.provider_id for batch in self.batches.values() if batch.credential == credential]
        return {name for name in mine if name is not None}

    # settling

    def settle(self, one: Settlement, now: float) -> bool:
        call = self.calls.get(one.ticket)
        won = one.outcome is not None and call is not None and call.state in OPEN
        if won and call is not None:
            call.state, call.outcome, call.settled_at = TicketState.SETTLED, one.outcome, now
            call.winner, call.sender = one.entry.purchase if one.entry else None, None
            self.told.append(one.ticket)
        elif one.requeue is not None and call is not None and call.state in OPEN:
            stale = one.entry is not None and one.entry.purchase > 0 and one.entry.purchase != call.batch
            if not stale and call.state is TicketState.SENDING:
                call.batch = None
            elif not stale:
                self._queue(call, one.requeue, now)
        if one.entry is not None:
            late = one.outcome is not None and (call is None or call.winner != one.entry.purchase)
            self._write(one.entry, late)
        return won

    def _write(self, entry: Entry, late: bool) -> None:
        identity = (entry.ticket, entry.purchase)
        standing = self.entries.get(identity)
        if standing is not None and standing.paid is not None:
            return
        kinds = {entry.kind} | ({standing.kind} if standing else set())
        kind = entry.kind
        if EntryKind.RESCUE in kinds:
            kind = EntryKind.RESCUE
        elif late or EntryKind.DUPLICATE in kinds:
            kind = EntryKind.DUPLICATE
        would = None if late else entry.would_have_paid
        self.entries[identity] = Entry(
            entry.ticket, entry.purchase, entry.at, entry.lane, kind, "", "", "", None, entry.paid, would
        )

    def bought(self, ticket: int) -> object:
        """What brought a ticket's outcome, and what it cost."""
        line = self.entries.get((ticket, self.calls[ticket].winner or 0))
        return line and (line.purchase, line.lane, line.kind, line.paid, line.would_have_paid)

    def totals(self) -> dict[tuple[Lane, EntryKind], tuple[int, int, int, int]]:
        sums: dict[tuple[Lane, EntryKind], tuple[int, int, int, int]] = {}
        for line in self.entries.values():
            count, unknown, paid, would = sums.get((line.lane, line.kind), (0, 0, 0, 0))
            sums[line.lane, line.kind] = (
                count + 1,
                unknown + (line.paid is None),
                paid + (line.paid or 0),
                would + (line.would_have_paid or 0),
            )
        return sums
