"""A reader with a clone, a fresh virtual environment and a mock in place of the providers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.doc_blocks import ROOT, Block, commands, shows

STOPPING_S = 60  # for a server to end
LONGEST_S = 300  # of a block; installing takes most of it
SECRET = "5" * 64
_CLONED = ("src", "examples", "docs", "README.md", "LICENSE", "pyproject.toml")

# `carpool serve` runs on beside the blocks that follow, until the next one starts another. All else runs as it is.
_CARPOOL = """#!/bin/bash
real="$VIRTUAL_ENV/bin/carpool"
[ "$1" = serve ] || exec "$real" "$@"
for word in "$@"; do [ "$word" = --check ] && exec env -u CARPOOL_PROVIDERS__ANTHROPIC__BASE_URL \\
  -u CARPOOL_PROVIDERS__OPENAI__BASE_URL "$real" "$@"; done
[ -f "$STATE/pid" ] && kill "$(cat "$STATE/pid")" && tail --pid="$(cat "$STATE/pid")" -f /dev/null
"$real" "$@" --port "$SERVE_PORT" >"$STATE/log" 2>&1 </dev/null &
echo $! >"$STATE/pid"
for _ in $(seq 300); do
  grep -q "listens on" "$STATE/log" && exit 0
  kill -0 "$(cat "$STATE/pid")" 2>/dev/null || break
  sleep 0.1
done
cat "$STATE/log" >&2
exit 1
"""

# Claude Code itself is run by tests/real. Here a call of the SDK stands for it, with the same two variables.
_CLAUDE = """#!/usr/bin/env python3
import sys
from anthropic import Anthropic

ask = [{"role": "user", "content": sys.argv[-1]}]
print(Anthropic().messages.create(model="claude-haiku-4-5", max_tokens=50, messages=ask).content[0].text)
"""


class Reader:
    def __init__(self, folder: Path, mock: str, postgres: str) -> None:
        self._postgres = postgres
        self.clone = folder / "carpool"
        self._bin, self._state = folder / "bin", folder / "state"
        self.port = free_port()
        self._venv = folder / "venv"
        for made in (self._bin, self._state):
            made.mkdir()
        for name, text in (("carpool", _CARPOOL), ("claude", _CLAUDE)):
            (self._bin / name).write_text(text)
            (self._bin / name).chmod(0o755)
        self._env = {
            "HOME": str(folder),
            "PATH": f"{self._bin}:{self._venv / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self._venv),
            "STATE": str(self._state),
            "SERVE_PORT": str(self.port),
            "ANTHROPIC_API_KEY": "sk-ant-reader",
            "OPENAI_API_KEY": "sk-reader",
            "ANTHROPIC_BASE_URL": mock,
            "OPENAI_BASE_URL": f"{mock}/v1",
            "CARPOOL_PROVIDERS__ANTHROPIC__BASE_URL": mock,
            "CARPOOL_PROVIDERS__OPENAI__BASE_URL": f"{mock}/v1",
            "CARPOOL_ADMIN_TOKEN": SECRET,
        } | {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG", "LC_"))}

    def make_clone(self) -> None:
        self.clone.mkdir()
        for name in _CLONED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.clone / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.clone / name)
        self._furnish(self.clone / "examples" / "company.yaml")
        subprocess.run([sys.executable, "-m", "venv", self._venv], check=True)

    def _furnish(self, company: Path) -> None:
        """The company of the example has certificates and a place for its store."""
        company.write_text(self._here(company.read_text("utf-8").replace("/etc/carpool", str(self.clone))))
        tls = self.clone / "tls"
        tls.mkdir()
        subject = ["-subj", "/CN=carpool.example.com", "-keyout", str(tls / "key.pem"), "-out", str(tls / "cert.pem")]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
        subprocess.run(command, check=True, capture_output=True)

    def turn_the_page(self) -> None:
        """Each page is read for itself: no server and no store of the one before."""
        self.stop()
        for left in (*self._state.iterdir(), *self.clone.glob("*.db*"), *self.clone.glob("*.yaml")):
            left.unlink()

    def stop(self) -> None:
        """Ends the server of the page, and waits until it has closed its store."""
        pid = self._state / "pid"
        if pid.exists():
            with suppress(psutil.NoSuchProcess):
                server = psutil.Process(int(pid.read_text()))
                server.terminate()
                server.wait(STOPPING_S)
            pid.unlink()

    # ------------------------------------------------------------ blocks

    def script(self, block: Block) -> None:
        self._ok(block, block.text)

    def console(self, block: Block) -> None:
        for command in commands(block.text):
            printed = self._ok(block, command.text)
            if command.output:
                wanted = tuple(self._here(line) for line in command.output)
                assert shows(wanted, printed), f"{block} shows another output than this:\n{printed}"

    def program(self, block: Block) -> None:
        (self.clone / "example.py").write_text(block.text)
        self._ok(block, "python example.py")

    def config(self, block: Block) -> None:
        (self.clone / "carpool.yaml").write_text(self._here(block.text))
        self._ok(block, "carpool serve --check --config carpool.yaml")

    def check(self, block: Block, serve: str) -> None:
        """Of a command line that runs where no test can: that `carpool serve` takes it as it stands there."""
        self._ok(block, "pip install -q '.[crypto]'")
        company = "--config examples/company.yaml"
        self._ok(block, f"carpool keys list {company} | grep -q ci || carpool keys add ci {company}")
        self._ok(block, f"{serve} --check")

    # ------------------------------------------------------------ the shell

    def _ok(self, block: Block, text: str) -> str:
        done = self._run(self._here(text))
        said = done.stdout + done.stderr
        assert done.returncode == 0, f"{block} fails with {done.returncode}:\n{said}"
        return done.stdout

    def _run(self, text: str) -> subprocess.CompletedProcess[str]:
        """What a command sets stays set for those below it."""
        kept = self._state / "env"
        lines = ["set -ea -o pipefail", f'[ ! -f "{kept}" ] || . "{kept}"', text, f'export -p >"{kept}"']
        return subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=self.clone if self.clone.exists() else None,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )

    def _here(self, text: str) -> str:
        """A page names the usual port, the places of a server's file system and a database; a test has its own."""
        for shown, real in (
            ("8787", str(self.port)),
            ("/var/lib/carpool", str(self.clone)),
            ("postgresql://carpool@db.internal/carpool", f"'{self._postgres}'"),
        ):
            text = text.replace(shown, real)
        return text


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


@contextmanager
def mock_provider() -> Iterator[str]:
    """A mock in a process of its own, with quick batches."""
    port = free_port()
    command = [sys.executable, "-m", "carpool", "mock", "--port", str(port)]
    command += ["--batch-latency", "constant:0.3", "--sync-latency", "constant:0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
        process.terminate()
