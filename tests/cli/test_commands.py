"""Help worth reading, and errors that are sentences."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from io import StringIO
from pathlib import Path

import httpx2
import pytest
from rich.console import Console
from typer.testing import CliRunner

from carpool import __version__, cli
from carpool.cli.mock import bill_table
from carpool.cli.stats import ledger_table
from carpool.core.model import EntryKind, Lane, Totals
from carpool.mock import Faults
from carpool.planners.ledger import dollars
from carpool.stores import open_store, peek

Run = Callable[..., tuple[int, str, str]]
BEARER = {"authorization": "Bearer k"}
COMMANDS = ("serve", "keys", "mock", "stats", "report", "tasks", "simulate", "demo")
KEYS = ("keys add", "keys list", "keys revoke", "keys rotate")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process; gives its exit code, and what it said."""

    def running(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["carpool", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return running


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", ["", *COMMANDS, *KEYS])
def test_help_fits_80_columns(command: str, flag: str) -> None:
    said = CliRunner().invoke(cli.app, [*command.split(), flag], env={"COLUMNS": "80"})
    assert said.exit_code == 0
    assert all(len(line) <= 80 for line in said.output.splitlines())
    assert "..." not in said.output.replace("[ARGS]...", "").replace("[TRACE]...", "")


def test_help_names_every_command() -> None:
    said = CliRunner().invoke(cli.app, ["--help"])
    assert all(f"\n  {command} " in said.output for command in COMMANDS)


def test_every_option_has_a_word_of_help() -> None:
    for command in COMMANDS:
        said = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "200"})
        options = [line.split() for line in said.output.splitlines() if line.strip().startswith("-")]
        assert options
        assert all(len(words) > 3 for words in options)


@pytest.mark.parametrize("command", [*COMMANDS, *KEYS])
def test_options_say_what_they_take(command: str) -> None:
    """`--store URL`, not the name of a type."""
    said = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "200"}).output
    options = said.partition("Options:")[2]
    assert not re.search(r"^ +--\S+ (<|TEXT|INTEGER|FLOAT|PATH)", options, re.MULTILINE), options


def test_every_fault_is_listed_in_a_line_of_80_columns(run: Run) -> None:
    code, out, _ = run("mock", "--faults")
    assert code == 0
    assert out.startswith("Faults, each with its chance")
    assert all(len(line) <= 80 for line in out.splitlines())
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == [field.name for field in fields(Faults)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_a_shell_that_is_named(shell: str) -> None:
    ran = carpool("--show-completion", shell)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"_CARPOOL_COMPLETE=complete_{shell}" in ran.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("carpool ", {"serve", "keys", "mock", "stats", "report", "tasks", "simulate", "demo"}),
        ("carpool simulate --world s", {"slow", "stuck"}),
        ("carpool simulate --policy batch", {"batch", "batch+1h"}),
        ("carpool keys add x --lanes ", {"now", "batch"}),
        ("carpool mock --fault create_acc", {f"create_accepted_{end}=" for end in ("cut", "hang", "500", "529")}),
        ("carpool mock --vendor g", {"groq"}),
        ("carpool keys revoke ", {"ci", "nightly"}),
        ("carpool keys revoke --store other.db ", set()),
    ],
)
def test_tab_offers(tmp_path: Path, words: str, offered: set[str]) -> None:
    for name in ("ci", "nightly", "gone"):
        assert carpool("keys", "add", name, folder=tmp_path).returncode == 0
    assert carpool("keys", "revoke", "gone", folder=tmp_path).returncode == 0
    count = len(words.split()) - (not words.endswith(" "))
    asked = {"_CARPOOL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    assert set(carpool(folder=tmp_path, **asked).stdout.split()) == offered


def test_a_login_in_the_upstream_is_not_repeated(tmp_path: Path) -> None:
    for arguments, variables, told in [
        ((), {"CARPOOL_UPSTREAM": "https://me:word@host"}, "carpool: CARPOOL_UPSTREAM carries a user name or a passw"),
        (
            ("--upstream", "https://me:word@host"),
            {},
            "carpool: --upstream carries a user name or a password. Take",
        ),
        (("--store", "postgresql://me:word@host/db"), {}, "carpool: --store carries a password"),
    ]:
        ran = carpool("serve", "--port", "0", *arguments, folder=tmp_path, **variables)
        assert ran.returncode == 2
        assert told in ran.stderr
        assert "word@" not in ran.stderr
        assert ("command line" in ran.stderr) == ("--store" in arguments)


def test_stats_of_the_store_that_the_config_names(tmp_path: Path) -> None:
    (tmp_path / "carpool.yaml").write_text("store: {url: other.db}")
    assert carpool("keys", "add", "ci", "--config", "carpool.yaml", folder=tmp_path).returncode == 0
    assert "No calls yet." in carpool("stats", "--config", "carpool.yaml", folder=tmp_path).stdout
    assert "There is no store at carpool.db" in carpool("stats", folder=tmp_path).stderr


def carpool(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).parent / "carpool", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"]} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"carpool {__version__}\n", "")


def test_it_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "carpool", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"carpool {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--host", "0.0.0.0"], "0.0.0.0 can be reached from outside"),
        (["serve", "--host", "example.com"], "example.com can be reached from outside"),
        (["serve", "--upstream", "api.anthropic.com"], "is not a provider's base URL"),
        (["serve", "--upstream", "ftp://x"], "is not a provider's base URL"),
        (["serve", "--upstream", "http://[::1"], "is not a provider's base URL"),
        (["serve", "--config", "/nowhere/carpool.yaml"], "can't be read"),
        (["serve", "--port", "0", "--store", "/nowhere/x.db"], "/nowhere does not exist"),
        (["serve", "--port", "0", "--store", "redis://x"], "redis:// is not a store"),
        (["stats", "--store", "/nowhere/x.db"], "There is no store at /nowhere/x.db"),
        (["stats", "--store", ":memory:"], "can't be read by another process"),
        (["stats", "--store", "/tmp"], "There is no store at /tmp"),
        (["mock", "--fault", "foo"], "There is no fault 'foo'. carpool mock --faults lists them."),
        (["mock", "--fault", "create_50=1"], "Did you mean create_500?"),
        (["mock", "--fault", "create_500=often"], "write its chance, from 0 to 1, such as 0.1."),
        (["mock", "--fault", "create_500=2"], "write its chance, from 0 to 1"),
        (["mock", "--fault", "hang_s"], "write a number of seconds, as in hang_s=10."),
        (["mock", "--fault", "retry_after_s=0.5"], "write a whole number of seconds"),
        (["mock", "--vendor", "x"], "there is no vendor 'x', only openai"),
        (["mock", "--batch-latency", "slow"], "is not a latency"),
        (["mock", "--host", "203.0.113.1"], "can't be opened"),
        (["simulate", "/nowhere.jsonl"], "/nowhere.jsonl can't be read"),
        (["simulate", "coding", "--world", "x"], "'x' is not a world: known are economics, "),
        (["simulate", "coding", "--latency", "/nowhere.txt"], "/nowhere.txt can't be read"),
        (["simulate", "coding", "--policy", "x"], "'x' is not a policy: known are now, "),
        (["simulate", "coding", "--budget", "soon"], "'soon' is not a budget: write a number and a unit"),
        (["simulate", "coding", "--read-multiplier", "half"], "must be a number from 0 to 1"),
        (["simulate", "coding", "--picture", "x.png"], "must end in .svg"),
        (["simulate", "coding", "--model", "x"], "Nobody knows what x costs"),
        (["simulate", "coding", "--provider", "x"], "There is no dialect 'x'. carpool knows: anthropic, openai."),
        (["demo", "--store", "/nowhere/x.db"], "/nowhere does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(run: Run, arguments: list[str], told: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert err.startswith("carpool: ")
    assert told in err
    assert all(line.startswith("carpool: ") for line in err.splitlines())
    assert "listens on" not in out


@pytest.mark.parametrize("command", ["serve", "mock"])
def test_a_port_in_use(run: Run, busy_port: int, command: str) -> None:
    code, _, err = run(command, "--port", busy_port)
    assert code == 2
    assert f"Port {busy_port} on 127.0.0.1 can't be opened (Address already in use)" in err


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_stand_in_shows_its_bill_when_it_is_stopped(how: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "carpool", "mock", "--port", str(port), "--sync-latency", "constant:0"]
    # A shell starts what runs in its background with SIGINT ignored; here it is as it is in a terminal.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    env = {**os.environ, "COLUMNS": "80"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, preexec_fn=hears) as process:
        try:
            assert process.stdout is not None
            assert f"listens on http://127.0.0.1:{port}." in process.stdout.readline()
            model = "gpt-5-mini-2026-08-07"  # in a pipe the name of a model is not cut
            asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 1}
            told = httpx2.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, headers=BEARER)
            assert told.status_code == 200
            shown = httpx2.get(f"http://127.0.0.1:{port}/mock/bill").json()
            process.send_signal(how)
            said, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    rows = [line.split() for line in said.splitlines()]
    sums = [f"{shown[name]:,}" for name in ("purchases", "input_tokens", "output_tokens")]
    assert [model, "now", *sums, dollars(shown["nano_usd"])] in rows
    assert ["sum", *sums, dollars(shown["nano_usd"])] in rows


def test_a_bill_at_a_terminal_has_its_figures_whole() -> None:
    line = {"model": "claude-sonnet-4-5-20250929", "lane": "batch", "purchases": 12_345, "input_tokens": 1_234_567}
    line |= {"output_tokens": 123_456, "nano_usd": 12_345_678_900_000}
    console = Console(width=80, file=StringIO())
    console.print(bill_table({**line, "lines": [line]}))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in told
    assert told.count(" batch      12,345   1,234,567   123,456   $12,345.68 ") == 1


@pytest.mark.parametrize(("unknown", "left_out"), [(1, "1 purchase"), (2, "2 purchases")])
def test_what_the_savings_do_not_count_is_said(unknown: int, left_out: str) -> None:
    told = ledger_table([Totals(Lane.BATCH, EntryKind.PURCHASE, 3, unknown, 5, 10)])
    assert told.caption == f"saved $0.000000005 (50%), not counting {left_out} whose price is unknown"


def test_unknown_commands_and_options_are_usage_errors(run: Run) -> None:
    assert run("swerve")[0] == 2
    assert run("serve", "--prot", "1")[0] == 2
    assert run("serve", "--drain", "-1")[0] == 2
    assert run("serve", "--port", "99999")[0] == 2


def test_a_bad_setting_is_named(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "carpool.yaml"
    config.write_text("batching: {lingr_ms: 5}\n")
    code, _, err = run("serve", "--config", config)
    assert code == 2
    assert "batching.lingr_ms is not a setting: did you mean batching.linger_ms?" in err


def test_brackets_in_a_message_are_shown(run: Run) -> None:
    assert "no store at [bold]x[/].db" in run("stats", "--store", "[bold]x[/].db")[2]


# ---------------------------------------------------------------- stores


async def test_a_locked_store(tmp_path: Path) -> None:
    path = tmp_path / "carpool.db"
    store = await open_store(path)
    try:
        command = [sys.executable, "-m", "carpool", "serve", "--port", "0", "--store", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: ASYNC221
    finally:
        await store.aclose()
    assert ran.returncode == 2
    assert f"is in use by process {os.getpid()}" in ran.stderr


async def test_peeking_does_not_need_the_lock(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "carpool.db")
    try:
        totals, counts = await peek(tmp_path / "carpool.db")
    finally:
        await store.aclose()
    assert totals == []
    assert not any(counts.values())


def test_stats_of_an_empty_store(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    code, out, _ = run("stats", "--store", tmp_path / "empty.db")
    assert code == 0
    assert "No calls yet." in out


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.write_bytes(b"not a database at all" * 100), "is damaged"),
        (lambda path: _database(path, "CREATE TABLE t (x)"), "a database of another program"),
        (lambda path: _database(path, "PRAGMA user_version = 99", "PRAGMA application_id = 1667330672"), "Upgrade"),
    ],
)
def test_files_that_are_no_store_of_ours(run: Run, tmp_path: Path, make: Callable[[Path], None], told: str) -> None:
    path = tmp_path / "odd.db"
    make(path)
    before = path.read_bytes()
    code, _, err = run("stats", "--store", path)
    assert code == 2
    assert told in err
    assert path.read_bytes() == before


def _database(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in ("CREATE TABLE something (x)", *statements):
        connection.execute(statement)
    connection.commit()
    connection.close()
