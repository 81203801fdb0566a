"""What the parts of a run share: its trace and world, its calls, and the record of what was bought."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

from carpool import dialects
from carpool.core.lifecycle import TicketState
from carpool.core.model import Call, Lane, PoolKey
from carpool.core.ports import Dialect
from carpool.planners.forecast import Forecast
from carpool.sim.money.agenda import Agenda
from carpool.sim.money.billing import PriceTable
from carpool.sim.money.model import ROOT, TTLS, ClientMarks, PurchaseKind, RunPurchase, Trace
from carpool.sim.money.planned import Knowledge, RunRouter
from carpool.sim.money.policies import MoneyPolicy
from carpool.sim.money.worlds import Latencies, ProviderWorld

CREDENTIAL = "fleet"
ONE_POOL = PoolKey("", "", CREDENTIAL, "", (), "", "", "")


@dataclass(slots=True, eq=False)
class RunCall:
    """One turn that was asked for. `call` is what the planners see of it."""

    session: int
    turn: int
    call: Call
    bytes: int
    budget: float = math.inf  # of this call, in seconds
    task_ends: float = math.inf
    now_life: float = 0.0  # of its marks on `now`
    batch_life: float = 0.0
    pings: int = 0
    pool: PoolKey = ONE_POOL
    lane: Lane = Lane.NOW  # where it waits
    rescue_at: float = math.inf
    state: TicketState = TicketState.QUEUED
    batch: int | None = None
    requeues: int = 0
    attempts: int = 0  # on `now`
    refused: bool = False
    settled: bool = False

    @property
    def ticket(self) -> int:
        return self.call.ticket


@dataclass(slots=True)
class FleetRun:
    trace: Trace
    world: ProviderWorld
    policy: MoneyPolicy
    seed: int
    table: PriceTable = field(default_factory=PriceTable)
    knowledge: Knowledge | None = None  # from an earlier run; None: nothing is known yet
    every_poll: bool = True  # otherwise only polls that find something are made, at about the same times
    purchases: list[RunPurchase] = field(default_factory=list)
    batches: int = 0
    api_calls: int = 0
    agenda: Agenda = field(init=False)
    latencies: Latencies = field(init=False)
    dialect: Dialect = field(init=False)
    router: RunRouter = field(init=False)
    forecast: Forecast = field(init=False)
    _reused: bytearray = field(init=False)  # by node: whether another prompt begins with it
    _systems: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.latencies = Latencies(self.world, self.trace, self.seed, self.began)
        self.agenda = Agenda(self.began)
        self.dialect = dialects.get(self.trace.provider)
        self._reused = bytearray(len(self.trace.nodes))
        for node in self.trace.nodes:
            if node.parent != ROOT:
                self._reused[node.parent] = 1
        self._systems = _systems(self.trace)
        if self.policy.learns and self.knowledge is None:
            self.knowledge = Knowledge()
        self.forecast = self.policy.forecast if self.knowledge is None else self.knowledge.forecast
        self.router = self.policy.router(self)

    @property
    def began(self) -> float:
        """When the run begins: after what was learned before."""
        return 0.0 if self.knowledge is None else self.knowledge.until

    def buy(
        self,
        call: RunCall,
        lane: Lane,
        kind: PurchaseKind,
        starts: float,
        begins: float,
        ends: float,
        *,
        output: int | None = None,
        batch: int | None = None,
        sent: float | None = None,
    ) -> None:
        """Enter a purchase, with the marks that the policy sets on this lane. In a batch it was `sent` earlier than the
        provider begins with it."""
        turn = self.trace.sessions[call.session].turns[call.turn]
        marks = self._marks(call, lane)
        system = ROOT if marks.system_ttl is None else self._systems[turn.node]
        purchase = RunPurchase(
            call.session,
            call.turn,
            lane,
            kind,
            starts,
            begins,
            ends,
            turn.node,
            turn.output_tokens if output is None else output,
            marks.ttl,
            None if system == ROOT else marks.system_ttl,
            system,
            batch,
        )
        self.purchases.append(purchase)
        self.router.bought(purchase, starts if sent is None else sent)

    def _marks(self, call: RunCall, lane: Lane) -> ClientMarks:
        if (kept := self.client_marks(call.session)) is not None:
            return kept
        ttl = TTLS[call.now_life if lane is Lane.NOW else call.batch_life]
        return ClientMarks(ttl, ttl)

    def client_marks(self, session: int) -> ClientMarks | None:
        """The recorded marks of a session's client, if the policy keeps them."""
        return self.trace.sessions[session].marks if self.policy.keeps_marks else None

    def worth_marking(self, node: int) -> bool:
        """A client marks nothing in a prompt that neither continues another nor is continued."""
        return self._reused[node] == 1 or self.trace.nodes[node].parent != ROOT


def _systems(trace: Trace) -> array[int]:
    """By node: where tools and system prompt of its session end, if its path leads through that."""
    found = array("l", [ROOT]) * len(trace.nodes)
    for system in {session.system for session in trace.sessions} - {ROOT}:
        found[system] = system
    for index, node in enumerate(trace.nodes):  # a parent stands before its children
        if found[index] == ROOT and node.parent != ROOT:
            found[index] = found[node.parent]
    return found
