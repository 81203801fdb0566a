"""The two state machines: tickets and batches.

A ticket is one call; a batch is one purchase at the provider that carries many calls. The two tables below are the
complete list of legal transitions. Every store takes the guards of its statements from them, and the diagrams in
`docs/architecture.md` are generated from them.

A ticket waits (`queued`), is claimed by a batch (`boarded`) or is sent on its own (`sending`), and ends once
(`settled`). It may go back to `queued` any number of times, but `settled` is final: the first outcome to be committed
is the call's outcome, and a later one is only entered in the ledger as a duplicate. A ticket does not record whether
its batch is merely planned or already bought. That is the state of the batch, and storing it twice would let the two
disagree. A rescued ticket is `sending` while its batch is still running; either may settle it.

The batch states answer one question: what do we know about whether the provider charges for this batch?

- `submitting`: the intent is persisted before the create request goes out, so a crash leaves a record.
- `refused`: provably not bought. Its calls go back to the queue for free.
- `unknown`: the create got no clear answer (timeout, cut connection, 5xx, crash). It is never repeated blindly.
  Reconciliation looks for the batch at the provider: found means `open`; not found in time means `abandoned`.
- `open`, `cancelling`, `ended`: bought. The batch is polled to its end even if all its calls are settled, because it is
  billed either way. `collected` means that every call is settled or requeued and every purchase is in the ledger.
- `abandoned`: its calls went elsewhere, and the batch is watched for another 24 hours. It may reappear (`open`), turn
  out to be gone (`lost`), or stay unproven (`void`).

`refused` is reachable from `open` and `cancelling` because a provider may accept a batch and then fail it as a whole
during validation, before it processes, and bills, any call.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from carpool.core.errors import IllegalMove


class TicketState(StrEnum):
    QUEUED = "queued"  # waits in its pool
    BOARDED = "boarded"  # claimed by a batch that is bought or about to be
    SENDING = "sending"  # sent on lane `now`: directly, or as a rescue while its batch is still running
    SETTLED = "settled"  # has its final outcome


class BatchState(StrEnum):
    SUBMITTING = "submitting"  # the intent is persisted; the create request may be in flight
    UNKNOWN = "unknown"  # it is unknown whether the create succeeded: reconcile
    OPEN = "open"  # bought; the provider is processing it
    CANCELLING = "cancelling"  # bought; we asked the provider to cancel it
    ENDED = "ended"  # the provider has finished; the results are still to be collected
    COLLECTED = "collected"  # every call settled or requeued, every purchase in the ledger
    REFUSED = "refused"  # provably not bought: the create was refused, or the batch failed as a whole before it began
    ABANDONED = "abandoned"  # create unanswered, or the provider denies it; its calls went elsewhere; watched 24 hours
    VOID = "void"  # watched to the end without proof that it was bought
    LOST = "lost"  # bought, but the provider no longer has the results


TICKET_MOVES: dict[TicketState, frozenset[TicketState]] = {
    TicketState.QUEUED: frozenset({TicketState.BOARDED, TicketState.SENDING, TicketState.SETTLED}),
    TicketState.BOARDED: frozenset({TicketState.QUEUED, TicketState.SENDING, TicketState.SETTLED}),
    TicketState.SENDING: frozenset({TicketState.QUEUED, TicketState.BOARDED, TicketState.SETTLED}),
    TicketState.SETTLED: frozenset(),
}


class TicketOperation(NamedTuple):
    """Which tickets a statement of a store moves, and where to. Tickets in other states stay as they are."""

    sources: frozenset[TicketState]
    targets: frozenset[TicketState]


def _operation(sources: str, targets: str) -> TicketOperation:
    return TicketOperation(frozenset(map(TicketState, sources.split())), frozenset(map(TicketState, targets.split())))


# The moves by the statement that carries them out: stores fill the guards of these statements from here. Together they
# are `TICKET_MOVES`.
TICKET_OPERATIONS: dict[str, TicketOperation] = {
    "claim": _operation("queued", "boarded"),
    "start_sending": _operation("queued boarded", "sending"),
    "stop_sending": _operation("sending", "boarded"),
    "return_orphans": _operation("sending", "boarded queued"),
    "release_boarded": _operation("boarded", "queued"),
    "requeue_calls": _operation("boarded", "queued"),
    "settle_calls": _operation("queued boarded sending", "settled"),
    "cancel": _operation("queued", "settled"),
}

BATCH_MOVES: dict[BatchState, frozenset[BatchState]] = {
    BatchState.SUBMITTING: frozenset({BatchState.OPEN, BatchState.UNKNOWN, BatchState.REFUSED}),
    BatchState.UNKNOWN: frozenset({BatchState.OPEN, BatchState.ABANDONED}),
    BatchState.OPEN: frozenset(
        {BatchState.CANCELLING, BatchState.ENDED, BatchState.ABANDONED, BatchState.LOST, BatchState.REFUSED}
    ),
    BatchState.CANCELLING: frozenset({BatchState.ENDED, BatchState.ABANDONED, BatchState.LOST, BatchState.REFUSED}),
    BatchState.ENDED: frozenset({BatchState.COLLECTED, BatchState.ABANDONED, BatchState.LOST}),
    BatchState.ABANDONED: frozenset({BatchState.OPEN, BatchState.VOID, BatchState.LOST}),
    BatchState.COLLECTED: frozenset(),
    BatchState.REFUSED: frozenset(),
    BatchState.VOID: frozenset(),
    BatchState.LOST: frozenset(),
}

UNFINISHED: frozenset[BatchState] = frozenset(state for state, moves in BATCH_MOVES.items() if moves)
BOUGHT: frozenset[BatchState] = frozenset({BatchState.OPEN, BatchState.CANCELLING, BatchState.ENDED})
UNRESOLVED: frozenset[BatchState] = frozenset({BatchState.UNKNOWN, BatchState.ABANDONED})


def check_batch_move(source: BatchState, target: BatchState) -> None:
    if target not in BATCH_MOVES[source]:
        raise IllegalMove(f"A batch can't move from {source} to {target}.")
