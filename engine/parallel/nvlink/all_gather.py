"""All-gathers between the GPUs of one NVLink host, by stores into peers' memory.

For tensor-parallel prefill, beside the sums of `reduce_scatter`. A transfer is one of the
package: *send* writes this rank's rows into every buffer, the own one too, *receive* waits until
all have come, and what it returns is the buffer itself: nobody copies. There is a lane, with
counters and memory of its own, for each width of rows; it is set up when such rows are first sent,
as long as there is room, in the same order on all ranks. Rows of other widths are the library's.

**Why a lane can be written again.** It has one place for each row, not two in turns, so that a
captured step finds rows where it has found them before. What was gathered is read before the next
sum over all ranks is sent, on the same stream; and a lane is used again only by a rank that has
*received* such a sum since. It then knows that every rank has sent its part, and so has read
whatever was in the lane. `met` is told of each sum, and of each collective of the library that
takes as long as the slowest rank; `takes` says no to a lane that was used since. A captured step
begins with rows of another lane than the step before it ended with, and every layer ends with a
sum, so what was true when it was captured is so when it is replayed.

Legend: R ranks, T most rows of a rank, t rows of a rank now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from torch import Tensor

from engine.invariants import require
from engine.parallel.nvlink.shape import LINE, MAX_RANKS, round_up
from engine.parallel.pending import Deferred, Pending
from runtime.errors import ConfigError

MAX_LANES: Final = 4
"""Widths of rows: latents, rows to experts, their routing, and one more."""

WORDS: Final = 16
"""Bytes that a thread copies at a time; rows of a rank are as many, or several times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherShape:
    """The sizes of one exchange of rows, equal on all ranks.

    A rank's buffer is two lines of counters for each lane, then the lanes.

    Attributes:
        num_ranks: R.
        max_rows: T.
        row_bytes: of all lanes together there is room for so many bytes a row.

    Raises:
        ConfigError: sizes that the kernels do not take.
    """

    num_ranks: int
    max_rows: int
    row_bytes: int

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= MAX_RANKS:
            problem = f"gathers by NVLink stores take 2 to {MAX_RANKS} ranks"
            raise ConfigError("tp", self.num_ranks, problem, "collectives")

    @property
    def halves(self) -> int:
        """Bytes of counters, before the lanes."""
        return MAX_LANES * 2 * LINE

    @property
    def lane_bytes(self) -> int:
        """Of all lanes together."""
        return MAX_LANES * LINE + self.num_ranks * self.max_rows * self.row_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory of each rank that its peers can write."""
        return self.halves + self.lane_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where rows of one width lie in a rank's buffer.

    Attributes:
        counters: bytes before its counters.
        first: bytes before its rows.
    """

    counters: int
    first: int


class GatherKernels(Protocol):
    """The two kernels of a rank for one lane."""

    def send(self, rows_tX: Tensor) -> None:
        """Write this rank's rows, contiguous, into all buffers."""
        ...

    def receive(self, rows_tX: Tensor) -> Tensor:
        """Wait for all ranks' rows [R * t, X], and return the memory that they are in."""
        ...


class NvlinkAllGather:
    """Gathers rows whose lanes are free; see `engine.parallel.peer_exchange.PeerGathers`."""

    def __init__(
        self,
        shape: GatherShape,
        open_lane: Callable[[Lane], GatherKernels],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin without lanes.

        Args:
            shape: equal on all ranks.
            open_lane: makes the kernels of one.
            close: gives the memory back; all ranks together, with no transfer under way.
        """
        self.shape, self.close = shape, close
        self._open_lane = open_lane
        self._lanes: dict[int, GatherKernels] = {}  # by bytes of a row
        self._next = shape.halves
        self._used: set[int] = set()

    def takes(self, rows_tX: Tensor) -> bool:
        """Return whether there is a lane for such rows that nobody reads any more."""
        width = _width(rows_tX)
        num_bytes = rows_tX.shape[0] * width
        if not 0 < rows_tX.shape[0] <= self.shape.max_rows or num_bytes % WORDS:
            return False
        return width not in self._used and (width in self._lanes or self._has_room(width))

    def start(self, rows_tX: Tensor) -> Pending[Tensor]:
        """Send this rank's rows; waiting gives those of all ranks, in rank order.

        Args:
            rows_tX: that `takes` says yes to; the same shape on all ranks.

        Returns:
            [R * t, X], to be read before the next sum of the group is sent.
        """
        width = _width(rows_tX)
        require(
            self.takes(rows_tX), "gather of rows", tuple(rows_tX.shape), "their lane is not free"
        )
        if width not in self._lanes:
            self._lanes[width] = self._make_lane(width)
        lane, rows_tX = self._lanes[width], rows_tX.contiguous()
        self._used.add(width)
        lane.send(rows_tX)
        return Deferred(lambda: lane.receive(rows_tX))

    def met(self) -> None:
        """Hear that all ranks have read what was gathered: this one has received what says so."""
        self._used.clear()

    def _has_room(self, width: int) -> bool:
        end = self._next + self.shape.num_ranks * self.shape.max_rows * width
        return len(self._lanes) < MAX_LANES and end <= self.shape.buffer_bytes

    def _make_lane(self, width: int) -> GatherKernels:
        lane = Lane(counters=len(self._lanes) * 2 * LINE, first=self._next)
        self._next += round_up(self.shape.num_ranks * self.shape.max_rows * width)
        return self._open_lane(lane)


def _width(rows_tX: Tensor) -> int:
    """Return the bytes of a row."""
    return rows_tX[:1].numel() * rows_tX.element_size() if rows_tX.shape[0] else 0
