"""Group commit on PostgreSQL: every group is committed exactly once, even if the connection breaks during COMMIT.

A connection can break at three points of a transaction:

1. Before COMMIT was sent: the server rolls back. The group is run again on a new connection.
2. After COMMIT was answered: nothing is left to do.
3. In between: COMMIT was sent, and the answer never came. The server may or may not have committed. Running the group
   again could write it twice; reporting an error could deny a purchase that is on disk.

Point 3 needs an answer from the server. So every writing transaction asks for its number when it begins
(`pg_current_xact_id`), and the number is kept in `_number` while COMMIT is unanswered. The next connection asks
`pg_xact_status` for that number:

- `committed`: the results computed before the break are valid and are returned to the callers; nothing is repeated.
- `aborted`: the group is run again. The same holds for a number that the server does not know: it crashed before it
  wrote anything of that transaction.
- `in progress`: the server has not noticed yet that its client is gone. The old backend is terminated, and the question
  is repeated after a pause (`_StillOpen`).
- No status (the server has discarded it): nobody can tell any more. The callers get an error (`_StatusLost`); guessing
  is never an option.

Groups that only read need no number and are simply repeated. Deadlocks, serialisation failures and unique keys that
two processes insert at the same time (`again`) also restart the group, with backoff. Any other error is first retried
in careful mode, with a savepoint per run of jobs, so that a faulty job fails alone. While the server is away, a group
waits for up to `patience` seconds; after that, groups fail quickly until the server is back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from carpool.core.bounded import backoff
from carpool.core.errors import StoreError
from carpool.stores.operations import batches, calls, forecasts, ledger, shapes
from carpool.stores.operations.session import BIGGEST, Row, to_json
from carpool.stores.operations.writer import Groups, Job, Work, each, runs, work
from carpool.stores.postgres.session import PostgresSession, again, lost, state_of, translate

MAX_OUTAGE_S = 30.0  # how long a group waits for a server that can't be reached
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_TRIES = 20  # of a group that loses races against other transactions

# Operations that only read: they need no transaction number and may be repeated.
_READS = frozenset(
    each(operation)
    for operation in (
        *(calls.outcome, calls.outcomes, calls.sendable_call, calls.views, calls.counts, calls.keys),
        *(calls.listed_calls, calls.listed_call, calls.listed_batches),
        *(batches.leaders, batches.pools, batches.due, batches.next_due, batches.still_mine, batches.lines),
        *(batches.batches, batches.batch, batches.open_calls, batches.unmentioned, batches.known_provider_ids),
        *(batches.suspects, ledger.attempts, ledger.totals, ledger.entries, ledger.recall, shapes.shapes),
        forecasts.forecast,
    )
)


# The tickets of the calls that a job changes, if its item names them.
_CHANGES: dict[Work, Callable[[Any], Iterable[int]]] = {
    each(calls.await_ticket): lambda item: (item[0],),
    each(calls.stop_awaiting): lambda item: (item[0],),
    each(calls.delivered): lambda item: item[0],
    each(calls.cancel): lambda item: (item[0],),
    each(ledger.start_sending): lambda item: (item[0].ticket,),
    each(ledger.stop_sending): lambda item: (item[0],),
    ledger.settle: lambda item: (settlement.ticket for settlement in item[0]),
}


class _StatusLost(StoreError):
    """The server no longer knows whether a transaction was committed."""


class _StillOpen(Exception):
    """The server has not ended a transaction whose connection broke."""


class PostgresGroups(Groups):
    """Runs groups of jobs, each in one transaction, and reconnects if the connection breaks."""

    _session: PostgresSession

    def __init__(
        self, session: PostgresSession, connect: Callable[[], psycopg.Connection[Row]], patience: float = MAX_OUTAGE_S
    ) -> None:
        super().__init__(session)
        self._connect = connect
        self._patience = patience
        self._pausing = threading.Event()
        self._away = False  # a group ran out of patience: until the server is back, others wait only briefly
        self._number: str | None = None  # of the transaction whose COMMIT was sent and not answered yet
        self._backend = 0  # the pid of its backend process
        self.reconnects = 0

    def run(self, jobs: Sequence[Job]) -> None:
        last_error: Exception = StoreError(f"The store {self._session.name} did not answer.")
        careful, tries = False, 0
        for pause in self._pauses():
            try:
                if self._ready():
                    self._run_transaction(jobs, careful)
            except Exception as error:  # noqa: BLE001  raised for the callers; it must not end the thread
                last_error, gone = error, self._is_lost(error)
            else:
                self._away = False
                return
            if isinstance(last_error, _StatusLost):
                break
            if gone:
                self._pausing.wait(pause)
                continue
            tries += 1
            if again(last_error) and tries < _TRIES:
                self._pausing.wait(pause)
            elif careful or len(jobs) == 1:
                break
            else:
                careful = True
        self._fail(jobs, last_error)

    def _pauses(self) -> Iterator[float]:
        """Yields growing pauses between tries, which add up to about the patience."""
        waited, failures = 0.0, 0
        patience = min(self._patience, _LONGEST_PAUSE_S) if self._away else self._patience
        yield 0.0
        while waited < patience:
            failures += 1
            pause = backoff(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            yield pause
            waited += pause
        yield 0.0

    def _is_lost(self, error: Exception) -> bool:
        connection = self._session.connection
        if isinstance(error, _StillOpen):
            return True
        if isinstance(error, psycopg.Error) and lost(error, connection):
            connection.close()
            return True
        if connection.closed:
            return isinstance(error, psycopg.Error)
        self._number = None  # the server answered, so the result of COMMIT is known
        if connection.info.transaction_status is not TransactionStatus.IDLE:
            try:
                connection.execute("ROLLBACK")
            except psycopg.Error:
                connection.close()
        self._session.forget()
        return connection.closed

    def _ready(self) -> bool:
        """Ensures a connection. Returns False if the group whose COMMIT was unanswered turns out to be committed."""
        if self._session.connection.closed:
            self._session.connection = self._connect()
            self._session.forget()
            self.reconnects += 1
        committed = self._number is not None and self._committed(self._number)
        self._number = None
        self.commits += committed
        return not committed

    def _committed(self, number: str) -> bool:
        """Whether that transaction was committed; raises while the server has not ended it."""
        query = "SELECT pg_xact_status(%s::text::xid8), pg_terminate_backend(pid) FROM (SELECT %s::int AS pid) one"
        try:
            status, _ = self._session.connection.execute(query, (number, self._backend)).fetchone() or (None, None)
        except psycopg.errors.InvalidParameterValue:  # the server crashed before it wrote this number to disk
            return False
        if status == "in progress":
            raise _StillOpen("the server has not noticed yet that the connection broke")
        if status is None:
            raise _StatusLost(f"The store {self._session.name} can't say whether a transaction was committed.")
        return bool(status == "committed")

    def _run_transaction(self, jobs: Sequence[Job], careful: bool) -> None:
        for job in jobs:
            job.result = job.error = None
        number = self._begin(jobs)
        if len(jobs) > 1:  # all processes lock in ascending order, which avoids deadlocks
            changed = {ticket for job in jobs if job.work in _CHANGES for ticket in _CHANGES[job.work](job.item)}
            if tickets := sorted(ticket for ticket in changed if ticket <= BIGGEST):
                self._session.hold(to_json(tickets))
        for run in runs(jobs):
            if careful:
                self._savepoint(run)
            else:
                work(self._session, run)
        self._number = number
        self._session.connection.execute("COMMIT")
        self._number = None
        self.commits += 1

    def _begin(self, jobs: Sequence[Job]) -> str | None:
        connection = self._session.connection
        if all(job.work in _READS for job in jobs):
            connection.execute("BEGIN READ ONLY")
            return None
        relaxed = "; SET LOCAL synchronous_commit = off" if all(job.relaxed for job in jobs) else ""
        cursor = connection.execute(f"BEGIN{relaxed}; SELECT pg_current_xact_id()::text")
        while cursor.nextset():
            pass
        self._backend = connection.info.backend_pid
        return str((cursor.fetchone() or ("",))[0])

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        self._number = None
        self._away = self._session.connection.closed
        translated = self._callers_error(error)
        for job in jobs:
            job.error = translated

    def _must_end(self, error: Exception) -> bool:
        return self._session.connection.closed or again(error)

    def _translate(self, error: Exception) -> StoreError | None:
        if not (isinstance(error, psycopg.Error) or again(error)):
            return None
        translated = translate(error, self._session.name)
        if not state_of(error).startswith(("22", "23")):  # such an error may quote the data
            translated.__cause__ = error
        return translated
