"""The states of tickets and batches, and the only moves between them.

Every store checks its moves here, and the diagrams in `docs/architecture.md` are drawn from these tables.
Whether a boarded ticket is merely claimed or already bought is its batch's state, so it is not repeated here.
"""

from __future__ import annotations

from enum import StrEnum

from carpool.errors import IllegalMove


class TicketState(StrEnum):
    QUEUED = "queued"  # waits in its pool
    BOARDED = "boarded"  # claimed by a batch, bought or about to be
    SENDING = "sending"  # travels on `now`: directly, or as a rescue beside its batch
    SETTLED = "settled"  # has its one outcome


class BatchState(StrEnum):
    SUBMITTING = "submitting"  # the intent is on disk, the create may be on its way
    UNKNOWN = "unknown"  # the create may or may not have been bought: reconcile
    OPEN = "open"  # bought, the provider works on it
    CANCELLING = "cancelling"  # bought, and we asked the provider to stop
    ENDED = "ended"  # the provider is done, its results are to be collected
    COLLECTED = "collected"  # every call settled or requeued, every purchase in the ledger
    REFUSED = "refused"  # provably not bought: its create was refused, or it failed as a whole before it began
    ABANDONED = "abandoned"  # given up as unknown, its calls went elsewhere; watched for late proof
    VOID = "void"  # watched to the end, no proof ever came
    LOST = "lost"  # bought, but the provider no longer has the results


TICKET_MOVES: dict[TicketState, frozenset[TicketState]] = {
    TicketState.QUEUED: frozenset({TicketState.BOARDED, TicketState.SENDING, TicketState.SETTLED}),
    TicketState.BOARDED: frozenset({TicketState.QUEUED, TicketState.SENDING, TicketState.SETTLED}),
    TicketState.SENDING: frozenset({TicketState.QUEUED, TicketState.BOARDED, TicketState.SETTLED}),
    TicketState.SETTLED: frozenset(),
}

BATCH_MOVES: dict[BatchState, frozenset[BatchState]] = {
    BatchState.SUBMITTING: frozenset({BatchState.OPEN, BatchState.UNKNOWN, BatchState.REFUSED}),
    BatchState.UNKNOWN: frozenset({BatchState.OPEN, BatchState.ABANDONED}),
    BatchState.OPEN: frozenset({BatchState.CANCELLING, BatchState.ENDED, BatchState.LOST, BatchState.REFUSED}),
    BatchState.CANCELLING: frozenset({BatchState.ENDED, BatchState.LOST, BatchState.REFUSED}),
    BatchState.ENDED: frozenset({BatchState.COLLECTED, BatchState.LOST}),
    BatchState.ABANDONED: frozenset({BatchState.OPEN, BatchState.VOID}),
    BatchState.COLLECTED: frozenset(),
    BatchState.REFUSED: frozenset(),
    BatchState.VOID: frozenset(),
    BatchState.LOST: frozenset(),
}

UNFINISHED: frozenset[BatchState] = frozenset(state for state, moves in BATCH_MOVES.items() if moves)
BOUGHT: frozenset[BatchState] = frozenset({BatchState.OPEN, BatchState.CANCELLING, BatchState.ENDED})
UNRESOLVED: frozenset[BatchState] = frozenset({BatchState.UNKNOWN, BatchState.ABANDONED})


def check_ticket_move(source: TicketState, target: TicketState) -> None:
    if target not in TICKET_MOVES[source]:
        raise IllegalMove(f"A ticket can't move from {source} to {target}.")


def check_batch_move(source: BatchState, target: BatchState) -> None:
    if target not in BATCH_MOVES[source]:
        raise IllegalMove(f"A batch can't move from {source} to {target}.")


def diagram(moves: dict[TicketState, frozenset[TicketState]] | dict[BatchState, frozenset[BatchState]]) -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    first = next(iter(moves))
    lines.append(f"    [*] --> {first}")
    for source, targets in moves.items():
        lines += [f"    {source} --> {target}" for target in sorted(targets)]
        if not targets:
            lines.append(f"    {source} --> [*]")
    return "\n".join(lines)
