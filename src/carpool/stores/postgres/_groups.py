"""Group commit on PostgreSQL: every group is written exactly once, whatever becomes of its connection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from carpool.errors import CarpoolError, StoreError
from carpool.stores import _batches, _calls, _keys, _ledger, _listing, _settling
from carpool.stores._codec import BIGGEST, Row, to_json
from carpool.stores._writer import Job, Work, each, runs, work
from carpool.stores.postgres._session import PostgresSession
from carpool.stores.postgres._trouble import again, lost, state_of, translate

PATIENCE_S = 30.0  # how long a group waits for a server that is away
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_TRIES = 20  # of a group that others are quicker than

# What reads only needs no number of its own, and may be repeated.
_READS = frozenset(
    each(operation)
    for operation in (
        *(_calls.outcome, _calls.outcomes, _calls.parcel, _calls.views, _calls.pools, _calls.due, _calls.next_due),
        *(_calls.counts, _batches.still_mine, _batches.lines, _batches.batches, _batches.batch, _batches.open_calls),
        *(_batches.unmentioned, _batches.known_provider_ids, _batches.suspects, _batches.leaders),
        *(_ledger.attempts, _ledger.totals, _ledger.entries, _ledger.recall, _keys.keys),
        *(_listing.listed_calls, _listing.listed_call, _listing.listed_batches),
    )
)


# The calls that a job is about to change, where it says which.
_CHANGES: dict[Work, Callable[[Any], Iterable[int]]] = {
    each(_calls.await_ticket): lambda item: (item[0],),
    each(_calls.delivered): lambda item: item[0],
    each(_calls.cancel): lambda item: (item[0],),
    each(_ledger.start_sending): lambda item: (item[0].ticket,),
    each(_ledger.stop_sending): lambda item: (item[0],),
    _settling.settle: lambda item: (one.ticket for one in item[0]),
}


def _changed(jobs: Sequence[Job]) -> list[int]:
    """In rising order, as everybody locks them, so that nobody waits in a circle."""
    found: set[int] = set()
    for job in jobs:
        if job.work in _CHANGES:
            found.update(_CHANGES[job.work](job.item))
    return sorted(ticket for ticket in found if ticket <= BIGGEST)


class _Untold(StoreError):
    """Nobody knows whether a transaction was committed."""


class _Undecided(Exception):
    """The server has not ended a transaction yet whose connection broke."""


class PostgresGroups:
    """Runs groups of jobs, each in one transaction.

    A connection that breaks leaves one question: was the last transaction committed? The server knows it by the
    transaction's number, so it is asked, and only what was not committed is begun again.
    """

    def __init__(
        self, session: PostgresSession, connect: Callable[[], psycopg.Connection[Row]], patience: float = PATIENCE_S
    ) -> None:
        self._session = session
        self._connect = connect
        self._patience = patience
        self._pausing = threading.Event()
        self._away = False  # patience ran out once: until the server is back, others wait for a moment only
        self._number: str | None = None  # of the transaction whose COMMIT was sent, and not answered yet
        self._backend = 0  # the server's process behind it
        self.commits = 0
        self.reconnects = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """Leaves a result or an error in every job. Never raises."""
        trouble: Exception = StoreError(f"The store {self._session.name} did not answer.")
        careful, tries = False, 0
        for pause in self._pauses():
            try:
                if self._ready():
                    self._whole(jobs, careful)
            except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the callers, not to the thread
                trouble, gone = error, self._is_lost(error)
            else:
                self._away = False
                return
            if isinstance(trouble, _Untold):
                break
            if gone:
                self._pausing.wait(pause)
                continue
            tries += 1
            if again(trouble) and tries < _TRIES:
                self._pausing.wait(pause)
            elif careful or len(jobs) == 1:
                break
            else:
                careful = True
        self._fail(jobs, trouble)

    def _pauses(self) -> Iterator[float]:
        """They grow; together with a moment for each try they last as long as the patience."""
        pause, waited = _FIRST_PAUSE_S, 0.0
        patience = min(self._patience, _LONGEST_PAUSE_S) if self._away else self._patience
        yield 0.0
        while waited < patience:
            yield pause
            waited += pause
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        yield 0.0

    def _is_lost(self, error: Exception) -> bool:
        connection = self._session.connection
        if isinstance(error, _Undecided):
            return True
        if isinstance(error, psycopg.Error) and lost(error, connection):
            connection.close()
            return True
        if connection.closed:
            return isinstance(error, psycopg.Error)
        self._number = None  # the server answered, so nothing is open
        if connection.info.transaction_status is not TransactionStatus.IDLE:
            try:
                connection.execute("ROLLBACK")
            except psycopg.Error:
                connection.close()
        self._session.forget()
        return connection.closed

    def _ready(self) -> bool:
        """Has a connection. False: the group that was under way when the last one broke is committed after all."""
        if self._session.connection.closed:
            self._session.connection = self._connect()
            self._session.forget()
            self.reconnects += 1
        if self._number is None:
            return True
        if self._committed(self._number):
            self._number = None
            self.commits += 1
            return False
        self._number = None
        return True

    def _committed(self, number: str) -> bool:
        """Whether that transaction was committed; raises while its fate is open."""
        asked = "SELECT pg_xact_status(%s::text::xid8), pg_terminate_backend(pid) FROM (SELECT %s::int AS pid) one"
        try:
            status, _ = self._session.connection.execute(asked, (number, self._backend)).fetchone() or (None, None)
        except psycopg.errors.InvalidParameterValue:  # a server that crashed does not know a number it never wrote down
            return False
        if status == "in progress":
            raise _Undecided("the server has not noticed yet that the connection broke")
        if status is None:
            raise _Untold(f"The store {self._session.name} can't say whether a transaction was committed.")
        return bool(status == "committed")

    def _whole(self, jobs: Sequence[Job], careful: bool) -> None:
        for job in jobs:
            job.result = job.error = None
        number = self._begin(jobs)
        if len(jobs) > 1 and (tickets := _changed(jobs)):
            self._session.hold(to_json(tickets))
        if careful:
            for run in runs(jobs):
                self._savepoint(run)
        else:
            for run in runs(jobs):
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

    def _savepoint(self, run: list[Job]) -> None:
        connection = self._session.connection
        connection.execute("SAVEPOINT job")
        try:
            work(self._session, run)
        except Exception as error:
            if connection.closed or again(error):
                raise
            connection.execute("ROLLBACK TO job; RELEASE job")
            self._session.forget()
            self._alone(run, error)
            return
        connection.execute("RELEASE job")

    def _alone(self, run: list[Job], error: Exception) -> None:
        """One of these failed: done one by one, each fails for itself only."""
        if len(run) == 1:
            run[0].error = self._worded(error)
            return
        for job in run:
            self._savepoint([job])

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        self._number = None
        self._away = self._session.connection.closed
        worded = self._worded(error)
        for job in jobs:
            job.error = worded

    def _worded(self, error: Exception) -> Exception:
        if isinstance(error, CarpoolError):
            return error
        if isinstance(error, OverflowError | UnicodeError):
            worded = StoreError(f"The store {self._session.name} can't hold such a value: {error}.")
        elif isinstance(error, psycopg.Error) or again(error):
            worded = translate(error, self._session.name)
        else:
            return error
        if not state_of(error).startswith(("22", "23")):  # such an error may quote what was to be written
            worded.__cause__ = error
        return worded
