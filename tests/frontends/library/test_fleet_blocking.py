"""The library door for threads: `Fleet` over the blocking `Anthropic` client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic, Stream
from anthropic.types import Message

from carpool import (
    BatchCollected,
    BatchSubmitted,
    CallAdmitted,
    CallExpired,
    Closed,
    Event,
    Fleet,
    FleetDispatcher,
    KeyConflict,
    NotStarted,
    WrongClient,
)
from carpool.frontends.library import exchange
from carpool.mock import Constant, expected_text, serve_in_thread
from tests.support.fleets import HASTY, KEY, QUICK, SOON, ask, blocking, faulty, small_times, text_of

PATIENCE = 10.0


class Heard:
    """A hook for threads: remembers, and can be waited for."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._news = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._news:
            self.all.append(event)
            self._news.notify_all()

    def wait(self, kind: type[Event], count: int = 1) -> list[Any]:
        def found() -> list[Any]:
            return [event for event in self.all if isinstance(event, kind)]

        with self._news:
            assert self._news.wait_for(lambda: len(found()) >= count, PATIENCE), self.all
            return found()


def test_many_threads_pool_into_few_batches() -> None:
    with blocking(SOON, replace(QUICK, linger_ms=300)) as (server, fleet), ThreadPoolExecutor(40) as threads:
        texts = [f"call {i}" for i in range(40)]
        calls = [threads.submit(fleet.submit, **ask(text)) for text in texts]
        answers = [call.result(PATIENCE) for call in calls]
        assert [text_of(one) for one in answers] == [expected_text(ask(text)) for text in texts]
        assert {type(one) for one in answers} == {Message}
        assert len(server.provider.batches) <= 3
        assert len(server.provider.bill.charges) == 40
        assert fleet.stats.batched_calls == 40
        assert fleet.metrics()["carpool.batched_calls"] == 40


def test_every_verb_and_lane() -> None:
    with blocking() as (server, fleet):
        assert type(fleet.submit_sync(**ask("1"))) is Message
        assert type(fleet.submit(**ask("2"), latency_budget_ms=2_000)) is Message
        assert type(fleet.submit_batch(**ask("3"))) is Message
        assert type(fleet.submit(**ask("4"), budget="10m")) is Message
        assert (fleet.stats.sync_calls, fleet.stats.batched_calls) == (2, 2)
        assert fleet.stats.paid == server.provider.bill.total()


def test_streams_travel_on_now() -> None:
    with blocking() as (_, fleet):
        stream = fleet.submit(**ask("flow"), stream=True)
        assert isinstance(stream, Stream)
        texts = [event.delta.text for event in stream if event.type == "content_block_delta"]
        assert "".join(texts) == expected_text(ask("flow"))


def test_failures_are_the_same_as_with_asyncio() -> None:
    with blocking(SOON, replace(QUICK, max_attempts=1)) as (server, fleet):
        with pytest.raises(anthropic.BadRequestError) as caught:
            fleet.submit(**ask("[error:invalid_request_error]"))
        assert caught.value.status_code == 400
        server.provider.script("line_expired")
        with pytest.raises(CallExpired):
            fleet.submit(**ask())
        fleet.submit(**ask("one"), key="k")
        with pytest.raises(KeyConflict):
            fleet.submit(**ask("two"), key="k")
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            fleet.submit(**ask(), colour="red")


def test_a_stuck_batch_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    with blocking(faulty(batch_stuck=1.0), HASTY) as (server, fleet):
        assert text_of(fleet.submit(**ask("hurry"), budget="2s")) == expected_text(ask("hurry"))
        assert [charge.kind for charge in server.provider.bill.charges] == ["sync"]


def _interrupt(thread: threading.Thread) -> None:
    """What Ctrl-C does to the main thread, done to another one."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))


def test_an_interrupted_wait_takes_the_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while a call waits in its pool: the call is taken out, and is never sent."""
    waited = concurrent.futures.Future.result
    waiting = threading.Event()

    def interruptible(future: Any, timeout: float | None = None) -> Any:
        while True:  # as in the main thread, where a signal ends the wait
            try:
                waiting.set()
                return waited(future, 0.05 if timeout is None else timeout)
            except concurrent.futures.TimeoutError:
                if timeout is not None:
                    raise

    monkeypatch.setattr(exchange.asyncio, "run_coroutine_threadsafe", _patched(interruptible))
    heard = Heard()
    with blocking(SOON, replace(QUICK, linger_ms=1_000), hooks=[heard]) as (server, fleet):
        ended: list[BaseException] = []

        def work() -> None:
            try:
                fleet.submit(**ask("interrupted"))
            except BaseException as error:  # noqa: BLE001  the interrupt is what is looked for
                ended.append(error)

        thread = threading.Thread(target=work)
        waiting.clear()
        thread.start()
        assert waiting.wait(PATIENCE)
        heard.wait(CallAdmitted)
        _interrupt(thread)
        thread.join(PATIENCE)
        assert [type(error) for error in ended] == [KeyboardInterrupt]
        assert text_of(fleet.submit(**ask("after"))) == expected_text(ask("after"))
        assert [batch.size for batch in server.provider.batches] == [1]


def _patched(result: Callable[..., Any]) -> Callable[..., Any]:
    original = asyncio.run_coroutine_threadsafe

    def run(work: Any, loop: Any) -> Any:
        future = original(work, loop)
        future.result = lambda timeout=None: result(future, timeout)  # type: ignore[method-assign]
        return future

    return run


def test_outside_its_block_it_raises() -> None:
    with Anthropic(base_url="http://127.0.0.1:9", api_key=KEY) as client:
        fleet = Fleet(client)
        with pytest.raises(NotStarted, match="with Fleet"):
            fleet.submit(**ask())
        assert fleet.stats.sync_calls == 0
        fleet.close()


def test_closed_it_raises_and_is_not_opened_again() -> None:
    with blocking() as (_, fleet):
        fleet.submit_sync(**ask())
        fleet.close()
        fleet.close()
        with pytest.raises(Closed, match="Make a new one"):
            fleet.submit(**ask())
        with pytest.raises(Closed), fleet:
            pass
        assert fleet.stats.sync_calls == 1


def test_close_frees_every_thread_that_waits(tmp_path: Path) -> None:
    """A call in a stuck batch and one on `now` that takes long: both threads come back, with a typed error."""
    heard = Heard()
    config = replace(faulty(batch_stuck=1.0), sync_latency=Constant(60.0))
    with (
        blocking(config, hooks=[heard], store=tmp_path / "s.db") as (server, fleet),
        ThreadPoolExecutor(2) as threads,
    ):
        stuck = threads.submit(fleet.submit, **ask("stuck"))
        heard.wait(BatchSubmitted)
        slow = threads.submit(fleet.submit_sync, **ask("slow"))
        while not server.provider.requests_seen.count("messages"):
            threading.Event().wait(0.01)
        fleet.close(0.1)
        with pytest.raises(Closed, match="kept in the store"):
            stuck.result(PATIENCE)
        with pytest.raises(Closed):
            slow.result(PATIENCE)


def test_a_file_outlives_the_fleet(tmp_path: Path) -> None:
    with serve_in_thread(SOON) as server, Anthropic(base_url=server.url, api_key=KEY) as client:
        with Fleet(client, policy=QUICK, store=tmp_path / "s.db") as fleet:
            first = fleet.submit(**ask("keyed"), key="k")
        with Fleet(client, policy=QUICK, store=tmp_path / "s.db") as fleet:
            assert fleet.submit(**ask("keyed"), key="k") == first
        assert len(server.provider.bill.charges) == 1


def test_hooks_hear_of_batches() -> None:
    heard = Heard()
    with blocking(hooks=[heard]) as (_, fleet):
        fleet.submit(**ask())
        [collected] = heard.wait(BatchCollected)
        assert collected.results == {"succeeded": 1}


def test_wrong_clients_are_refused() -> None:
    with pytest.raises(WrongClient, match=r"Use carpool\.FleetDispatcher"):
        Fleet(AsyncAnthropic(api_key=KEY))
    with Anthropic(api_key=KEY) as client, pytest.raises(WrongClient, match=r"Use carpool\.Fleet with it"):
        FleetDispatcher(client)
    for thing in (None, "sk-key", 5, object()):
        with pytest.raises(WrongClient, match=r"anthropic\.Anthropic"):
            Fleet(thing)
        with pytest.raises(WrongClient, match=r"anthropic\.AsyncAnthropic"):
            FleetDispatcher(thing)
    with httpx2.Client() as plain, pytest.raises(TypeError, match=r"anthropic\.Anthropic"):
        Fleet(plain)
