"""The SQL statements of the store by name, read from the files in `stores/sql`.

Sets of states are filled in from the lifecycle tables, so that the guards of UPDATE statements always match them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files

from carpool.core.lifecycle import BATCH_MOVES, TICKET_MOVES, UNFINISHED, BatchState, TicketState

_LIVE = "(SELECT name FROM engines WHERE pulse_until >= :now)"


def _quoted(states: Iterable[str]) -> str:
    return ", ".join(f"'{state}'" for state in sorted(states))


def sources(target: BatchState) -> str:
    """Returns the batch states that may move to `target`, as an SQL list."""
    return _quoted(source for source, targets in BATCH_MOVES.items() if target in targets)


def _ticket_sources(target: TicketState) -> str:
    return _quoted(source for source, targets in TICKET_MOVES.items() if target in targets)


_UNDELIVERED = (
    "SELECT id FROM calls WHERE state = 'queued' UNION ALL SELECT id FROM calls WHERE state = 'boarded' "
    "UNION ALL SELECT id FROM calls WHERE state = 'sending' "
    "UNION ALL SELECT id FROM calls INDEXED BY calls_unclaimed WHERE state = 'settled' AND delivered_at IS NULL"
)


def sets_of_states(live: str) -> dict[str, str]:
    """Returns the substitutions for names in braces that both databases share; `live` selects the live engines."""
    unfinished = _quoted(UNFINISHED)
    return {
        "unfinished": unfinished,
        "live": live,
        "orphan": (
            f"CASE WHEN sender IS NOT NULL THEN sender NOT IN {live} ELSE awaiter IS NULL OR awaiter NOT IN {live} END"
        ),
        "aboard": f"EXISTS (SELECT 1 FROM batches b WHERE b.id = calls.batch AND b.state IN ({unfinished}))",  # noqa: S608
    } | {f"into_{target}": _ticket_sources(target) for target in TicketState}


def load(name: str, words: Mapping[str, str]) -> dict[str, str]:
    """Reads the statements of a file and substitutes the names in braces."""
    text = (files("carpool.stores") / "sql" / name).read_text("utf-8")
    for word, meaning in words.items():
        text = text.replace("{" + word + "}", meaning)
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return {name: _bare(body) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _bare(body: str) -> str:
    return "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()


_WORDS = sets_of_states(_LIVE) | {"undelivered": _UNDELIVERED}
_FILES = ("calls.sql", "batches.sql", "ledger.sql", "listing.sql", "keys.sql")
SQL: dict[str, str] = {statement: text for file in _FILES for statement, text in load(file, _WORDS).items()}


@cache
def migrations() -> dict[int, str]:
    return steps("")


def steps(folder: str) -> dict[int, str]:
    """Returns the numbered schema files of a folder, in order."""
    scripts = [file for file in (files("carpool.stores") / "sql" / folder).iterdir() if re.match(r"\d{4}_", file.name)]
    return {int(file.name[:4]): file.read_text("utf-8") for file in sorted(scripts, key=lambda file: file.name)}
