"""Which cases of a table are quick. The others are marked `deep`: `make test` leaves them to `make test-deep`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_deep(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases for `parametrize` (a tuple is several values); those that are not among the quick ones are deep."""
    cases = list(cases)
    assert set(quick) <= set(cases), "a quick case is not among the cases"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in quick else (pytest.mark.deep,) for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]
