from __future__ import annotations

import pytest

from carpool.core.errors import IllegalMove
from carpool.core.lifecycle import (
    BATCH_MOVES,
    BOUGHT,
    TICKET_MOVES,
    TICKET_OPERATIONS,
    UNFINISHED,
    UNRESOLVED,
    BatchState,
    TicketState,
    check_batch_move,
)

TABLES = [
    pytest.param(TicketState, TICKET_MOVES, id="tickets"),
    pytest.param(BatchState, BATCH_MOVES, id="batches"),
]


def reachable(moves, start):
    seen, waiting = set(), [start]
    while waiting:
        state = waiting.pop()
        if state not in seen:
            seen.add(state)
            waiting += moves[state]
    return seen


@pytest.mark.parametrize(("states", "moves"), TABLES)
def test_every_state_has_its_row_and_is_reachable(states, moves):
    assert set(moves) == set(states)
    assert reachable(moves, next(iter(moves))) == set(states)


@pytest.mark.parametrize(("states", "moves"), TABLES)
def test_every_state_can_come_to_an_end(states, moves):
    ends = {state for state in states if not moves[state]}
    assert all(reachable(moves, state) & ends for state in states)


def test_the_ends():
    assert {state for state in TicketState if not TICKET_MOVES[state]} == {TicketState.SETTLED}
    assert set(BatchState) - UNFINISHED == {
        BatchState.COLLECTED,
        BatchState.REFUSED,
        BatchState.VOID,
        BatchState.LOST,
    }


def test_exactly_the_moves_of_the_table_are_legal():
    for source in BatchState:
        for target in BatchState:
            if target in BATCH_MOVES[source]:
                check_batch_move(source, target)
            else:
                with pytest.raises(IllegalMove, match=rf"can't move from {source} to {target}\.$"):
                    check_batch_move(source, target)


def test_the_statements_of_the_stores_make_all_moves_of_tickets_and_no_others():
    operations = TICKET_OPERATIONS.values()
    for source in TicketState:
        assert {target for one in operations if source in one.sources for target in one.targets} == TICKET_MOVES[source]


@pytest.mark.parametrize(("states", "moves"), TABLES)
def test_no_state_moves_to_itself(states, moves):
    assert not [state for state in states if state in moves[state]]


def test_only_a_provably_unbought_batch_is_refused():
    sources = {state for state in BatchState if BatchState.REFUSED in BATCH_MOVES[state]}
    assert sources == {BatchState.SUBMITTING, BatchState.OPEN, BatchState.CANCELLING}  # the latter when it failed whole


def test_an_abandoned_batch_can_still_prove_itself():
    assert BatchState.OPEN in BATCH_MOVES[BatchState.ABANDONED]


def test_the_groups_are_of_unfinished_batches_and_do_not_overlap():
    assert BOUGHT | UNRESOLVED | {BatchState.SUBMITTING} == UNFINISHED
    assert not BOUGHT & UNRESOLVED
