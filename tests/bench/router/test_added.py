"""What a router adds, from the moments of all processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.router.added import Spread, legs_of, read_stamps
from bench.router.workers import Stamps

pytestmark = pytest.mark.nightly


def test_legs_leave_out_what_workers_took() -> None:
    legs = legs_of(1.0, [1.5, 2.5, 2.75, 4.75], 5.0)
    assert legs == (0.5, 0.25, 0.25)


def test_stamps_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    stamps = Stamps(path)
    stamps.note("a-1.0f0f0f0f.0", 1.0)
    stamps.note("b-1.0f0f0f0f.0", 2.0)
    stamps.note("a-1.0f0f0f0f.0", 3.0)
    stamps.flush()
    read = read_stamps(path)
    stamps.close()
    assert list(read) == ["a-1"], "the other has not been answered twice"
    assert (read["a-1"][0], read["a-1"][2]) == (1.0, 3.0)


def test_a_spread_is_in_milliseconds() -> None:
    spread = Spread.of([0.001 * number for number in range(101)])
    assert spread.p50_ms == pytest.approx(50)
    assert spread.p90_ms == pytest.approx(90)
    assert spread.p99_ms == pytest.approx(99)
