"""`carpool demo`: a small fleet finishes its calls before your eyes, without a key, a network or a bill."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from carpool.cli.demo_board import (
    BATCH,
    FLEET,
    NOW,
    RESCUE,
    REVIEWERS,
    Board,
    DemoVerdict,
    Role,
    conclude,
    lane_table,
    log_to,
    say_nothing,
    since,
)
from carpool.core.clock import SystemClock
from carpool.core.errors import ConfigError
from carpool.core.model import Totals
from carpool.engine import Event
from carpool.engine.events import BatchSubmitted
from carpool.frontends.library.fleet import FleetDispatcher
from carpool.mock import Constant, MockAnthropic, MockConfig, MockServer, Uniform
from carpool.mock import serve as serve_mock
from carpool.planners.policy import RoutingPolicy
from carpool.stores import peek

TIGHT_MS = 5_000
LONGEST_S = 90.0  # more than twice the longest run so far
WORLD = MockConfig(
    batch_latency=Uniform(3.5, 5.5),
    sync_latency=Uniform(0.4, 1.4),
    cancel_latency=Constant(1.0),
)


def demo(
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the calls in this file, to look at afterwards; else none is kept."),
    ] = None,
) -> None:
    """Watch a small fleet at work: 60 calls, some in a hurry, some patient, against a stand-in provider.

    Needs no key and no network, and costs nothing. It takes about 20 seconds and ends with what each lane cost, beside
    the provider's own bill.
    """
    terminal = sys.stdout.isatty()
    console = Console(force_terminal=terminal)
    logging.getLogger("uvicorn.error").addFilter(_not_cancelled)
    with _store(store) as path:
        before = asyncio.run(peek(path))[0] if path.is_file() else []
        try:
            verdict = asyncio.run(_demo(_client_class(), path, before, console, terminal))
        except (ExceptionGroup, TimeoutError) as error:
            console.print(f"The demo did not finish: {_first(error)!r}.", style="bold red", markup=False)
            raise typer.Exit(1) from error
    conclude(console, verdict, store)
    if not verdict.equal:
        raise typer.Exit(1)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Hide tracebacks of the mock provider's open requests, which end on Ctrl-C."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _client_class() -> Any:
    try:
        from anthropic import AsyncAnthropic
    except ImportError as error:
        raise ConfigError(
            "The demo drives the real SDK, and anthropic is not installed. Install it with pip install anthropic."
        ) from error
    return AsyncAnthropic


@contextmanager
def _store(named: Path | None) -> Iterator[Path]:
    if named is not None:
        yield named
        return
    with TemporaryDirectory(prefix="carpool-demo-") as folder:
        yield Path(folder) / "carpool.db"


# ---------------------------------------------------------------- run


async def _demo(
    client_class: Any, store: Path, before: Sequence[Totals], console: Console, terminal: bool
) -> DemoVerdict:
    clock = SystemClock()
    start = clock.now()
    board = Board(FLEET, lambda: clock.now() - start, say_nothing if terminal else log_to(console))
    async with serve_mock(WORLD) as server, client_class(base_url=server.url, api_key="demo") as client:
        _introduce(console, server)
        with _shown(board, console, terminal):
            await _drive(client, store, board, server.provider, clock)
        if not terminal:
            console.print(board.batch_table())
        totals = since(before, (await peek(store))[0])
        console.print(lane_table(board, totals))
        return DemoVerdict(totals, server.provider.bill.total(), sum(map(len, board.waits.values())))


def _introduce(console: Console, server: MockServer) -> None:
    calls = sum(role.count for role in FLEET)
    console.print(
        f"{calls} calls go to a stand-in provider on {server.url}. Those who can't wait are answered at once, at full "
        "price; the others share batches, at half price. One batch will get stuck.\n",
        highlight=False,
    )


@contextmanager
def _shown(board: Board, console: Console, terminal: bool) -> Iterator[None]:
    if not terminal:
        yield
        return
    with Live(board, console=console, refresh_per_second=8):
        yield


async def _drive(client: Any, store: Path, board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    def hook(event: Event) -> None:
        board.hear(event)
        if isinstance(event, BatchSubmitted):
            _hold_if_reviews(event.provider_id, board, provider)

    policy = RoutingPolicy(sync_max_latency_ms=TIGHT_MS)
    dispatcher = FleetDispatcher(client, policy=policy, store=store, hooks=[hook], close_timeout=1.0)
    async with asyncio.timeout(LONGEST_S), dispatcher as fleet, asyncio.TaskGroup() as watch:
        watcher = watch.create_task(_watch_cancels(board, provider, clock))
        async with asyncio.TaskGroup() as group:
            for role in FLEET:
                for at, params in role.calls():
                    group.create_task(_call(fleet, role, at, params, board, clock))
        watcher.cancel()


async def _call(
    fleet: FleetDispatcher, role: Role, at: float, params: Mapping[str, Any], board: Board, clock: SystemClock
) -> None:
    await clock.sleep(at)
    start = clock.now()
    board.asked(role)
    answer = await fleet.submit(budget=role.budget_s, tags={"role": role.name}, **params)
    board.answered(role, _lane_of(role, answer), clock.now() - start)


def _lane_of(role: Role, answer: Any) -> str:
    """The lane of a response, by its service tier. A call with a budget that was bought at full price was rescued."""
    if answer.usage.service_tier == "batch":
        return BATCH
    return NOW if role.budget_s is not None and role.budget_s * 1000 <= TIGHT_MS else RESCUE


def _hold_if_reviews(provider_id: str, board: Board, provider: MockAnthropic) -> None:
    """Simulate a stuck batch: the one of the reviewers."""
    first = provider.batch(provider_id).requests[0]
    if getattr(first, "snippet", "").startswith(REVIEWERS.task):
        provider.hold_batch(provider_id)
        board.held(provider_id)


async def _watch_cancels(board: Board, provider: MockAnthropic, clock: SystemClock) -> None:
    while True:
        for provider_id in board.stuck.intersection(provider.canceled):
            board.cancelling(provider_id)
        await clock.sleep(0.1)
