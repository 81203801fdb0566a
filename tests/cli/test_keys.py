"""`carpool keys` as people and scripts use it: alone, beside a running server, and across a crash."""

# What is waited for happens in other processes, and their files are looked at when they are dead.
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from carpool import cli
from carpool.core.keys import SHAPE
from carpool.mock import Constant, MockConfig, MockServer, expected_text, serve
from carpool.stores import peek

HOUSE = "sk-ant-of-the-house"
CONFIG = "batching: {linger_ms: 20, poll_interval_s: 0.05, rpm: 100000}\n"
VERSION = {"anthropic-version": "2023-06-01"}
LATER = {"x-carpool-budget": "30m", "prefer": "respond-async"}


def carpool(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "carpool", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "COLUMNS": "100"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def keys(folder: Path, *arguments: str, **variables: str) -> str:
    """What `carpool keys …` says on stdout, where it ends well."""
    ran = carpool(folder, "keys", *arguments, **variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def listed(folder: Path, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(keys(folder, "list", "--json", *arguments, **variables))
    return found


# ---------------------------------------------------------------- alone


def test_a_script_can_take_the_key_and_people_read_the_rest(tmp_path: Path) -> None:
    ran = carpool(tmp_path, "keys", "add", "ci", "--owner", "platform", ANTHROPIC_API_KEY=HOUSE)
    assert SHAPE.fullmatch(ran.stdout.strip())
    assert "The key ci buys from anthropic with ANTHROPIC_API_KEY" in ran.stderr
    assert ran.stdout.strip() not in ran.stderr
    assert HOUSE not in ran.stdout + ran.stderr


def test_a_list_shows_everything_but_the_key(tmp_path: Path) -> None:
    options = ["--owner", "platform", "--budget", "10m", "--max-budget", "1h", "--refuse-over", "--lanes", "now,batch"]
    options += ["--tag", "team=ci", "--tag", "cost=7", "--expires", "30d", "--env", "TEAM_KEY", "--whole-account"]
    secret = keys(tmp_path, "add", "ci", *options)
    [key] = listed(tmp_path, TEAM_KEY=HOUSE)
    assert (key["name"], key["owner"], key["provider"], key["env"]) == ("ci", "platform", "anthropic", "TEAM_KEY")
    assert (key["state"], key["env_set"], key["last_used"]) == ("active", True, None)
    assert key["hint"] == secret[:8]
    assert key["expires_at"] - key["created_at"] == pytest.approx(30 * 86_400)
    assert key["profile"] == {
        "budget": 600,
        "lane": None,
        "max_budget": 3600,
        "refuse_over": True,
        "lanes": ["now", "batch"],
        "tags": {"team": "ci", "cost": "7"},
        "whole_account": True,
        "task_budget": None,
        "caching": None,
    }
    table = keys(tmp_path, "list")
    for word in ("ci", "platform", "TEAM_KEY", "not set here", "team=ci", "never", "active"):
        assert word in table
    assert secret not in table
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()
        assert secret[12:].encode() not in file.read_bytes()


def test_a_key_lives_turns_and_ends(tmp_path: Path) -> None:
    first = keys(tmp_path, "add", "ci")
    second = keys(tmp_path, "rotate", "ci", "--grace", "1h")
    assert first != second
    assert [(key["hint"], key["state"]) for key in listed(tmp_path)] == [
        (first[:8], "ending"),
        (second[:8], "active"),
    ]
    third = json.loads(keys(tmp_path, "rotate", "ci", "--json"))["key"]
    assert [(key["hint"], key["state"]) for key in listed(tmp_path)] == [(third[:8], "active")]
    assert "The key ci is revoked" in keys(tmp_path, "revoke", "ci")
    assert listed(tmp_path) == []
    assert keys(tmp_path, "list") == ("No key is valid: all 3 have ended. carpool keys list --all shows them.")
    assert "The key ci is revoked already" in carpool(tmp_path, "keys", "revoke", "ci").stderr
    assert "revoked" in keys(tmp_path, "list", "--all")
    assert [key["state"] for key in listed(tmp_path, "--all")] == ["rotated", "rotated", "revoked"]
    assert keys(tmp_path, "add", "ci")  # the name is free again


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["add", "two words"], "can't be the name of a key"),
        (["add", "x", "--provider", "nobody"], "There is no provider 'nobody'. The config has anthropic, openai."),
        (["add", "x", "--env", HOUSE], "--env is not the name of an environment variable: write a name such as"),
        (["add", "x", "--budget", "soon"], "--budget is 'soon'; it must be a budget"),
        (["add", "x", "--lanes", "fast"], "--lanes is 'fast'; it must be now or batch."),
        (["add", "x", "--lanes", "flex"], "--lanes is 'flex'"),
        (["add", "x", "--lane", "merge"], "--lane is 'merge'; it must be now or batch."),
        (["add", "x", "--lanes", "now", "--lane", "batch"], "is not among --lanes now"),
        (["add", "x", "--budget", "2h", "--max-budget", "1h"], "more than --max-budget"),
        (["add", "x", "--refuse-over"], "set that, too"),
        (["add", "x", "--tag", "team"], "is not a tag"),
        (["add", "x", "--expires", "2020-01-01"], "is in the past"),
        (["add", "x", "--expires", "yesterday"], "--expires is 'yesterday'; it must be a duration, such as 90m, "),
        (["add", "x", "--expires", "0d"], "--expires is '0d'; it must be a duration"),
        (["add", "x", "--expires", "-1d"], "--expires is '-1d'; it must be a duration"),
        (["add", "x", "--expires", "9" * 400 + "d"], "it must be a duration"),
        (["add", "-x"], "No such option"),
        (["add", "x", "--store", "typo.db"], "There is no store at typo.db. Name the one that carpool serve uses, or"),
        (["add", "x", "--store", "mysql://me:word@db/x"], "mysql:// is not a store. Name a path such as carpool.db"),
        (["add", "there"], "There is a key there already"),
        (["revoke", "x"], "There is no key 'x'. The keys are there."),
        (["rotate", "x"], "There is no key 'x'"),
        (["rotate", "there", "--grace", "long"], "--grace is 'long'; it must be a duration"),
        (["list", "--store", "nowhere.db"], "There is no store at nowhere.db"),
        (["add", "x", "--store", ":memory:"], "in memory"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(tmp_path: Path, arguments: list[str], told: str) -> None:
    keys(tmp_path, "add", "there")
    ran = carpool(tmp_path, "keys", *arguments)
    assert ran.returncode == 2
    assert told in ran.stderr
    assert HOUSE not in ran.stderr
    assert "me:word" not in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "typo.db").exists()


def test_a_store_is_made_where_the_default_is_meant_or_it_is_asked_for(tmp_path: Path) -> None:
    """A typo in --store must not make a store that no carpool serve looks at."""
    made = carpool(tmp_path, "keys", "add", "ci")
    assert "The store carpool.db is new." in made.stderr
    assert "is new" not in carpool(tmp_path, "keys", "add", "other").stderr
    assert carpool(tmp_path, "keys", "add", "ci", "--store", "new.db").returncode == 2
    assert keys(tmp_path, "add", "ci", "--store", "new.db", "--create")
    (tmp_path / "carpool.yaml").write_text("store: {url: of-the-config.db}")
    assert keys(tmp_path, "add", "ci", "--config", "carpool.yaml")
    assert "ci" in keys(tmp_path, "list", "--config", "carpool.yaml")


@pytest.mark.parametrize("wrong", [["two words"], ["x", "--expires", "2020-01-01"], ["x", "--env", "sk-1"]], ids=str)
def test_what_is_refused_makes_no_store(tmp_path: Path, wrong: list[str]) -> None:
    assert carpool(tmp_path, "keys", "add", *wrong).returncode == 2
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["add", "list", "revoke", "rotate"])
def test_help_fits_80_columns_and_explains_every_option(command: str) -> None:
    said = CliRunner().invoke(cli.app, ["keys", command, "--help"], env={"COLUMNS": "80"})
    assert said.exit_code == 0
    assert all(len(line) <= 80 for line in said.output.splitlines())
    wide = CliRunner().invoke(cli.app, ["keys", command, "--help"], env={"COLUMNS": "200"})
    options = [line.split() for line in wide.output.splitlines() if line.strip().startswith("--")]
    assert all(len(words) > 3 for words in options)


def test_the_config_is_checked_in_sentences(tmp_path: Path) -> None:
    for text, told in [
        ("keys: {required: perhaps}", "keys.required is 'perhaps'; it must be true or false."),
        ("keys: {require: true}", "keys.require is not a setting: did you mean keys.required?"),
        ("store: {encrypt: 1}", "store.encrypt is 1; it must be true or false."),
    ]:
        (tmp_path / "carpool.yaml").write_text(text)
        ran = carpool(tmp_path, "serve", "--check", "--config", "carpool.yaml")
        assert (ran.returncode, told in ran.stderr) == (2, True), ran.stderr
    variables = {"CARPOOL_KEYS__REQUIRED": "true", "CARPOOL_STORE__ENCRYPT": "true"}
    ran = carpool(tmp_path, "serve", "--check", "--port", "0", "--json", **variables)
    settings = json.loads(ran.stdout)["settings"]
    assert settings["keys.required"] == {"value": True, "from": "CARPOOL_KEYS__REQUIRED"}
    assert settings["store.encrypt"] == {"value": True, "from": "CARPOOL_STORE__ENCRYPT"}


# ---------------------------------------------------------------- beside a server


class Served:
    def __init__(self, process: asyncio.subprocess.Process, url: str, http: httpx2.AsyncClient) -> None:
        self.process = process
        self.url = url
        self.http = http

    async def post(self, text: str, key: dict[str, str], **headers: str) -> httpx2.Response:
        sent = VERSION | key | headers
        return await self.http.post(self.url + "/v1/messages", json=ask(text), headers=sent)


def ask(text: str) -> dict[str, Any]:
    return {"model": "claude-haiku-4-5", "max_tokens": 50, "messages": [{"role": "user", "content": text}]}


@asynccontextmanager
async def served(
    upstream: MockServer, folder: Path, *options: str, config: str = CONFIG, **variables: str
) -> AsyncIterator[Served]:
    (folder / "carpool.yaml").write_text(config)
    command = [
        "-m",
        "carpool",
        "serve",
        "--port",
        "0",
        "--upstream",
        upstream.url,
        "--config",
        "carpool.yaml",
        *options,
    ]
    pipe = asyncio.subprocess.PIPE
    environment = {"PATH": os.environ["PATH"]} | variables
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=pipe, stderr=pipe, cwd=folder, env=environment
    )
    try:
        assert process.stdout is not None
        said = (await process.stdout.readline()).decode()
        assert "listens on http://127.0.0.1:" in said, (said, await process.stderr.read())  # type: ignore[union-attr]
        async with httpx2.AsyncClient(timeout=20) as http:
            yield Served(process, said.split(" listens on ")[1].split()[0], http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def status_becomes(one: Served, wanted: int, key: dict[str, str]) -> None:
    async with asyncio.timeout(20):
        while (await one.post("knock", key)).status_code != wanted:
            await asyncio.sleep(0.05)


async def test_keys_come_and_go_while_it_serves(tmp_path: Path) -> None:
    async with (
        serve(MockConfig(keys=frozenset({HOUSE}))) as upstream,
        served(upstream, tmp_path, ANTHROPIC_API_KEY=HOUSE) as one,
    ):
        key = {"x-api-key": await asyncio.to_thread(keys, tmp_path, "add", "ci")}
        await status_becomes(one, 200, key)
        other = {"x-api-key": await asyncio.to_thread(keys, tmp_path, "rotate", "ci")}
        await status_becomes(one, 401, key)
        await status_becomes(one, 200, other)
        async with asyncio.timeout(20):
            while (await asyncio.to_thread(listed, tmp_path))[0]["last_used"] is None:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(keys, tmp_path, "revoke", "ci")
        await status_becomes(one, 401, other)


async def batches_of(upstream: MockServer, count: int) -> None:
    async with asyncio.timeout(20):
        while len(upstream.provider.batches) < count:
            await asyncio.sleep(0.01)


async def recorded(folder: Path) -> None:
    """Wait until carpool itself knows that its batches were bought: the provider knows a moment sooner."""
    async with asyncio.timeout(20):
        while (await peek(folder / "carpool.db"))[1].get("batches.submitting", 0):
            await asyncio.sleep(0.02)


async def collected(folder: Path, count: int) -> None:
    async with asyncio.timeout(20):
        while (await peek(folder / "carpool.db"))[1].get("batches.collected", 0) < count:
            await asyncio.sleep(0.02)


async def test_after_a_kill_the_batches_of_configured_keys_go_on_by_themselves(tmp_path: Path) -> None:
    """Of a virtual key, of a passed key that `api_key_env` holds too, and of one that nobody holds."""
    config = CONFIG + "providers: {anthropic: {api_key_env: HOUSE_KEY}}\n"
    variables = {"HOUSE_KEY": HOUSE, "TEAM_KEY": "sk-ant-of-the-team"}
    virtual = {"x-api-key": await asyncio.to_thread(keys, tmp_path, "add", "ci", "--env", "TEAM_KEY")}
    passed, strange = {"authorization": f"Bearer {HOUSE}"}, {"x-api-key": "sk-ant-of-a-stranger"}
    async with serve(MockConfig(batch_latency=Constant(0.5))) as upstream:
        async with served(upstream, tmp_path, config=config, **variables) as one:
            tickets = [(await one.post("kept", who, **LATER)).json()["location"] for who in (virtual, passed, strange)]
            await batches_of(upstream, 3)
            await recorded(tmp_path)
            one.process.send_signal(signal.SIGKILL)
            await one.process.wait()
        async with served(upstream, tmp_path, config=config, **variables) as two:
            await collected(tmp_path, 2)  # nobody has asked for anything yet
            states = sqlite3.connect(tmp_path / "carpool.db").execute("SELECT state FROM batches ORDER BY state")
            assert [state for (state,) in states] == ["collected", "collected", "open"]
            for who, ticket in zip((virtual, passed, strange), tickets, strict=True):
                answer = await two.http.get(two.url + ticket + "?wait=20s", headers=who)
                assert answer.json()["content"][0]["text"] == expected_text(ask("kept"))
            await collected(tmp_path, 3)
        assert len(upstream.provider.bill.charges) == 3


async def test_encrypted_nothing_that_was_said_and_no_secret_is_in_any_file(tmp_path: Path) -> None:
    """Over HTTP, with calls that wait, calls that are answered, a kill, and everything the store leaves behind."""
    config = CONFIG + "store: {encrypt: true}\n"
    virtual = await asyncio.to_thread(keys, tmp_path, "add", "ci")
    passed = "sk-ant-of-a-stranger"
    async with (
        serve(MockConfig(batch_latency=Constant(0.2))) as upstream,
        served(upstream, tmp_path, config=config, ANTHROPIC_API_KEY=HOUSE) as one,
    ):
        for who in ({"x-api-key": virtual}, {"x-api-key": passed}, {"authorization": f"Bearer {passed}"}):
            said = [await one.post("zanzibar", who, **{"x-carpool-lane": lane}) for lane in ("batch", "now")]
            assert [answer.status_code for answer in said] == [200, 200]
            assert all("zanzibar" in answer.text for answer in said)  # the mock repeats what it was asked
            await one.post("zanzibar waits", who, **LATER)
        one.process.send_signal(signal.SIGKILL)
        await one.process.wait()
        log = await one.process.stdout.read() + await one.process.stderr.read()  # type: ignore[union-attr]
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {"carpool.db", "carpool.db-wal", "carpool.db.secret"} <= files.keys()
    for name, content in [*files.items(), ("the log", log)]:
        for word in ("zanzibar", HOUSE, passed, virtual, virtual[12:], passed[8:]):
            assert word.encode() not in content, f"{word} stands in {name}."


async def test_required_keys_are_required_by_the_config(tmp_path: Path) -> None:
    config = CONFIG + "keys: {required: true}\n"
    async with (
        serve(MockConfig()) as upstream,
        served(upstream, tmp_path, config=config, ANTHROPIC_API_KEY=HOUSE) as one,
    ):
        refused = await one.post("hello", {"x-api-key": HOUSE})
        assert refused.status_code == 401
        assert "virtual keys only" in refused.json()["error"]["message"]


def test_off_this_machine_somebody_must_have_a_key(tmp_path: Path) -> None:
    ran = carpool(tmp_path, "serve", "--host", "0.0.0.0", "--port", "0", CARPOOL_ADMIN_TOKEN="x" * 40)
    assert ran.returncode == 2
    assert "carpool keys add" in ran.stderr
