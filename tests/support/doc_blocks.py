"""The code blocks of the README and the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a console block, and the output that the page shows below it."""

    text: str
    output: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(page.name, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in _FENCE.finditer(text)
    ]


def commands(console: str) -> list[Command]:
    """`$ ` begins a command; a backslash or an indented `> ` goes on with it; all else is its output."""
    found: list[tuple[list[str], list[str]]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append(([line[2:]], []))
        elif found and not found[-1][1] and found[-1][0][-1].endswith("\\"):
            found[-1][0].append(line)
        else:
            found[-1][1].append(line)
    return [Command("\n".join(lines), tuple(output)) for lines, output in found]


def shows(shown: tuple[str, ...], printed: str) -> bool:
    """Whether output looks as the page shows it. `…` in a line stands for any text, on a line of its own for any
    number of lines."""
    parts = [
        r"(?:.*\n)*?" if line.strip() == "…" else ".*".join(map(re.escape, line.rstrip().split("…"))) + r"\n"
        for line in shown
    ]
    lines = "".join(line.rstrip() + "\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch("".join(parts), lines) is not None
