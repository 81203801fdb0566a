"""Broken in several places, the process says where it broke, and nothing of what it held."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import carpool
from carpool.core.errors import CallTooLarge, error_name, safe_traceback
from carpool.dialects import get as get_dialect
from carpool.engine import Upstream
from carpool.http import Http1Client
from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from tests.support import ROOT
from tests.support import breaking as breaking_script
from tests.support.breaking import BODY, SECRET
from tests.support.deep import quick_and_deep
from tests.support.stage import ask

PLACES = ("call", "answer", "passing", "wire", "results", "callback", "task", "thread", "letting go")
FORMATS = ("text", "json")
QUICK = tuple(zip(PLACES, cycle(FORMATS)))  # every place, and either format in turn


@asynccontextmanager
async def breaking(
    place: str, folder: Path, upstream: MockServer, log_format: str, **more: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    config = folder / "carpool.yaml"
    config.write_text("batching: {linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}\n")
    options = ["serve", "--port", "0", "--upstream", upstream.url, "--store", str(folder / "carpool.db")]
    options += ["--config", str(config), "--log-format", log_format, "--drain", "0"]
    pipe = asyncio.subprocess.PIPE
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HOUSE_KEY": SECRET, "PYTHONFAULTHANDLER": "1"}
    environ |= more
    process = await asyncio.create_subprocess_exec(
        sys.executable, breaking_script.__file__, place, *options, stdout=pipe, stderr=pipe, env=environ, cwd=folder
    )
    try:
        assert process.stdout is not None
        first = (await process.stdout.readline()).decode()
        yield process, first.split(" listens on ")[1].split()[0] if " listens on " in first else ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def provoke(url: str) -> None:
    """Calls on both lanes and a request that passes through. Whether they are answered is not the question."""
    headers = {"x-api-key": SECRET, "anthropic-version": "2023-06-01"}
    async with httpx2.AsyncClient(timeout=20) as http:
        waiting = {**headers, "x-carpool-budget": "30m", "prefer": "respond-async"}
        for sent in (headers, waiting):
            try:
                await http.post(f"{url}/v1/messages", json=ask(BODY), headers=sent)
            except httpx2.HTTPError:
                continue
        try:
            await http.get(f"{url}/v1/models?of={SECRET}", headers=headers)
        except httpx2.HTTPError:
            return


async def until_told(process: asyncio.subprocess.Process) -> bytes:
    """What it says until it has told of the crash."""
    said = b""
    assert process.stderr is not None
    async with asyncio.timeout(20):
        while b"RuntimeError at " not in said:
            line = await process.stderr.readline()
            assert line, f"It ended without telling of the crash: {said.decode()}"
            said += line
    return said


@pytest.mark.parametrize(("place", "log_format"), quick_and_deep(product(PLACES, FORMATS), QUICK))
async def test_a_crash_shows_where_and_not_what(tmp_path: Path, place: str, log_format: str) -> None:
    async with (
        serve(MockConfig(batch_latency=Constant(0.1))) as upstream,
        breaking(place, tmp_path, upstream, log_format) as (process, url),
    ):
        await provoke(url)
        said = await until_told(process)
        process.send_signal(signal.SIGABRT)  # faulthandler tells where every thread is
        out, err = await process.communicate()
    everything = said + out + err
    assert b"breaking.py:" in said
    assert b"Fatal Python error: Aborted" in err
    assert SECRET.encode() not in everything
    assert BODY.encode() not in everything
    files = contents(tmp_path)
    assert "carpool.db" in files
    assert [name for name, content in files.items() if SECRET.encode() in content] == []
    assert not [name for name in files if name.startswith("core")]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("place", ["results", "thread"])
async def test_with_encryption_nothing_is_left_anywhere(tmp_path: Path, place: str) -> None:
    """Neither key nor prompt nor answer, in what it said, in a crash, or in any file; while it runs and after."""
    sealed = {"CARPOOL_STORE__ENCRYPT": "true", "CARPOOL_SECRET": "a secret of the house, kept elsewhere"}
    private = [text.encode() for text in (SECRET, BODY, expected_text(ask(BODY)), sealed["CARPOOL_SECRET"])]
    async with (
        serve(MockConfig(batch_latency=Constant(0.1))) as upstream,
        breaking(place, tmp_path, upstream, "json", **sealed) as (process, url),
    ):
        await provoke(url)
        said = await until_told(process)
        during = contents(tmp_path)
        process.send_signal(signal.SIGABRT)
        out, err = await process.communicate()
        assert upstream.provider.bill.total() > 0
    for files in (during, contents(tmp_path), {"said": said + out + err}):
        assert [name for name, content in files.items() if any(text in content for text in private)] == []


async def test_a_crash_at_the_start_ends_with_1_and_the_places(tmp_path: Path) -> None:
    async with serve(MockConfig()) as upstream, breaking("start", tmp_path, upstream, "text") as (process, url):
        out, err = await process.communicate()
        assert (process.returncode, url, out) == (1, "", b"")
        assert b"This is a bug in carpool" in err
        assert b"breaking.py:" in err
        assert b"KeyError" in err
        assert SECRET.encode() not in err
        assert BODY.encode() not in err
        assert b"Traceback" not in err


# ---------------------------------------------------------------- what may be told


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_only_carpools_own_words_are_told() -> None:
    assert error_name(raised(CallTooLarge("This is too large."))) == "CallTooLarge: This is too large."
    assert SECRET not in error_name(raised(ValueError(SECRET)))
    assert error_name(ValueError(SECRET)) == "ValueError"
    error = raised(ValueError(SECRET))
    error.__cause__ = error  # a chain that bites its tail
    assert safe_traceback(error).count("ValueError") == 1
    assert "test_tracebacks.py" in safe_traceback(error)


def holders() -> Iterator[type]:
    """Every value in carpool that has a body, headers or a secret."""
    for found in pkgutil.walk_packages(carpool.__path__, "carpool."):
        if found.name.startswith(("carpool.mock", "carpool.sim", "carpool.__main__")):
            continue
        for one in vars(importlib.import_module(found.name)).values():
            if isinstance(one, type) and one.__module__ == found.name and {"body", "headers", "secret"} & fields(one):
                yield one


def fields(one: type) -> set[str]:
    if issubclass(one, msgspec.Struct):
        return set(one.__struct_fields__)
    if dataclasses.is_dataclass(one):
        return {field.name for field in dataclasses.fields(one)}
    return set(getattr(one, "_fields", ()))


HOLDERS = [pytest.param(one, id=f"{one.__module__}.{one.__qualname__}") for one in holders()]


@pytest.mark.parametrize("kind", HOLDERS)
def test_no_value_shows_the_body_or_the_secret_that_it_holds(kind: type) -> None:
    values: dict[str, Any] = dict.fromkeys(fields(kind))
    private = {"body": SECRET.encode(), "headers": (("x-api-key", SECRET),), "secret": (("x-api-key", SECRET),)}
    values |= {name: value for name, value in private.items() if name in values}
    values |= dict.fromkeys(values.keys() & {"forwarded"}, ())
    if "upstream" in values:
        values["upstream"] = Upstream("p", "u", get_dialect("openai"), Http1Client())
    assert SECRET not in repr(kind(**values))


def test_there_are_such_values() -> None:
    assert len(HOLDERS) >= 12
