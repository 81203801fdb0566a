"""A mutant whose line is gone breaks nothing, and would be missed only when somebody runs them all."""

from __future__ import annotations

import pytest

from tests.support import ROOT

from .mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_still_breaks_one_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text("utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.test is None or (ROOT / mutant.test.partition("::")[0]).is_file()


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
