"""Bad input of every kind: a typed error that says what to do, nothing lost, never a hang."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

import carpool.engine.batch.api
from carpool import (
    BadCall,
    BadParams,
    CarpoolError,
    Closed,
    ConfigError,
    DeadlineMissed,
    FleetDispatcher,
    RoutingPolicy,
    StoreCorrupt,
    StoreError,
    StoreLocked,
    StoreTooNew,
    StoreUnwritable,
    WrongSecret,
)
from carpool.mock import MockAnthropic, expected_text, serve
from tests.support.fleets import (
    HASTY,
    KEY,
    QUICK,
    SOON,
    ask,
    dispatching,
    provided,
    riding,
    small_times,
    soon,
    text_of,
    until,
)

VERBS = ("submit", "submit_sync", "submit_batch")

# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("verb", VERBS)
async def test_unknown_parameters(verb: str) -> None:
    async with riding() as scene:
        with pytest.raises(BadParams, match="'colour'") as caught:
            await soon(getattr(scene.fleet, verb)(**ask(), colour="red"), 2)
        assert isinstance(caught.value, TypeError)
        assert scene.log.requests == []


def _endless() -> list[Any]:
    knot: list[Any] = []
    knot.append(knot)
    return knot


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", float("nan"), "\ud800", _endless(), 1j],
    ids=["object", "bytes", "nan", "half a pair", "a knot", "complex"],
)
async def test_parameters_that_are_not_json(verb: str, value: Any) -> None:
    async with riding() as scene:
        with pytest.raises(BadCall) as caught:
            await soon(getattr(scene.fleet, verb)(**ask(), extra_body={"x": value}), 3)
        assert str(caught.value)
        assert "hello" not in str(caught.value)
        assert scene.log.requests == []


@pytest.mark.parametrize("missing", ["model", "max_tokens", "messages"])
async def test_parameters_that_are_missing(missing: str) -> None:
    params = ask()
    del params[missing]
    async with riding() as scene:
        with pytest.raises(BadParams, match=missing):
            await soon(scene.fleet.submit(**params), 2)


async def test_parameters_of_the_wrong_kind() -> None:
    async with riding() as scene:
        for wrong in ({"model": 5}, {"max_tokens": "many"}, {"messages": "hello"}, {"messages": {}}):
            with pytest.raises(BadCall, match=f"`{next(iter(wrong))}` must be"):
                await soon(scene.fleet.submit(**{**ask(), **wrong}), 2)
        assert scene.log.requests == []


async def test_what_the_provider_refuses_is_its_own_word() -> None:
    async with riding() as scene:
        for lane in ("now", "batch"):
            with pytest.raises(anthropic.NotFoundError, match="no-such-model"):
                await soon(scene.fleet.submit(**{**ask(), "model": "no-such-model"}, lane=lane))


async def test_a_client_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)
    async with provided() as (server, log):
        try:
            client = AsyncAnthropic(base_url=server.url)
        except anthropic.AnthropicError:
            return  # the SDK says so itself
        async with client, FleetDispatcher(client, policy=QUICK, close_timeout=0.5) as fleet:
            with pytest.raises((CarpoolError, anthropic.AnthropicError)):
                await soon(fleet.submit(**ask()), 3)
        assert log.requests == []


# ---------------------------------------------------------------- life


async def test_a_closed_dispatcher() -> None:
    async with riding() as scene:
        await scene.fleet.close()
        await scene.fleet.close()
        for verb in VERBS:
            with pytest.raises(Closed, match="Make a new one"):
                await soon(getattr(scene.fleet, verb)(**ask()), 1)
        with pytest.raises(Closed, match="Make a new one"):
            await scene.fleet.__aenter__()


async def test_a_dispatcher_is_entered_once() -> None:
    async with riding() as scene:
        with pytest.raises(Closed, match="Make a new one"):
            await scene.fleet.__aenter__()
        assert text_of(await soon(scene.fleet.submit(**ask()))) == expected_text(ask())


async def test_a_client_that_was_closed() -> None:
    async with riding(max_retries=0) as scene:
        await scene.client.close()
        with pytest.raises(anthropic.APIConnectionError):
            await soon(scene.fleet.submit_sync(**ask()), 3)


# ---------------------------------------------------------------- a provider that can't be reached


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_nobody_listens_on_now() -> None:
    async with dispatching(f"http://127.0.0.1:{_free_port()}") as fleet:
        with pytest.raises(anthropic.APIConnectionError) as caught:
            await soon(fleet.submit(**ask(), budget="1s"), 5)
        assert not isinstance(caught.value, anthropic.APITimeoutError)


async def test_nobody_listens_and_a_patient_call_waits_for_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carpool.engine.batch.api, "PAUSE_S", 0.2)
    port = _free_port()
    async with dispatching(f"http://127.0.0.1:{port}") as fleet:
        call = asyncio.create_task(fleet.submit(**ask("patient")))
        await until(lambda: fleet.stats.batches_refused)
        assert not call.done()
        provider = MockAnthropic(SOON)
        async with serve(provider=provider, port=port):
            assert text_of(await soon(call)) == expected_text(ask("patient"))
        assert len(provider.bill.charges) == 1
        assert fleet.stats.batches_submitted == 1


async def test_nobody_listens_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch)
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with dispatching(f"http://127.0.0.1:{_free_port()}", HASTY) as fleet:
        with pytest.raises(DeadlineMissed, match="before its deadline: No connection"):
            await soon(fleet.submit(**ask(), budget="1.5s"), 4)
    assert loop.time() - began < 3


async def test_a_provider_that_comes_back_in_time_for_the_rescue(monkeypatch: pytest.MonkeyPatch) -> None:
    small_times(monkeypatch, sync_floor=2.0)
    port = _free_port()
    async with dispatching(f"http://127.0.0.1:{port}", HASTY) as fleet:
        call = asyncio.create_task(fleet.submit(**ask("hurry"), budget="4s"))
        await until(lambda: fleet.stats.batches_refused)
        provider = MockAnthropic(SOON)
        async with serve(provider=provider, port=port):
            assert text_of(await soon(call)) == expected_text(ask("hurry"))
        assert len(provider.bill.charges) == 1


async def test_a_name_that_does_not_resolve() -> None:
    async with dispatching("http://no-such-host.invalid") as fleet:
        with pytest.raises(anthropic.APIConnectionError):
            await soon(fleet.submit(**ask(), budget="500ms"))


# ---------------------------------------------------------------- stores


async def _refused(store: Any, kind: type[Exception], said: str) -> None:
    async with AsyncAnthropic(base_url="http://127.0.0.1:9", api_key=KEY) as client:
        with pytest.raises(kind, match=said):
            await soon(FleetDispatcher(client, store=store).__aenter__())


async def test_a_store_that_is_no_file(tmp_path: Path) -> None:
    await _refused(tmp_path, StoreUnwritable, "is a directory. Name a file in it")
    await _refused(tmp_path / "nowhere" / "s.db", StoreUnwritable, "does not exist. Create it")
    await _refused("postgresql://127.0.0.1:9/db", StoreError, "can't be reached")
    await _refused("mysql://db", ConfigError, "is not a store")
    await _refused("", ConfigError, "Name a file")


async def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:  # root may write everywhere, except where nobody can
        await _refused("/proc/fleet.db", StoreUnwritable, "/proc")
        return
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    await _refused(locked / "s.db", StoreUnwritable, "permissions")


async def test_a_store_in_use(tmp_path: Path) -> None:
    async with riding(store=tmp_path / "s.db") as scene:
        await _refused(tmp_path / "s.db", StoreLocked, "in use by process .* choose another store")
        assert text_of(await soon(scene.fleet.submit(**ask()))) == expected_text(ask())


async def test_a_store_that_is_corrupt(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    file.write_bytes(b"this is no database" * 100)
    await _refused(file, StoreCorrupt, "move it away")
    assert file.read_bytes() == b"this is no database" * 100


async def test_a_store_with_damaged_pages(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    async with riding(store=file) as scene:
        await soon(scene.fleet.submit(**ask()))
    content = bytearray(file.read_bytes())
    content[100:] = bytes(len(content) - 100)
    file.write_bytes(content)
    await _refused(file, StoreError, "damaged|failed|another program")


async def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    async with riding(store=file) as scene:
        await soon(scene.fleet.submit(**ask(), key="k"))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 999")
    await _refused(file, StoreTooNew, "Upgrade carpool")


async def test_a_store_of_another_program(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    await _refused(file, StoreCorrupt, "another program")


async def test_a_store_whose_secret_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARPOOL_SECRET", raising=False)
    file = tmp_path / "s.db"
    async with riding(store=file) as scene:
        await soon(scene.fleet.submit(**ask()))
    monkeypatch.setenv("CARPOOL_SECRET", "another secret of sufficient length")
    await _refused(file, WrongSecret, "earlier secret")


async def test_a_refused_store_leaves_nothing_open(tmp_path: Path) -> None:
    """After a failure the same file can be used at once, when its trouble is over."""
    file = tmp_path / "s.db"
    file.write_bytes(b"x" * 100)
    await _refused(file, StoreCorrupt, "is not a store")
    file.unlink()
    async with riding(store=file) as scene:
        await soon(scene.fleet.submit(**ask()))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("routing: {min_batchsize: 10}", "did you mean routing.min_batch_size"),
        ("rooting: {}", "did you mean routing"),
        ("routing: {min_batch_size: ten}", "whole number"),
        ("routing: {min_batch_size: 10, max_batch_size: 5}", "more than batch_max_size"),
        ("routing: [1, 2]", "`key: value` pairs"),
        ("routing: {", "not valid YAML"),
        ("- just\n- a list", "`key: value` pairs"),
    ],
)
def test_bad_yaml(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "carpool.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        RoutingPolicy.from_yaml(file)
    assert str(file) in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_yaml_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        RoutingPolicy.from_yaml(tmp_path / "nowhere.yaml")


async def test_more_calls_than_may_wait() -> None:
    async with riding(SOON, replace(QUICK, max_waiting_calls=2, linger_ms=5_000)) as scene:
        calls = [scene.start(f"{i}") for i in range(2)]
        await scene.admitted(2)
        with pytest.raises(Closed, match="raise max_waiting_calls"):
            await soon(scene.fleet.submit(**ask("one too many")), 2)
        for call in calls:
            call.cancel()
        await until(lambda: all(call.done() for call in calls))


def test_the_answer_to_a_bad_call_is_json() -> None:
    """The sentence of every error can be shown to a client as it is."""
    for error in (BadCall("A sentence."), BadParams("A sentence."), Closed("A sentence.")):
        assert json.dumps({"message": str(error), "code": error.code, "status": error.status})
