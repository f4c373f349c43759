"""200 cells: no honest stream is lost to a single fault, and nothing is left half done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.matrix.__main__ import NUM_CELLS

SEED = 1
AT_ONCE = 25
"""Cells of one cluster, while it becomes whole again."""


@pytest.mark.nightly
@pytest.mark.timeout(AT_ONCE * 600)
@pytest.mark.parametrize("first", range(0, NUM_CELLS, AT_ONCE))
def test_cells(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad one again, alone: `python -m tests.matrix --seed 1 --cells 17`."""
    cells = f"{first}-{first + AT_ONCE - 1}"
    command = [sys.executable, "-m", "tests.matrix", "--seed", str(SEED), "--cells", cells]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stdout
