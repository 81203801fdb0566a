"""What came of it: a cell of the matrix for every way in which a client was used, and a table of them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    client: str
    lane: str
    how: str  # whole or stream
    tools: bool = False
    style: str = ""

    def __str__(self) -> str:
        parts = (self.client, self.lane, self.how, "tools" if self.tools else "", self.style)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Verdict:
    cell: Cell
    trouble: str | None = None
    note: str = ""
    """What was seen beside, worth telling."""


LANES = ("now", "flex", "batch", "own batches", "a long wait")
COLUMNS = [(lane, how, tools) for lane in LANES for how in ("whole", "stream") for tools in (False, True)]


def table(verdicts: Sequence[Verdict]) -> str:
    """The matrix in Markdown: how many ways passed of how many were tried; a dash where a client has no such way."""
    tried = {(one.cell.lane, one.cell.how, one.cell.tools) for one in verdicts}
    columns = [column for column in COLUMNS if column in tried]
    heads = [f"{lane}, {how}{', tools' if tools else ''}" for lane, how, tools in columns]
    clients = list(dict.fromkeys(one.cell.client for one in verdicts))
    rows = [["client", *heads], ["---"] * (len(heads) + 1)]
    rows += [[client, *(_count(verdicts, client, *column) for column in columns)] for client in clients]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _count(verdicts: Iterable[Verdict], client: str, lane: str, how: str, tools: bool) -> str:
    mine = [
        one
        for one in verdicts
        if one.cell.client == client and (one.cell.lane, one.cell.how, one.cell.tools) == (lane, how, tools)
    ]
    passed = sum(one.trouble is None for one in mine)
    if not mine:
        return "-"
    return "yes" if passed == len(mine) else f"**{passed} of {len(mine)}**"
