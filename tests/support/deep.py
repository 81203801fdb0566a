"""Which cases of a table are quick. The others are marked `deep`: `make test` leaves them to `make test-deep`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_deep(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The cases for `parametrize`; those that are not among the quick ones are deep."""
    cases = list(cases)
    assert set(quick) <= set(cases), "a quick case is not among the cases"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.deep) for case in cases]
