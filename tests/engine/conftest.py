"""Lets these tests use what the tests of the doors share."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "doors"))


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleets import quick_looks

    quick_looks(monkeypatch)
