"""The port to what must be kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from carpool.errors import CarpoolError
from carpool.keys import VirtualKey
from carpool.lifecycle import BatchState, TicketState
from carpool.model import (
    Admission,
    Admitted,
    Batch,
    CallRow,
    Due,
    Entry,
    Intent,
    Lane,
    OpenCalls,
    Outcome,
    Parcel,
    PoolView,
    Settled,
    Settlement,
    TicketView,
    Totals,
)


class Store(Protocol):
    """Keeps calls, batches, outcomes and the ledger.

    `durable` says whether what it keeps outlives the process.

    **Durability.** When an awaited method returns, what it wrote survives `kill -9`; it also survives a power cut,
    except what costs nothing to lose then: `record` and `delivered`. Methods are atomic: all of it or nothing. Every
    change of state obeys the tables in `lifecycle`; a move they forbid raises `IllegalMove` and changes nothing.
    Trouble below is raised as `StoreError`, never as a driver's exception.

    **Leases.** An engine joins under its own name and renews. It is alive while its pulse lasts, and what a live engine
    owns (its batches, the tickets its doors await, the accounts it leads) is touched by no other engine. When its pulse
    has stopped, `lead` gives its accounts and `take_over` its unfinished batches to another engine, its `submitting`
    ones are marked `unknown` unless they are `unsent`, and nobody awaits its tickets any more. Its lease may last
    longer than its pulse: a create that it began may be on its way until then.

    **Leaders.** Several engines may share a store. Each account has at most one leader among those alive: it alone
    makes batches of the account's pools and spends its budget of requests; all others admit, wait and deliver.

    **Order.** Within a pool the most pressing call (earliest rescue time, then oldest) is claimed first.

    **Retention.** Removes settled calls whose outcome was delivered and is older than asked for, and undelivered
    ones after `UNDELIVERED_DAYS`. Never removes an open call, an unfinished batch, or a ledger entry.
    """

    @property
    def durable(self) -> bool: ...
    @property
    def pepper(self) -> bytes:
        """The secret under which credentials are hashed in this store."""
        ...

    # engines
    async def join(self, engine: str, now: float, ttl: float, pulse: float | None = None) -> bool:
        """Takes or renews the engine's lease until now + ttl. It counts as alive until now + `pulse`, by default as
        long as its lease. Says whether it was alive until now: where not, others may have what it owned."""
        ...

    async def leave(self, engine: str) -> None:
        """Ends lease and pulse at once; what the engine owned can be taken over."""
        ...

    async def lead(self, engine: str, accounts: Iterable[str], now: float) -> set[str]:
        """Gives a live engine the leadership of those accounts that no live engine leads; says which of `accounts` it
        leads now: none where it is not alive itself. Ends with its pulse, or when it leaves."""
        ...

    async def leaders(self, now: float) -> Mapping[str, str]:
        """Account and engine, for every account that a live engine leads."""
        ...

    async def take_over(self, engine: str, credentials: Iterable[str], now: float) -> int:
        """Gives `engine` the unfinished batches of these credentials whose owner is not alive; says how many.

        Batches in `submitting` become `unknown` unless they are `unsent`, as of now or of when the owner's lease ends:
        its create may be on its way until then. Tickets awaited by engines that are not alive are awaited by nobody;
        those of them that were `sending` return to `boarded` where they have an unfinished batch, and else stay
        `sending` with nobody behind them when their lane is `now`, or return to `queued` when it is `batch`.
        """
        ...

    # calls
    async def admit(self, admission: Admission) -> Admitted:
        """Puts a call on disk, unless it is here already. In one transaction, in this order:

        1. A key that is known for this credential: its ticket, now awaited by the newcomer (with the newcomer's
           deadline and rescue time where it is still open), and its outcome if settled. Another fingerprint under
           the same key raises `KeyConflict`.
        2. Without a key: adoption. An undelivered ticket with the same fingerprint and credential that nobody
           awaits, the oldest first, becomes the newcomer's likewise. A ticket delivered within 60 s is given again
           only when `call.retry` is set. Where such a ticket is awaited by an engine that may be dead or alive,
           raises `Undecided` and changes nothing, unless the admission is `pressed`: ask again soon.
        3. Otherwise a fresh ticket: `queued` on lane `batch`, `sending` on lane `now`.
        """
        ...

    def admit_all(self, admissions: Sequence[Admission]) -> Awaitable[list[Admitted | CarpoolError]]:
        """`admit` for many, in order, in one transaction. Under way when this returns, so that calls which arrive
        while it is written can follow. A call that can't be admitted has its error in its place."""
        ...

    async def await_ticket(self, ticket: int, awaiter: str | None) -> None:
        """Says which engine's door holds the client of this ticket; None when the client is gone."""
        ...

    async def delivered(self, tickets: Sequence[int], now: float) -> None:
        """The clients of these tickets have their whole answer."""
        ...

    async def outcome(self, ticket: int, credential: str) -> Settled | None:
        """The outcome and what it cost, if there is one and the ticket belongs to this credential."""
        ...

    async def parcel(self, ticket: int) -> Parcel | None:
        """An open call, to send it on `now`; None when it is settled or unknown. `reason` is the one it was given
        when it was last admitted, released or requeued."""
        ...

    async def views(self, tickets: Sequence[int]) -> list[TicketView]:
        """Where these calls stand, those that are settled or unknown left out."""
        ...

    async def outcomes(self, tickets: Sequence[int]) -> list[Settled]:
        """The outcomes of those tickets that are settled, and what they cost, for an engine whose own doors await
        them."""
        ...

    async def cancel(self, ticket: int, outcome: Outcome) -> bool:
        """Settles a ticket that is `queued`; False, and no change, when it is anywhere else."""
        ...

    async def pools(self, credentials: Iterable[str]) -> list[PoolView]:
        """The pools of these credentials with `queued` calls on lane `batch`."""
        ...

    async def due(self, credentials: Iterable[str], until: float, limit: int, awaiter: str | None = None) -> list[Due]:
        """Open calls to be sent on `now`, earliest first: `queued` or `boarded`, rescue time at or before `until`,
        and either awaited or on lane `now`; with `awaiter` only those that this engine awaits. Calls that nobody
        waits for are not rescued."""
        ...

    async def next_due(self, credentials: Iterable[str], awaiter: str | None = None) -> float | None:
        """The earliest rescue time among the calls that `due` would ever return."""
        ...

    async def start_sending(self, entry: Entry, engine: str, now: float) -> bool:
        """Before a purchase on `now`: the ticket becomes `sending` and the attempt stands in the ledger as unknown,
        in one transaction. Idempotent under the entry's identity. The engine is then in charge of the ticket and may
        try again under a new attempt. False, and no change, when the ticket is settled or unknown, or another engine
        that is alive is sending it."""
        ...

    async def stop_sending(self, ticket: int) -> bool:
        """A purchase on `now` brought no answer: the ticket returns to its unfinished batch, which is all that can
        still answer it; its rescue time becomes its deadline, when the wait is over. False, and no change, when it has
        no such batch."""
        ...

    async def attempts(self, ticket: int) -> int:
        """How many purchases on `now` the ledger knows for this ticket."""
        ...

    # batches
    async def intend(self, intent: Intent) -> Batch | None:
        """Claims calls of a pool and writes the batch row `submitting`, in one transaction; None when none is left.
        At least one call is claimed even if it alone is over `max_bytes`. A call that is awaited and due at `at` is
        left out: it travels on `now`. Where the intent names an account, None also when its owner is not alive at `at`
        or does not lead it."""
        ...

    async def still_mine(self, batch: int, owner: str, until: float) -> bool:
        """Whether the batch is `submitting`, owned by `owner`, and the owner's lease lasts until `until`."""
        ...

    async def depart(self, batch: int, owner: str, until: float, now: float) -> bool:
        """As `still_mine`; and where it is, it is on disk with the same stroke that its create goes out now: the batch
        is no longer `unsent`."""
        ...

    def lines(self, batch: int) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Tickets and bodies of the batch in chunks, in a stable order, without holding them all in memory."""
        ...

    async def move(self, batch: int, target: BatchState, *, owner: str | None = None, **changes: object) -> Batch:
        """Moves a batch and sets the named fields of its row (`sent_at`, `resolved_at`, `provider_id`,
        `expires_at`, `ended_at`, `clock_offset`, `abandoned`, `note`, `unsent`). With `owner` it raises `IllegalMove`,
        and changes nothing, when the batch is another engine's by now."""
        ...

    async def annotate(self, batch: int, **changes: object) -> None:
        """Sets fields of a batch row without moving it."""
        ...

    async def release(
        self, batch: int, target: BatchState, lane: Lane, now: float, reason: str, owner: str | None = None
    ) -> int:
        """Moves the batch and returns its open `boarded` tickets to `queued`, in one transaction; says how many. With
        `owner` it raises `IllegalMove`, and changes nothing, when the batch is another engine's by now.
        On lane `now` they are due at once. It counts as a requeue unless the batch was refused. Tickets that are
        `sending` keep travelling, without the batch."""
        ...

    async def batches(self, owner: str) -> list[Batch]:
        """The unfinished batches of this engine, oldest first."""
        ...

    async def batch(self, batch: int) -> Batch | None: ...
    async def open_calls(self, batch: int) -> OpenCalls: ...
    async def tidy(self, batch: int, after: int, limit: int) -> int | None:
        """Removes what the settled calls of a batch need no more, of at most `limit` of them above `after`; says how
        far it came, None when there were no more. Until then a settled call may keep its body."""
        ...

    async def unmentioned(self, batch: int, after: int, limit: int) -> list[int]:
        """Tickets of the batch above `after`, settled ones too, that have no line of this purchase in the ledger;
        in rising order."""
        ...

    async def known_provider_ids(self, credential: str) -> set[str]:
        """Provider ids of all batches that are surely ours, so that they are no suspects. One that was ruled out for
        one unresolved batch is not among them: it may be another's."""
        ...

    async def suspect(self, batch: int, provider_id: str, verdict: str) -> None:
        """Remembers a suspect of an unresolved batch: verdict `watched` or `stranger`."""
        ...

    async def suspects(self, batch: int) -> dict[str, str]: ...

    # settling
    async def settle(self, settlements: Sequence[Settlement], now: float) -> list[bool]:
        """One transaction. For each in turn: an `outcome` settles the ticket unless it is settled already; a
        `requeue` returns it to `queued` (or, where it is `sending`, leaves it travelling without its batch); the
        `entry` is written under its identity: a new one is inserted, one that stands as unknown is completed, one
        that is complete stays; without tags it takes the call's. An entry whose outcome came second is written as
        `duplicate` (a `rescue` stays one), with nothing in `would_have_paid`: the answer that was used has that.
        Answers, for each, whether its outcome is now the ticket's outcome."""
        ...

    def subscribe(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with tickets that were settled, by whichever engine. What it gives
        back ends that. A hint, not a promise: it may name tickets twice, and tickets that the listener never met. No
        tickets at all mean that some may have gone untold."""
        ...

    def watch(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with credentials of which calls were admitted, by whichever engine.
        What it gives back ends that. A hint, as above. No credentials at all mean that anything may have changed: calls
        were returned to their queue, an engine left, or some hints were lost."""
        ...

    async def nudge(self, provider: str, provider_id: str) -> bool:
        """Somebody says that a batch, by the id that its provider gave it, has ended: whoever follows it is told, in
        whichever process. False, and nobody is told, where no unfinished batch has this id."""
        ...

    def heed(self, listener: Callable[[Sequence[int]], None]) -> Callable[[], None]:
        """Calls the listener, on the event loop, with batches of which `nudge` was told, by whichever engine. What it
        gives back ends that. A hint, as above, and one that may be lost."""
        ...

    # books and memory
    async def attempt(self, entry: Entry) -> None:
        """Before a purchase for a call that has no ticket here (plain `now`): it stands in the ledger as unknown."""
        ...

    def attempted(self, entry: Entry) -> bool:
        """As `attempt`, at once and without waiting. False where this store can't: then nothing was written."""
        ...

    def record(self, entry: Entry, *, unhurried: bool = False) -> Awaitable[None]:
        """Writes an entry for a call that has no ticket here (plain `now`), as `settle` would. It is handed over at
        once, so entries are written in the order of these calls; awaited, it is written. Need not be awaited.
        `unhurried`: it may be written a moment later than others, though never after what was handed over later."""
        ...

    def completed(self, entry: Entry, told: Callable[[BaseException | None], None]) -> None:
        """As `record`, unhurried and with nobody to await it: `told` hears, on the event loop, when it is written, or
        why it is not."""
        ...

    async def totals(self, credentials: Sequence[str] | None = None) -> list[Totals]:
        """The ledger summed up; with `credentials` only what these bought."""
        ...

    async def entries(self, ticket: int) -> list[Entry]: ...
    async def counts(self) -> Mapping[str, int]:
        """Rows by state: `tickets.queued`, `batches.open`, … and `batches.bought` (ever bought)."""
        ...

    async def listed_calls(
        self, before: int | None, state: TicketState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[CallRow]:
        """Kept calls below the ticket `before`, newest first, all or those in one state. For people who look.
        With `credentials` only theirs, as far as they are among the newest of all."""
        ...

    async def listed_call(self, ticket: int, credentials: Sequence[str] | None = None) -> CallRow | None:
        """One call; with `credentials` only where it is theirs."""
        ...

    async def listed_batches(
        self, before: int | None, state: BatchState | None, limit: int, credentials: Sequence[str] | None = None
    ) -> list[Batch]:
        """Batches below the number `before`, newest first, all or those in one state, finished ones too. With
        `credentials` only theirs."""
        ...

    # virtual keys
    async def keys(self, known: int | None = None) -> tuple[int, list[VirtualKey]] | None:
        """All virtual keys, oldest first, and the number of their last change; None when that is `known`. Uses are no
        change."""
        ...

    async def write_keys(self, keys: Sequence[VirtualKey]) -> None:
        """Adds keys, or replaces owner, profile and ends of those whose digest is here. One change."""
        ...

    async def used_keys(self, uses: Mapping[str, float]) -> None:
        """When keys, by their digest, were last used; never earlier than it stood. May be lost in a power cut."""
        ...

    async def remember(self, kind: str, key: str, value: str, now: float) -> None: ...
    async def recall(self, kind: str) -> Mapping[str, str]: ...
    async def retain(self, before: float, undelivered_before: float, limit: int) -> int:
        """Removes at most `limit` calls as the contract allows; says how many."""
        ...

    async def aclose(self) -> None: ...
