"""Which candidates are timed, within a limit of time; what times them is handed in.

Each product gets an equal share of what is left of the time, so that what the first ones do not
need goes to the later ones. Candidates come best guess first, and every product has at least one
timed, whatever the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from engine.formats.triton_gemm.tiles import TileConfig


class Bench(Protocol):
    """One product on a device."""

    def compile(self, tiles: Sequence[TileConfig]) -> None:
        """Compile ahead, at once, what will be timed; failures show when it is."""
        ...

    def seconds(self, tile: TileConfig, bound_s: float) -> float | None:
        """Return the median time, or None where it does not compile, or computes something else.

        A tile that is clearly slower than `bound_s` need not be timed well.
        """
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The best tile, its time, and how many candidates were timed."""

    tile: TileConfig
    seconds: float
    num_timed: int


class TimeLimit:
    """A limit of time for so many parts of a work."""

    def __init__(
        self, budget_s: float, num_parts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + budget_s
        self._parts_left = num_parts

    @property
    def left_s(self) -> float:
        """Of the whole work; not below zero."""
        return max(0.0, self._end - self._clock())

    def next_part(self) -> Callable[[], bool]:
        """Begin a part; return what tells whether its time is over."""
        end = self._clock() + self.left_s / max(self._parts_left, 1)
        self._parts_left -= 1
        return lambda: self._clock() >= end


def find_best(
    bench: Bench, tiles: Sequence[TileConfig], is_over: Callable[[], bool], *, at_once: int = 1
) -> Found | None:
    """Return the fastest of the tiles that were timed before the time was over.

    Args:
        bench: the product.
        tiles: in the order in which they are tried.
        is_over: asked before each tile once one was timed.
        at_once: tiles that are compiled together.

    Returns:
        None if no tile of all works.
    """
    best: Found | None = None
    num_timed = 0
    for part in _parts(tiles, at_once):
        if best is not None and is_over():
            break
        bench.compile(part)
        for tile in part:
            if best is not None and is_over():
                break
            seconds = bench.seconds(tile, best.seconds if best else float("inf"))
            if seconds is None:
                continue
            num_timed += 1
            if best is None or seconds < best.seconds:
                best = Found(tile, seconds, num_timed)
    return None if best is None else Found(best.tile, best.seconds, num_timed)


def _parts(tiles: Iterable[TileConfig], size: int) -> Iterator[list[TileConfig]]:
    rest = iter(tiles)
    while part := list(islice(rest, size)):
        yield part
