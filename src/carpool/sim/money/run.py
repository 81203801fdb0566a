"""What the parts of a run share: its trace and world, its calls, and the record of what was bought."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from carpool import dialects
from carpool.core.lifecycle import TicketState
from carpool.core.model import Call, Lane, PoolKey
from carpool.core.ports import Dialect
from carpool.planners.routing import Capabilities
from carpool.sim.money.agenda import Agenda
from carpool.sim.money.model import ROOT, ClientMarks, PurchaseKind, RunPurchase, Trace, Ttl
from carpool.sim.money.policies import MoneyPolicy
from carpool.sim.money.worlds import Latencies, ProviderWorld

BYTES_PER_TOKEN = 4
CREDENTIAL = "fleet"
ONE_POOL = PoolKey("", "", CREDENTIAL, "", (), "", "", "")


@dataclass(slots=True, eq=False)
class RunCall:
    """One turn that was asked for. `call` is what the planners see of it."""

    session: int
    turn: int
    call: Call
    bytes: int
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
    agenda: Agenda = field(default_factory=Agenda)
    purchases: list[RunPurchase] = field(default_factory=list)
    batches: int = 0
    api_calls: int = 0
    latencies: Latencies = field(init=False)
    dialect: Dialect = field(init=False)
    beta: Callable[[str], float] = field(init=False)  # model → batch price relative to `now`
    _reused: bytearray = field(init=False)  # by node: whether another prompt begins with it
    _systems: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.latencies = Latencies(self.world, self.trace, self.seed)
        self.dialect = dialects.get(self.trace.provider)
        capabilities = Capabilities()
        self.beta = lambda model: capabilities.of(self.trace.provider, self.dialect, model).batch_price
        self._reused = bytearray(len(self.trace.nodes))
        for node in self.trace.nodes:
            if node.parent != ROOT:
                self._reused[node.parent] = 1
        self._systems = _systems(self.trace)

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
    ) -> None:
        """Enter a purchase, with the marks that the policy sets on this lane."""
        turn = self.trace.sessions[call.session].turns[call.turn]
        marks = self._marks(call, turn.node, lane)
        system = ROOT if marks.system_ttl is None else self._systems[turn.node]
        self.purchases.append(
            RunPurchase(
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
        )

    def _marks(self, call: RunCall, node: int, lane: Lane) -> ClientMarks:
        if (kept := self.client_marks(call.session)) is not None:
            return kept
        ttl = self.policy.now_ttl if lane is Lane.NOW else self.policy.batch_ttl
        return ClientMarks(ttl, ttl) if self.worth_marking(node) else ClientMarks()

    def client_marks(self, session: int) -> ClientMarks | None:
        """The recorded marks of a session's client, if the policy keeps them."""
        return self.trace.sessions[session].marks if self.policy.keeps_marks else None

    def life_on_now(self, session: int) -> Ttl | None:
        """How long the prompts of a session are marked to live on `now`."""
        kept = self.client_marks(session)
        return self.policy.now_ttl if kept is None else kept.ttl

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
