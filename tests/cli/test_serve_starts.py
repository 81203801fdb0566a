"""What keeps `carpool serve` from starting: a sentence, the same from `--check`, and nothing is left behind."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SECRET = "a secret of this store"
TOKEN = "0123456789abcdef0123456789abcdef"
Prepare = Callable[[Path], object]

# What is put in place of a package that is not installed.
MISSING = "raise ImportError('not installed')\n"


def carpool(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "carpool", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def a_store(folder: Path) -> None:
    made = carpool(folder, "keys", "add", "ci", CARPOOL_SECRET=SECRET)
    assert made.returncode == 0, made.stderr


def of_another_program(folder: Path, mode: str = "DELETE") -> None:
    connection = sqlite3.connect(folder / "carpool.db")
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def without(package: str) -> Prepare:
    return lambda folder: (folder / f"{package}.py").write_text(MISSING)


def both(*prepare: Prepare) -> Prepare:
    return lambda folder: [one(folder) for one in prepare]


def nothing(folder: Path) -> None:
    """An empty folder."""


ABROAD = ["--host", "0.0.0.0"]
CASES: dict[str, tuple[Prepare, list[str], dict[str, str], str]] = {
    "a secret that is too short": (nothing, [], {"CARPOOL_SECRET": "short"}, "CARPOOL_SECRET is too short"),
    "another secret": (a_store, [], {"CARPOOL_SECRET": "quite another secret"}, "was made with another secret"),
    "no secret any more": (a_store, [], {}, "Set CARPOOL_SECRET to the same value"),
    "encryption without its package": (
        without("cryptography"),
        [],
        {"CARPOOL_STORE__ENCRYPT": "true", "PYTHONPATH": "."},
        "store.encrypt is on, and that needs the package cryptography",
    ),
    "postgres without its driver": (
        without("psycopg"),
        ["--store", "postgresql://127.0.0.1:9/x"],
        {"PYTHONPATH": "."},
        "A PostgreSQL store needs the package psycopg",
    ),
    "postgres that is not there": (
        nothing,
        ["--store", "postgresql://127.0.0.1:9/x"],
        {},
        "The store postgresql://127.0.0.1/x",
    ),
    "no such directory": (nothing, ["--store", "nowhere/x.db"], {}, "nowhere does not exist"),
    "a directory": (lambda folder: (folder / "d").mkdir(), ["--store", "d"], {}, "d is a directory. Name a file in it"),
    "a file that is no store": (
        lambda folder: (folder / "notes.txt").write_text("my notes, which are long enough"),
        ["--store", "notes.txt"],
        {},
        "notes.txt is not a store",
    ),
    "a database of another program": (of_another_program, [], {}, "a database of another program"),
    "one with a write-ahead log": (lambda f: of_another_program(f, "WAL"), [], {}, "a database of another program"),
    "a certificate that is missing": (
        nothing,
        ["--tls-cert", "c.pem", "--tls-key", "k.pem"],
        {},
        "server.tls.cert is c.pem, which can't be read",
    ),
    "a certificate that is none": (
        both(lambda f: (f / "c.pem").write_text("x"), lambda f: (f / "k.pem").write_text("x")),
        ["--tls-cert", "c.pem", "--tls-key", "k.pem"],
        {},
        "are no certificate and its key in PEM form",
    ),
    "roots that are missing": (nothing, [], {"CARPOOL_SERVER__CA_FILE": "roots.pem"}, "roots.pem can't be used"),
    "no login for the proxy": (
        nothing,
        [],
        {"CARPOOL_SERVER__OUTGOING_PROXY_AUTH_ENV": "LOGIN"},
        "must hold user:password",
    ),
    "no admin token": (nothing, ABROAD, {}, "Put an admin token into CARPOOL_ADMIN_TOKEN"),
    "nobody has a key": (nothing, ABROAD, {"CARPOOL_ADMIN_TOKEN": TOKEN}, "nobody has a key yet"),
    "keys are not required": (
        a_store,
        ABROAD,
        {"CARPOOL_ADMIN_TOKEN": TOKEN, "CARPOOL_SECRET": SECRET, "CARPOOL_KEYS__REQUIRED": "false"},
        "leave keys.required on",
    ),
    "an address of another machine": (
        a_store,
        ["--host", "203.0.113.1"],
        {"CARPOOL_ADMIN_TOKEN": TOKEN, "CARPOOL_SECRET": SECRET},
        "on 203.0.113.1 can't be opened",
    ),
    "a store of no known kind": (nothing, ["--store", "mysql://x"], {}, "postgresql://user@host/database"),
}


@pytest.mark.parametrize("check", [False, True], ids=["serve", "check"])
@pytest.mark.parametrize("case", CASES)
def test_a_start_that_is_refused_leaves_everything_as_it_was(tmp_path: Path, case: str, check: bool) -> None:
    prepare, arguments, variables, told = CASES[case]
    prepare(tmp_path)
    before = contents(tmp_path)
    ran = carpool(tmp_path, "serve", "--port", "0", *arguments, *(["--check"] if check else []), **variables)
    assert (ran.returncode, told in ran.stderr, "Traceback" in ran.stderr) == (2, True, False), ran.stderr
    assert {line[:9] for line in ran.stderr.splitlines()} == {"carpool: "}
    assert "is sound" not in ran.stdout
    after = {name: content for name, content in contents(tmp_path).items() if "__pycache__" not in name}
    assert after == before


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("more", [[], ["--check"], ["--workers", "2"]], ids=["serve", "check", "workers"])
def test_a_port_in_use_is_refused_before_anything_is_made(tmp_path: Path, busy_port: int, more: list[str]) -> None:
    ran = carpool(tmp_path, "serve", "--port", str(busy_port), *more)
    assert ran.returncode == 2
    assert f"Port {busy_port} on 127.0.0.1 can't be opened (Address already in use)" in ran.stderr
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("check", [False, True], ids=["serve", "check"])
def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path, check: bool) -> None:
    arguments = ["--store", "nowhere/x.db", "--tls-cert", "c.pem", "--tls-key", "k.pem", "--host", "0.0.0.0"]
    ran = carpool(tmp_path, "serve", "--port", "0", *arguments, *(["--check"] if check else []))
    assert ran.returncode == 2
    assert [word in ran.stderr for word in ("admin token", "server.tls.cert", "nowhere does not exist")] == [True] * 3


def test_a_check_of_what_would_start_makes_nothing(tmp_path: Path) -> None:
    ran = carpool(tmp_path, "serve", "--port", "0", "--check", CARPOOL_STORE__ENCRYPT="true")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert contents(tmp_path) == {}


def test_a_store_in_use_can_be_checked(tmp_path: Path) -> None:
    """A config is checked beside the carpool that it is meant for."""
    command = [sys.executable, "-m", "carpool", "serve", "--port", "0"]
    environment = {"PATH": os.environ["PATH"]}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "listens on" in process.stdout.readline()
            ran = carpool(tmp_path, "serve", "--port", "0", "--check")
            assert (ran.returncode, ran.stderr) == (0, "")
        finally:
            process.terminate()


@pytest.mark.parametrize("command", [["stats"], ["keys", "list"], ["keys", "add", "x"]], ids=" ".join)
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_no_command_touches_a_database_of_another_program(tmp_path: Path, command: list[str], mode: str) -> None:
    of_another_program(tmp_path, mode)
    before = contents(tmp_path)
    ran = carpool(tmp_path, *command)
    assert ran.returncode == 2
    assert "a database of another program" in ran.stderr
    assert contents(tmp_path) == before


def test_stats_of_a_store_at_rest_leave_nothing_beside_it(tmp_path: Path) -> None:
    a_store(tmp_path)
    before = contents(tmp_path)
    assert carpool(tmp_path, "stats").returncode == 0
    assert contents(tmp_path) == before
