"""Redraws the generated parts of the docs, between `<!-- drawn: name -->` and `<!-- end of name -->`.

`python docs/draw.py` writes them; a house test fails when one is stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from carpool.core import errors
from carpool.core.lifecycle import BATCH_MOVES, TICKET_MOVES, BatchState, TicketState

DOCS = Path(__file__).resolve().parent
PART = re.compile(r"(?P<open><!-- drawn: (?P<name>\w+) -->\n).*?(?P<close><!-- end of (?P=name) -->)", re.DOTALL)


def diagram(moves: Mapping[TicketState, frozenset[TicketState]] | Mapping[BatchState, frozenset[BatchState]]) -> str:
    """Renders a transition table as a Mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves))}"]
    for source, targets in moves.items():
        lines += [f"    {source} --> {target}" for target in sorted(targets) or ["[*]"]]
    return "\n".join([*lines, "```\n"])


def error_table() -> str:
    rows = ["| error | whose fault | a retry helps | status | code |", "|---|---|---|---|---|"]
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.CarpoolError):
            retry = "yes" if error.retryable else "no"
            rows.append(f"| `{error.__name__}` | {error.fault} | {retry} | {error.status} | `{error.code}` |")
    return "\n".join(rows) + "\n"


PARTS = {
    "tickets": lambda: diagram(TICKET_MOVES),
    "batches": lambda: diagram(BATCH_MOVES),
    "errors": error_table,
}


def redraw(text: str) -> str:
    return PART.sub(lambda part: part["open"] + PARTS[part["name"]]() + part["close"], text)


def pages() -> list[Path]:
    return sorted(DOCS.glob("*.md"))


def main() -> None:
    for page in pages():
        text = page.read_text("utf-8")
        drawn = redraw(text)
        if drawn != text:
            page.write_text(drawn, "utf-8")
            sys.stdout.write(f"redrawn: docs/{page.name}\n")


if __name__ == "__main__":
    main()
