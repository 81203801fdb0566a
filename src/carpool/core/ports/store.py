"""The store port: the storage contract, as one protocol for each role and `Store`, which has all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from carpool.core.errors import CarpoolError
from carpool.core.keys import VirtualKey
from carpool.core.lifecycle import BatchState, TicketState
from carpool.core.model import (
    Admission,
    Admitted,
    Batch,
    CallRow,
    CallShape,
    Due,
    Entry,
    Intent,
    Lane,
    OpenCalls,
    Outcome,
    PoolView,
    RecordedPurchase,
    SendableCall,
    Settled,
    Settlement,
    TicketView,
    Totals,
)
from carpool.core.tasks import TaskRecord


class LeaseStore(Protocol):
    """Which engines are alive, and what each of them leads and owns."""

    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        """Acquires or renews the engine's lease until now + `ttl`. The engine counts as alive until now + `pulse`, by
        default as long as its lease. Returns whether it was alive up to this call; if not, other engines may have taken
        over what it owned."""

    async def leave(self, engine: str) -> None:
        """Ends lease and pulse immediately; what the engine owned can be taken over."""

    async def lead(self, engine: str, accounts: Sequence[str], now: float) -> set[str]:
        """Makes a live engine the leader of those accounts that have no live leader. Returns which of `accounts` it
        leads now; none if it is not alive itself. Leadership ends with the engine's pulse, or when it leaves."""

    async def leaders(self, now: float) -> Mapping[str, str]:
        """Maps every account that has a live leader to that engine."""

    async def take_over(self, engine: str, credentials: Sequence[str], now: float) -> int:
        """Gives `engine` the unfinished batches of these credentials whose owner is not alive; returns how many.

        Batches in `submitting` become `unknown` unless they are `unsent`. They count as unknown from now or from the
        end of the owner's lease, whichever is later, because the create may be in flight until then. Tickets awaited by
        engines that are not alive are no longer awaited. Those of them in `sending` return to `boarded` if they have an
        unfinished batch; otherwise they stay `sending` without a sender on lane `now`, or return to `queued` on lane
        `batch`.
        """


class CallStore(Protocol):
    """Calls from their admission to the delivery of their outcome."""

    def admit_all(self, admissions: Sequence[Admission]) -> Awaitable[list[Admitted | CarpoolError]]:
        """Persists calls, in order and in one transaction, unless they are stored already. The write is queued when
        this method returns, so that calls which arrive meanwhile can be queued behind it. A call that can't be admitted
        has its error in place of its result. For each call, in this order:

        1. With a key that is known for this credential: returns its ticket, now awaited by the new client (with the new
           deadline and rescue time if it is still open), and its outcome if settled. A different fingerprint under the
           same key raises `KeyConflict`.
        2. Without a key: adoption. The oldest undelivered ticket with the same fingerprint and credential that is not
           awaited is handed to the new client in the same way. A ticket delivered within the last 60 s is handed out
           again only if `call.retry` is set. If such a ticket is awaited by an engine that may be dead or alive, raises
           `Undecided` and changes nothing, unless the admission is `pressed`; retry soon.
        3. Otherwise: a new ticket, `queued` on lane `batch`, `sending` on lane `now`.
        """

    async def await_ticket(self, ticket: int, awaiter: str | None) -> None:
        """Sets the engine whose frontend holds the client of this ticket; None if no client waits any more."""

    async def stop_awaiting(self, ticket: int, engine: str) -> None:
        """The client held by this engine's frontend disconnected before it received its answer: the ticket is no longer
        awaited, so an equal call can adopt it. No change if another engine holds a client of the ticket by now."""

    async def delivered(self, tickets: Sequence[int], now: float) -> None:
        """Marks the outcomes of these tickets as completely delivered to their clients."""

    async def outcome(self, ticket: int, credential: str) -> Settled | None:
        """The outcome and its cost, if there is one and the ticket belongs to this credential."""

    async def outcomes(self, tickets: Sequence[int]) -> list[Settled]:
        """The outcomes of those tickets that are settled, with their cost, for an engine whose frontends await them."""

    async def sendable_call(self, ticket: int) -> SendableCall | None:
        """An open call, for sending it on `now`; None if it is settled or does not exist. `reason` is the one set when
        the call was last admitted, released, requeued or sent."""

    async def views(self, tickets: Sequence[int]) -> list[TicketView]:
        """The state of these calls, without those that are settled or do not exist."""

    async def pools(self, credentials: Sequence[str]) -> list[PoolView]:
        """The pools of these credentials with `queued` calls on lane `batch`."""

    async def due(self, credentials: Sequence[str], until: float, limit: int, awaiter: str | None = None) -> list[Due]:
        """Open calls to be sent on `now`, earliest first: `queued` or `boarded`, rescue time at or before `until`,
        and either awaited or on lane `now`; with `awaiter` only those that this engine awaits. Calls that no client
        awaits are not rescued."""

    async def next_due(self, credentials: Sequence[str], awaiter: str | None = None) -> float | None:
        """The earliest rescue time among all calls that `due` would return for any `until`."""

    async def start_sending(self, entry: Entry, engine: str, now: float) -> bool:
        """Called before a purchase on `now`. In one transaction the ticket becomes `sending`, the attempt is entered in
        the ledger with an unknown price, and the call takes the entry's reason. Idempotent under the entry's identity.
        Afterwards the engine owns the ticket and may retry it under a new attempt. Returns False and changes nothing if
        the ticket is settled or does not exist, or if another live engine is sending it."""

    async def stop_sending(self, ticket: int) -> bool:
        """Called when a purchase on `now` got no answer. The ticket returns to its unfinished batch, which is all that
        can still answer it; its rescue time becomes its deadline, when the wait ends. Returns False and changes nothing
        if it has no such batch."""

    async def attempts(self, ticket: int) -> int:
        """The number of purchases on `now` in the ledger for this ticket."""

    async def cancel(self, ticket: int, outcome: Outcome) -> bool:
        """Settles a ticket that is `queued`. Returns False and changes nothing if it is in any other state."""

    async def settle(self, settlements: Sequence[Settlement], now: float) -> list[bool]:
        """Applies all settlements in order, in one transaction. An `outcome` settles the ticket unless it is settled
        already. A `requeue` returns it to `queued`, or, if it is `sending`, only detaches it from its batch; on `now`
        the ticket takes the `reason`, for another batch it keeps the one it had. The `entry` is written under its
        identity: a new one is inserted, one with an unknown price is completed, a complete
        one stays; without tags it takes the call's. An entry whose outcome came second is written as `duplicate` (a
        `rescue` stays one) with an empty `would_have_paid`, because the entry of the outcome in use has that value.
        Returns for each settlement whether its outcome is now the ticket's outcome."""

    def subscribe(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with tickets that were settled by any engine. Returns a function that
        ends the subscription. Notifications are hints: tickets may be repeated, and may be unknown to the listener. An
        empty sequence means that notifications may have been lost."""

    def on_pool_change(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with credentials for which calls were admitted by any engine. Returns
        a function that ends the subscription. A hint, as above. An empty sequence means that anything may have changed:
        calls were requeued, an engine left, or notifications were lost."""

    async def retain(self, before: float, undelivered_before: float, limit: int) -> int:
        """Removes at most `limit` calls under the retention rules above; returns how many."""


class BatchStore(Protocol):
    """Batches from the intent to the last result, and the suspects of those with an unknown create."""

    async def intend(self, intent: Intent) -> Batch | None:
        """Claims calls of a pool and writes the batch row as `submitting`, in one transaction; None if no call is left.
        At least one call is claimed even if it alone exceeds `max_bytes`. A call that is awaited and due at `at` is not
        claimed: it is sent on `now`. If the intent names an account, also returns None if its owner is not alive at
        `at` or does not lead the account."""

    async def still_mine(self, batch: int, owner: str, until: float) -> bool:
        """Whether the batch is `submitting`, owned by `owner`, and the owner's lease lasts until `until`."""

    async def depart(self, batch: int, owner: str, until: float, now: float) -> bool:
        """Checks the same as `still_mine` and, if it holds, persists in the same transaction that the create is about
        to be sent: the batch is no longer `unsent`."""

    def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yields tickets and bodies of the batch in chunks, in a stable order, without loading all into memory."""

    async def move(self, batch: int, target: BatchState, *, owner: str | None = None, **changes: object) -> Batch:
        """Moves a batch to another state and sets the named fields of its row (`sent_at`, `resolved_at`, `provider_id`,
        `expires_at`, `ended_at`, `clock_offset`, `abandoned`, `note`, `unsent`). With `owner`, raises `IllegalMove` and
        changes nothing if another engine owns the batch by now."""

    async def annotate(self, batch: int, **changes: object) -> None:
        """Sets fields of a batch row without changing its state."""

    async def release(
        self, batch: int, target: BatchState, lane: Lane, now: float, reason: str, owner: str | None = None
    ) -> int:
        """Moves the batch and returns its open `boarded` tickets to `queued`, in one transaction; returns how many.
        With `owner`, raises `IllegalMove` and changes nothing if another engine owns the batch by now. On lane `now`
        the tickets are due immediately, for `reason`; those that wait for another batch keep the reason they had. It
        counts as a requeue unless the batch was refused. Tickets in `sending` stay in `sending` and are detached from
        the batch."""

    async def batches(self, owner: str) -> list[Batch]:
        """The unfinished batches that this engine owns, oldest first."""

    async def batch(self, batch: int) -> Batch | None: ...

    async def open_calls(self, batch: int) -> OpenCalls: ...

    async def tidy(self, batch: int, after: int, limit: int) -> int | None:
        """Deletes the data that settled calls of a batch no longer need, for at most `limit` calls with a ticket above
        `after`. Returns the last ticket processed; None if there were no more. Until then a settled call may keep its
        body."""

    async def unmentioned(self, batch: int, after: int, limit: int) -> list[int]:
        """Tickets of the batch above `after`, including settled ones, that have no ledger entry for this purchase, in
        ascending order."""

    async def known_provider_ids(self, credential: str) -> set[str]:
        """Provider ids of all batches known to be ours, which therefore can't be suspects. A batch that was ruled out
        for one unresolved batch is not included: it may belong to another one."""

    async def suspect(self, batch: int, provider_id: str, verdict: str) -> None:
        """Stores a suspect of an unresolved batch, with verdict `watched` or `stranger`."""

    async def suspects(self, batch: int) -> dict[str, str]: ...

    async def hint_batch(self, provider: str, provider_id: str) -> bool:
        """Notifies the engine that owns a batch, in any process, that the batch may have ended. The batch is given by
        its provider id. Returns False and notifies nobody if no unfinished batch has this id."""

    def on_batch_hint(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with batches passed to `hint_batch` by any engine. Returns a function
        that ends the subscription. A hint, as above, which may be lost."""


class LedgerStore(Protocol):
    """The purchases: one entry each, and their sums."""

    async def attempt(self, entry: Entry) -> None:
        """Enters a purchase in the ledger with an unknown price before it is made, for a call that has no ticket in
        this store (plain `now`)."""

    def attempted(self, entry: Entry) -> bool:
        """As `attempt`, but synchronous. Returns False if the store does not support this; then nothing was written."""

    def record(self, entry: Entry, *, deferred: bool = False) -> Awaitable[None]:
        """Writes an entry for a call that has no ticket in this store (plain `now`), as `settle` would. The write is
        queued immediately, so entries are written in the order of the calls to this method. Awaiting it waits until the
        entry is written, and is optional. `deferred`: the write may be delayed briefly, but stays ahead of any write
        queued later."""

    def completed(self, entry: Entry, on_done: Callable[[BaseException | None], None]) -> None:
        """A deferred `record` that is not awaited: `on_done` is called on the event loop with None once the entry is
        written, or with the error."""

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        """The sums of the ledger; with `credentials` only over purchases made with these."""

    async def entries(self, ticket: int, credentials: Sequence[str] | None = None) -> list[Entry]:
        """The purchases of a call, in order, whether or not the call itself is still stored; with `credentials` only
        purchases made with these."""


class ShapeStore(Protocol):
    """The record of calls: their sizes and times, in the order in which they were recorded."""

    async def record_shapes(self, recorded: Sequence[CallShape]) -> None:
        """Adds calls to the record. May be lost in a power failure."""

    async def shapes(
        self, since: float, after: int, credentials: Sequence[str] | None = None
    ) -> tuple[int, list[RecordedPurchase]] | None:
        """The next page of the record: the purchases of some of the calls that arrived at `since` or later, by ticket
        and then by time; with `credentials` only purchases made with these. Returns the page's number, which is `after`
        for the next page; None if there is none. The first page comes after 0. A page may be empty."""

    async def prune_shapes(self, before: float, most: int) -> int:
        """Removes calls that arrived earlier than `before`, and the oldest ones if there are more than `most`, in steps
        and only together with those that were recorded with them. Returns how many steps' worth was removed: 0 if
        nothing is left to remove."""


class TaskStore(Protocol):
    """What is known of tasks, for all processes on the store and after a restart."""

    async def merge_tasks(self, changes: Sequence[TaskRecord]) -> list[TaskRecord]:
        """Adds changes to the stored tasks of the same credential and name, and returns these. Counts and costs are
        summed. Of two deadlines the one counts that was set later by a client itself, else the earlier one. A task
        that has left the cheap lanes stays there, unless a client set a new deadline. A stored task that was over by
        the time of the change is replaced."""

    async def tasks(self, since: float, limit: int, credentials: Sequence[str] | None = None) -> list[TaskRecord]:
        """The tasks that were active at `since` or later, the latest first; with `credentials` only theirs."""

    async def prune_tasks(self, before: float) -> int:
        """Removes tasks that were active last earlier than `before`. Returns how many."""


class KeyStore(Protocol):
    """Virtual keys, and remembered facts about credentials."""

    async def keys(self, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
        """All virtual keys, oldest first, and the number of the last change; None if that equals `known`. Recording a
        use is not a change."""

    async def write_keys(self, changed: Sequence[VirtualKey]) -> None:
        """Adds keys; for digests that are stored already, replaces owner, profile and end times. Counts as one
        change."""

    async def used_keys(self, uses: Mapping[str, float]) -> None:
        """Sets when keys, given by digest, were last used; never moves a time back. May be lost in a power failure."""

    async def remember(self, kind: str, key: str, value: str, now: float) -> None: ...

    async def recall(self, kind: str) -> Mapping[str, str]: ...


class ForecastStore(Protocol):
    """What the engines on a store have learned about times and chances, as one state that they share."""

    async def forecast(self) -> tuple[int, bytes]:
        """The version and content of the state; 0 and nothing before it is first saved."""

    async def save_forecast(self, known: int, state: bytes) -> bool:
        """Replaces the state that has the version `known`. Returns False and changes nothing if it has another version
        by now: load that, and save again. May be lost in a power failure."""


class ListingStore(Protocol):
    """Calls and batches as they are shown to people."""

    async def counts(self) -> Mapping[str, int]:
        """Row counts by state: `tickets.queued`, `batches.open`, …; `batches.bought` (all batches ever bought) and
        `answers.undelivered` (settled, not delivered yet)."""

    async def listed_calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        """Stored calls with a ticket below `before`, newest first, all or those in one state; for display. With
        `credentials` only theirs, as far as they are among the newest of all calls."""

    async def listed_call(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        """One call; with `credentials`, None unless it belongs to one of them."""

    async def listed_batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        """Batches with an id below `before`, newest first, all or those in one state, including finished ones. With
        `credentials` only theirs."""


class Store(
    LeaseStore,
    CallStore,
    BatchStore,
    LedgerStore,
    ShapeStore,
    TaskStore,
    KeyStore,
    ForecastStore,
    ListingStore,
    Protocol,
):
    """Persists calls, batches, outcomes and the ledger.

    `durable` states whether the data outlives the process.

    **Durability.** When an awaited method returns, its changes survive `kill -9`. They also survive a power failure,
    except those of `record`, `delivered`, `record_shapes`, `save_forecast` and `used_keys`, which may be lost then.
    Each method is atomic. Every state change follows the tables in `lifecycle`; a transition they forbid raises
    `IllegalMove` and changes nothing. Failures of the database are raised as `StoreError`, never as a driver's
    exception.

    **Leases.** An engine joins under its own name and renews its registration. It is alive until its pulse expires.
    While it is alive, no other engine changes what it owns: its batches, the tickets its frontends await, the accounts
    it leads. After its pulse has expired, `lead` gives its accounts and `take_over` its unfinished batches to another
    engine; its `submitting` batches become `unknown` unless they are `unsent`, and its tickets are no longer awaited.
    Its lease may last longer than its pulse: until the lease ends, a create request that it started may be in flight.

    **Leaders.** Several engines may share a store. Each account has at most one live leader. Only the leader creates
    batches from the account's pools and spends its request budget; all engines admit calls, wait and deliver.

    **Order.** Within a pool the most urgent call (earliest rescue time, then oldest) is claimed first.

    **Retention.** Removes settled calls whose outcome was delivered and is older than requested, and undelivered
    ones after `UNDELIVERED_DAYS`. Never removes an open call, an unfinished batch, or a ledger entry.
    """

    @property
    def durable(self) -> bool: ...
    @property
    def pepper(self) -> bytes:
        """The secret used to hash credentials in this store."""

    async def aclose(self) -> None: ...
