"""Installs the clients, each from the package index by its name and version, and says where they are.

What is installed already is left alone: an environment's `.ready` holds the row of versions.toml that it was made from.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENVS = HERE.parents[1] / ".venvs"
NODE = ENVS / "node"
TABLE: dict[str, Any] = tomllib.loads((HERE / "versions.toml").read_text("utf-8"))
QUIET = ("-qq", "--disable-pip-version-check", "--no-warn-script-location", "--no-compile")


class Missing(Exception):
    """A client that is not here. Nothing is skipped for it."""


def python(name: str) -> Path:
    return ENVS / f"real-{name}" / "bin" / "python"


def program(name: str, environment: str | None = None) -> Path:
    """A command that a package brought: from Node's, or from a Python environment."""
    return python(environment).with_name(name) if environment else NODE / "node_modules" / ".bin" / name


def node() -> str:
    return _found("node")


def version_of(client: str) -> str:
    """As the table has it, for people to read. A client is a row of the table, or a package in one."""
    if client in TABLE["node"]:
        return str(TABLE["node"][client])
    if client in TABLE["python"]:
        return str(TABLE["python"][client][0]).partition("==")[2]
    return packages(TABLE["python"][home_of(client)])[client]


def home_of(package: str) -> str:
    """The Python environment that a package is in, which has several."""
    return next(row for row, pins in TABLE["python"].items() if package in packages(pins))


def packages(row: list[str]) -> dict[str, str]:
    """Their versions by their names, without their extras."""
    pairs = (pinned.partition("==") for pinned in row)
    return {name.partition("[")[0]: version for name, _, version in pairs}


def ensure() -> None:
    """Everything in the table is here afterwards, or Missing says what isn't."""
    ENVS.mkdir(exist_ok=True)
    (ENVS / ".gitignore").write_text("*\n")
    with ThreadPoolExecutor(3) as pool:  # Node's packages wait for the network, Python's for the processor
        works = [pool.submit(_ensure_node)]
        # The largest, which stands last, first.
        works += [pool.submit(_ensure_python, *row) for row in reversed(TABLE["python"].items())]
        for work in works:
            work.result()


def _ensure_python(name: str, packages: list[str]) -> None:
    folder = python(name).parents[1]
    if not _is_ready(folder, packages):
        started = time.monotonic()
        venv.create(folder, clear=True, symlinks=True)
        _install([sys.executable, "-m", "pip", "--python", str(python(name)), "install", *QUIET, *packages])
        _ready(folder, packages, started)


def _ensure_node() -> None:
    row = {"private": True, "dependencies": TABLE["node"], "allowScripts": TABLE["node-scripts"]}
    if _is_ready(NODE, row):
        return
    started = time.monotonic()
    npm = [_found("npm"), "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error"]
    NODE.mkdir(exist_ok=True)
    (NODE / "package.json").write_text(json.dumps(row))
    _install(npm, cwd=NODE)
    _ready(NODE, row, started)


def _is_ready(folder: Path, row: Any) -> bool:
    mark = folder / ".ready"
    return mark.exists() and json.loads(mark.read_text()) == row


def _ready(folder: Path, row: Any, started: float) -> None:
    (folder / ".ready").write_text(json.dumps(row))
    print(f"  installed {folder.name} in {time.monotonic() - started:.0f} s", flush=True)


def _found(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        raise Missing(f"There is no {command} here. On Debian and Ubuntu: apt-get install nodejs npm.")
    return found


def _install(command: list[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise Missing(f"{' '.join(command)} failed:\n{said}")
