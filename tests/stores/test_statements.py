"""The statements that move tickets take the states that they start from out of the table in `core.lifecycle`."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from carpool.core.lifecycle import TICKET_OPERATIONS

SETS_THE_STATE = re.compile(r"UPDATE calls (?:SET|SET[^;]*,)\s+state = ")


def _statements(folder: str) -> dict[str, str]:
    """The statements by name, before anything is substituted in them. Schemas are not among them."""
    texts = [
        file.read_text("utf-8")
        for file in (files("carpool.stores") / "sql" / folder).iterdir()
        if re.fullmatch(r"[a-z]+\.sql", file.name)
    ]
    parts = re.split(r"^-- name: (\w+)\n", "\n".join(texts), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("folder", ["", "postgres"])
def test_a_statement_that_moves_tickets_is_bounded_by_the_table(folder: str) -> None:
    statements = _statements(folder)
    moving = {name for name, text in statements.items() if SETS_THE_STATE.search(text)}
    assert moving == TICKET_OPERATIONS.keys()
    for name in moving:
        assert f"state {{from {name}}}" in statements[name], name
        assert not re.search(r"state (<>|IN|NOT IN)", statements[name]), f"{name} lists states itself"
