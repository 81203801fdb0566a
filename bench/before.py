"""An earlier commit of carpool as a contestant of its own: `--before COMMIT` measures it in the same rounds."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEFORE = "carpool-before"
EXTRAS = "anthropic"


def checkout(commit: str) -> Path:
    """The files of a commit, with an environment in which they are installed; made once."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if name.returncode:
        raise SystemExit(f"{commit} is no commit of this repository.")
    folder = ROOT / "bench" / ".envs" / f"before-{name.stdout.strip()[:12]}"
    if (folder / ".ready").exists():
        return folder
    sys.stdout.write(f"Setting up {commit} ...\n")
    archive = subprocess.run(["git", "archive", name.stdout.strip()], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    venv.create(folder / ".venv", with_pip=True)
    pip = [str(python(folder)), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, "--editable", f"{folder}[{EXTRAS}]"], check=True)
    (folder / ".ready").touch()
    return folder


def python(folder: Path) -> Path:
    return folder / ".venv" / "bin" / "python"
