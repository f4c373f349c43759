"""Every guard that `make mutants` removes is still there; its tests are files of this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("mutant", mutants.read_mutants(), ids=lambda mutant: mutant.name)
def test_a_guard_is_where_its_mutant_looks(mutant: mutants.Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutant.changed(text), mutant.file, "exec")
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_a_guard_that_is_gone_is_told_of() -> None:
    mutant = mutants.Mutant(name="m", file="a.py", find="x", replace="", tests=())
    with pytest.raises(ValueError, match="2 times, not once"):
        mutant.changed("x + x")
