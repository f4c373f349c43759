"""What is timed within a limit of time, on a bench and a clock that are made up."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.tuner.search import TimeLimit, find_best
from engine.formats.triton_gemm.candidates import candidates
from engine.formats.triton_gemm.limits import HOPPER
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig

pytestmark = pytest.mark.nightly

TILES = candidates(
    ProductShape(layout=RowLayout.PLAIN, num_rows=4096, num_columns=4096, depth=4096), HOPPER
)


class FakeBench:
    """Times come from a list; each timing takes a second of a clock of its own."""

    def __init__(self, times: Sequence[float | None]) -> None:
        self._times = dict(zip(TILES, times, strict=False))
        self.now = 0.0
        self.compiled: list[int] = []
        self.timed: list[TileConfig] = []
        self.bounds: list[float] = []

    def clock(self) -> float:
        return self.now

    def compile(self, tiles: Sequence[TileConfig]) -> None:
        self.compiled.append(len(tiles))

    def seconds(self, tile: TileConfig, bound_s: float) -> float | None:
        self.now += 1.0
        self.timed.append(tile)
        self.bounds.append(bound_s)
        return self._times[tile]


@given(st.lists(st.one_of(st.none(), st.floats(1e-6, 1.0)), min_size=1, max_size=40))
def test_the_fastest_that_works_wins(times: list[float | None]) -> None:
    bench = FakeBench(times)
    found = find_best(bench, TILES[: len(times)], lambda: False, at_once=7)
    works = [seconds for seconds in times if seconds is not None]
    if not works:
        assert found is None
        return
    assert found is not None
    assert found.seconds == min(works)
    assert found.tile == TILES[times.index(min(works))]
    assert found.num_timed == len(works)
    assert sum(bench.compiled) == len(times)


def test_a_bound_lets_hopeless_tiles_go_early() -> None:
    bench = FakeBench([3.0, 5.0, 2.0, 4.0])
    find_best(bench, TILES[:4], lambda: False)
    assert bench.bounds == [float("inf"), 3.0, 3.0, 2.0]


def test_when_the_time_is_over_the_best_so_far_is_taken() -> None:
    bench = FakeBench([3.0, 2.0, 1.0, 0.5])
    is_over = TimeLimit(2.0, 1, bench.clock).next_part()
    found = find_best(bench, TILES[:4], is_over, at_once=3)
    assert found is not None
    assert (found.seconds, found.num_timed) == (2.0, 2)
    assert bench.compiled == [3]


def test_without_any_time_one_that_works_is_found() -> None:
    bench = FakeBench([None, None, 7.0, 1.0])
    found = find_best(bench, TILES[:4], TimeLimit(0.0, 1, bench.clock).next_part())
    assert found is not None
    assert (found.seconds, found.num_timed) == (7.0, 1)


def test_what_one_part_leaves_goes_to_the_others() -> None:
    bench = FakeBench([])
    limit = TimeLimit(90.0, 3, bench.clock)
    is_over = limit.next_part()
    bench.now = 29.0
    assert not is_over()
    bench.now = 30.0
    assert is_over()
    bench.now = 10.0
    is_over = limit.next_part()  # 80 seconds for two
    bench.now = 49.9
    assert not is_over()
    bench.now = 120.0  # far too late
    is_over = limit.next_part()
    assert is_over()
    assert limit.left_s == pytest.approx(0.0)
