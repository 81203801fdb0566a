"""Runs the parsers under atheris, which looks for bytes that reach new code: `make fuzz SECONDS=600`.

Each parser has a process and its share of the time. What breaks one is kept in `corpus/`, where the tests find it.

    python -m fuzz --seconds 600          all of them, for ten minutes together
    python -m fuzz --runs 5000            a fixed number of tries each
    python -m fuzz --only bodies          those whose name contains the word
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import ROOT

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
LONGEST_INPUT = 4096
NAMES = (
    *("bodies", "calls", "options", "hosts", "config", "packed", "requests"),
    *("answers", "outgoing", "streams", "batches", "replays"),
)


def child(name: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["carpool"]):
        from .targets import TARGETS
    assert TARGETS.keys() == set(NAMES)
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name])
    atheris.Fuzz()


def fuzz(name: str, seconds: float | None, runs: int) -> Path | None:
    """What broke it, if anything did."""
    from .seeds import SEEDS

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, seed in enumerate(SEEDS[name]):
            (folder / f"seed-{number}").write_bytes(seed)
        for file in (CORPUS / name).glob("*"):
            (folder / file.name).write_bytes(file.read_bytes())
        found = CORPUS / name
        found.mkdir(parents=True, exist_ok=True)
        known = set(found.iterdir())
        limit = f"-runs={runs}" if seconds is None else f"-max_total_time={max(1, int(seconds))}"
        arguments = [str(folder), limit, f"-max_len={LONGEST_INPUT}", f"-artifact_prefix={found}/", "-verbosity=0"]
        command = [sys.executable, "-m", "tests.fuzz", "--child", name, "--", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, check=False, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if done.returncode:
            print("".join(line for line in done.stderr.splitlines(True) if not line.startswith("INFO:"))[-8000:])
        fresh = set(found.iterdir()) - known
        if not any(found.iterdir()):
            found.rmdir()
        if done.returncode and not fresh:
            raise SystemExit(f"Fuzzing {name} ended with {done.returncode}, and left nothing to look at.")
        return min(fresh, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, help="for all parsers together")
    parser.add_argument("--runs", type=int, default=5000, help="of each parser, where no time is given")
    parser.add_argument("--only", default="", help="those whose name contains this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.rest)
        return 0
    chosen, broken = [name for name in NAMES if asked.only in name], 0
    for name in chosen:
        found = fuzz(name, None if asked.seconds is None else asked.seconds / len(chosen), asked.runs)
        broken += found is not None
        print(f"{name:10} {'is sound' if found is None else f'BREAKS on {found}'}", flush=True)
    print(f"{len(chosen) - broken} of {len(chosen)} parsers bore everything.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
