"""Runs a fleet of agents through a real proxy to the mock: HTTP over sockets, with Anthropic's own client.

The clock is virtual all the same: it jumps to the next event once no socket has anything to read. So hours of pauses
and batches take seconds, and everything on the network happens in the instant in which it begins.

How many tokens a prompt has is the mock's business. The agents take it from the usage in their answers, and `trace` is
made from that afterwards.
"""

from __future__ import annotations

import asyncio
import fcntl
import random
import selectors
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from anthropic import AsyncAnthropic
from anthropic.types import Message
from uvicorn.server import ServerState

from carpool.core.model import Call, Lane, ticket_text
from carpool.core.ports import Store
from carpool.dialects import get
from carpool.engine import Engine, Event, Keyring, Upstream
from carpool.engine.events import CallRescued
from carpool.frontends.proxy import Proxy
from carpool.frontends.proxy.http.connection import Connection
from carpool.http import Http1Client
from carpool.mock import Charge, Constant, MockAnthropic, MockConfig, serve
from carpool.planners.forecast import Forecast
from carpool.planners.policy import RoutingPolicy
from carpool.planners.routing import Decision
from carpool.sim.money.model import ROOT, ClientMarks, Node, Trace, TraceSession, TraceTurn
from carpool.sim.money.worlds import ProviderWorld
from carpool.sim.timeline import START, Timeline, VirtualClock, _Jumping, run
from carpool.stores import open_store

from .turn_latencies import Place, TurnLatencies

KEY = "sk-money"
GRACE_S = 0.0005  # real time in which the kernel delivers what was sent
SENDING_S = 0.05  # the same, while it holds data back
SIOCOUTQNSD = 0x894B
RESOLUTION_S = 1e-6  # two neighbouring times in this century are a quarter of that apart
DAY = 86_400.0
COLLECTED_S = 300.0  # in which a batch that has ended is in the ledger
TICKET = "x-carpool-ticket"
MARK = {"type": "ephemeral"}


class _AfterSockets(_Jumping):
    """Time advances when no socket is ready, and none has anything left to send: a full window is opened by the kernel
    when it likes."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = selectors.SelectSelector.select(self, 0)
        while not ready and timeout != 0:
            sending = any(_unsent(key.fd) for key in self.get_map().values())
            ready = selectors.SelectSelector.select(self, SENDING_S if sending else GRACE_S)
            if not sending:
                break
        return ready or super().select(timeout)


def _unsent(number: int) -> int:
    """Bytes that the kernel has taken, and not yet passed on."""
    try:
        return int.from_bytes(fcntl.ioctl(number, SIOCOUTQNSD, bytes(4)), sys.byteorder)
    except OSError:  # it listens, or is no connection
        return 0


class SocketTimeline(Timeline):
    """Its times count from 1970, as the engine's: each is rounded once. The poll pace doubles whatever differs."""

    def __init__(self) -> None:
        self._jumping = _AfterSockets()
        self._jumping.time = START
        asyncio.SelectorEventLoop.__init__(self, self._jumping)
        self._clock_resolution = RESOLUTION_S

    def now(self) -> float:
        return self.time()

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> Any:  # type: ignore[override]
        return socket.getaddrinfo(host, port, **options)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """In no thread: time would not wait for it."""
        done = self.create_future()
        done.set_result(func(*args))
        return done


@dataclass(frozen=True)
class AgentPlan:
    """What an agent will ask. `texts` are the texts of its turns."""

    model: str
    system: str
    starts: float
    texts: Sequence[str]
    think_s: Sequence[float]
    sync_s: Sequence[float]
    max_tokens: int
    stream: bool


@dataclass
class SeenTurn:
    """How one turn went, as its client and the proxy saw it."""

    asked: float
    answered: float
    lane: Lane
    rescued: bool
    input_tokens: int
    output_tokens: int
    body_bytes: int


def fleet(seed: int, calls: int) -> list[AgentPlan]:
    """Agents of several kinds, until they have so many turns together. Three kinds share a system prompt each: a large
    one, one below the least that is cached, and one with which prompts grow beyond a dearer tier."""
    rng = random.Random(seed)
    plans: list[AgentPlan] = []
    left = calls
    while left:
        kind, model = rng.choice(
            [
                ("large", "claude-sonnet-4-6"),
                ("large", "claude-haiku-4-5"),
                ("small", "claude-sonnet-4-6"),
                ("long", "claude-haiku-5-5"),
            ]
        )
        turns = min(left, rng.choice([1, 4, 8, 16]))
        left -= turns
        text = {"large": 40_000, "small": 2_000, "long": 300_000}[kind]
        fresh = [rng.randint(400, 12_000 if kind != "long" else 30_000) for _ in range(turns)]
        number = len(plans)
        plans.append(
            AgentPlan(
                model,
                f"{kind} {'x' * text}",
                rng.random() * 900,
                [f"agent {number} turn {turn} {'y' * size}" for turn, size in enumerate(fresh)],
                [rng.choice([0.0, 4.0, 4.0, 40.0, 400.0, 4000.0]) * rng.random() for _ in range(turns)],
                [rng.choice([2.0, 6.0, 30.0]) * (0.5 + rng.random()) for _ in range(turns)],
                rng.choice([200, 1000, 4000]),
                rng.random() < 0.3,
            )
        )
    return plans


def skeleton(plans: Sequence[AgentPlan]) -> Trace:
    """The trace without its sizes: sessions, their turns and times."""
    nodes: list[Node] = []
    systems: dict[str, int] = {}
    sessions = []
    for number, plan in enumerate(plans):
        if plan.system not in systems:
            nodes.append(Node(ROOT, 0))
            systems[plan.system] = len(nodes) - 1
        node = system = systems[plan.system]
        turns = []
        for think_s, sync_s in zip(plan.think_s, plan.sync_s, strict=True):
            nodes.append(Node(node, 0))
            node = len(nodes) - 1
            turns.append(TraceTurn(node, 0, think_s, sync_s))
        sessions.append(
            TraceSession(
                f"agent {number}",
                START + plan.starts,
                plan.model,
                tuple(turns),
                system=system,
                max_output_tokens=plan.max_tokens,
                marks=ClientMarks("5m", "5m"),
            )
        )
    return Trace("fleet", nodes, tuple(sessions))


@dataclass
class ProxyRun:
    plans: Sequence[AgentPlan]
    world: ProviderWorld
    seed: int
    budget_s: float | None
    turns: dict[Place, SeenTurn] = field(default_factory=dict)
    charges: Sequence[Charge] = ()
    paid: int = 0  # nano-dollars, as the mock bills
    booked: int = 0  # the same, as carpool's ledger has it

    def __post_init__(self) -> None:
        self._trace = skeleton(self.plans)
        self._latencies = TurnLatencies(self.world, self._trace, self.seed)
        self._systems: dict[str, int] = {}
        self._rescued: set[str] = set()
        self._sizes: dict[str, int] = {}  # of bodies, by ticket
        self._timeline = SocketTimeline()

    def go(self) -> None:
        run(self._go(), self._timeline)

    @property
    def trace(self) -> Trace:
        """With the sizes that the mock has billed."""
        nodes = list(self._trace.nodes)
        sessions = []
        for number, session in enumerate(self._trace.sessions):
            nodes[session.system] = Node(ROOT, self._systems[self.plans[number].system])
            turns = []
            for position, turn in enumerate(session.turns):
                seen = self.turns[number, position]
                nodes[turn.node] = Node(nodes[turn.node].parent, seen.input_tokens)
                turns.append(replace(turn, output_tokens=seen.output_tokens, body_bytes=seen.body_bytes))
            sessions.append(replace(session, turns=tuple(turns)))
        return Trace(self._trace.name, nodes, tuple(sessions))

    def place_of(self, charge: Charge) -> Place:
        return self._latencies.places[charge.fingerprint]

    # ------------------------------------------------------------ both ends

    async def _go(self) -> None:
        config = MockConfig(
            seed=self.seed,
            request_latencies=self._latencies,
            cancel_latency=Constant(self.world.cancel_s),
            batch_rpm=self.world.batch_rpm,
            expiry_s=self.world.expiry_s,
        )
        provider = MockAnthropic(config, now=self._timeline.now)
        async with AsyncExitStack() as stack:
            mock = await stack.enter_async_context(serve(provider=provider))
            store, url = await stack.enter_async_context(self._proxy(mock.url))
            await self._measure_systems(mock.url)
            await self._ask_all(url)
            ended = max((batch.ends_at for batch in provider.batches), default=0.0)
            await asyncio.sleep(ended - self._timeline.now() + COLLECTED_S)
            self.booked = sum(one.paid for one in await store.totals())
        self.charges = list(provider.bill.charges)
        self.paid = provider.bill.total()

    @asynccontextmanager
    async def _proxy(self, provider: str) -> AsyncIterator[tuple[Store, str]]:
        store = await open_store(None, secret=b"money", inline=True)
        client, clock = Http1Client(), VirtualClock(self._timeline)
        upstreams = {"anthropic": Upstream("anthropic", provider, get("anthropic"), client)}
        engine = Engine(
            store=store,
            clock=clock,
            upstreams=upstreams,
            keyring=Keyring(store.pepper),
            policy=RoutingPolicy(),
            forecast=Forecast(learns=False),  # as the simulated policy has it
            hooks=(self._tell,),
            rng=random.Random(self.seed),
        )
        decide = engine.decide

        def decided(call: Call, *given: Any, **more: Any) -> Decision:
            self._sizes[ticket_text(call.ticket)] = len(call.body)
            return decide(call, *given, **more)

        engine.decide = decided  # type: ignore[method-assign]
        await engine.start()
        async with _listening(Proxy(engine, upstreams, clock)) as url:
            yield store, url
        await engine.close(0.0)
        await client.aclose()

    def _tell(self, event: Event) -> None:
        if isinstance(event, CallRescued):
            self._rescued.add(event.ticket)

    # ------------------------------------------------------------ agents

    async def _measure_systems(self, provider: str) -> None:
        async with AsyncAnthropic(base_url=provider, api_key=KEY) as client:
            asked: Any = [{"role": "user", "content": "hello"}]
            for plan in self.plans:
                if plan.system not in self._systems:
                    alone = await client.messages.count_tokens(model=plan.model, messages=asked)
                    both = await client.messages.count_tokens(model=plan.model, messages=asked, system=plan.system)
                    self._systems[plan.system] = both.input_tokens - alone.input_tokens

    async def _ask_all(self, proxy: str) -> None:
        headers = {} if self.budget_s is None else {"x-carpool-budget": f"{self.budget_s:g}s"}
        async with (
            AsyncAnthropic(
                base_url=proxy, api_key=KEY, max_retries=0, timeout=2 * DAY, default_headers=headers
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(len(self.plans)):
                group.create_task(self._agent(client, number))

    async def _agent(self, client: AsyncAnthropic, number: int) -> None:
        plan, said = self.plans[number], list[dict[str, Any]]()
        await asyncio.sleep(self._trace.sessions[number].starts - self._timeline.time())
        for position, text in enumerate(plan.texts):
            await asyncio.sleep(plan.think_s[position])
            asked = self._timeline.time()
            body = {
                "model": plan.model,
                "max_tokens": plan.max_tokens,
                "system": [{"type": "text", "text": plan.system, "cache_control": MARK}],
                "messages": [*said, _message("user", text, cache_control=MARK)],
            }
            self._latencies.know(body, (number, position))
            answer, ticket = await _ask(client, body, stream=plan.stream)
            self._note((number, position), asked, answer, ticket)
            said += [_message("user", text), _message("assistant", answer.content[0].text)]

    def _note(self, place: Place, asked: float, answer: Message, ticket: str) -> None:
        used = answer.usage
        read, written = used.cache_read_input_tokens or 0, used.cache_creation_input_tokens or 0
        self.turns[place] = SeenTurn(
            asked,
            self._timeline.time(),
            Lane.BATCH if used.service_tier == "batch" else Lane.NOW,
            ticket in self._rescued,
            used.input_tokens + read + written,
            used.output_tokens,
            self._sizes[ticket],
        )


def _message(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text, **more}]}


async def _ask(client: AsyncAnthropic, body: dict[str, Any], *, stream: bool) -> tuple[Message, str]:
    """The answer, and carpool's ticket."""
    if stream:
        async with client.messages.stream(**body) as streamed:
            return await streamed.get_final_message(), streamed.response.headers[TICKET]
    raw = await client.messages.with_raw_response.create(**body)
    return await raw.parse(), raw.headers[TICKET]


@asynccontextmanager
async def _listening(proxy: Proxy) -> AsyncIterator[str]:
    """Without uvicorn's own loop, which looks around ten times a second."""
    config = uvicorn.Config(
        proxy, http=Connection, log_level="critical", lifespan="off", proxy_headers=False, server_header=False
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(config, state, {}, loop), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
