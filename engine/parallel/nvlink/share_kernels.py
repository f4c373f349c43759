"""The kernels of reduce-scatters and all-gathers, in Triton; see `reduce_scatter`, `all_gather`.

Compiled by Triton, and imported only where that is installed.
"""

from typing import Final

import torch
import triton.language as tl
from torch import Tensor

from engine.invariants import require
from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.parallel.nvlink import sums as sum_kernels
from engine.parallel.nvlink.all_gather import GatherShape, Lane
from engine.parallel.nvlink.reduce_scatter import ReduceShape
from engine.parallel.nvlink.shape import LINE, UNITS
from engine.parallel.nvlink.signals import await_all, pointer, record_of, signal
from engine.parallel.nvlink.window import Window
from engine.parallel.pair_rows import PairRows

COPIED: Final = 8192
"""Numbers that a sending program copies at a time: 64 bytes a thread on their way."""

GATHERED: Final = 4096
"""Words of 4 bytes that a program of a gather copies at a time, to each rank in turn."""

SUMMED: Final = (1024, 4096)
"""Numbers of a receiving program, where there are few and where there are many."""

MANY: Final = 1 << 20
"""Numbers of a rank's share from which on there are many: 146 rows of 7,168."""


@launched("rank", "num_rows")
def _send_shares(
    partial, bases, state,
    rank, num_rows,
    R: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, HALVES: tl.constexpr,
    HALF: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, STEP: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Copy one rank's share of the rows there, the next rank's first; the own one stays."""
    program = tl.program_id(0)
    owner = (rank + 1 + tl.program_id(1)) % R
    number = tl.load(state) + 1
    if (program == 0) & (owner == rank):
        tl.store(state + 1, number)
    base = tl.load(bases + owner)
    share = num_rows.to(tl.int64) * D
    source = partial + owner * share
    place = base + HALVES + (number % 2) * HALF + rank.to(tl.int64) * SLOT
    target = pointer(place, tl.bfloat16)
    columns = tl.arange(0, C)
    num_copied = tl.where(owner == rank, 0, share)
    for first in range(program * C, num_copied, STEP * C):
        mask = first + columns < num_copied
        tl.store(target + first + columns, tl.load(source + first + columns, mask=mask), mask=mask)
    signal(base, rank, number, owner >= 0, UNITS // STEP, LINE)


@launched("rank", "num_rows")
def _receive_shares(
    partial, own, out, bases, state, ring,
    rank, num_rows,
    R: tl.constexpr, D: tl.constexpr, SLOT: tl.constexpr, HALVES: tl.constexpr,
    HALF: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, C: tl.constexpr,
    HAS_OWN: tl.constexpr, SECONDS: tl.constexpr, SLOTS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add up the ranks' parts of the own rows, in the order of ranks."""
    program = tl.program_id(0)
    number = tl.load(state + 1)
    base = tl.load(bases + rank)
    share = num_rows.to(tl.int64) * D
    columns = program.to(tl.int64) * C + tl.arange(0, C)
    mask = columns < share
    total = tl.zeros([C], tl.float32)
    if HAS_OWN:
        total += tl.load(own + columns, mask=mask, other=0.0).to(tl.float32)
    record = record_of(ring, number, program == 0, R, SLOTS)
    await_all(base, number, record, KIND, R, LINE, UNITS, SECONDS, SLOTS)
    half = base + HALVES + (number % 2) * HALF
    mine = partial.to(tl.int64) + rank * share * 2
    for source in tl.static_range(R):
        place = tl.where(source == rank, mine, half + source * SLOT)
        total += tl.load(pointer(place, tl.bfloat16) + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + columns, total.to(out.dtype.element_ty), mask=mask)
    if program == 0:
        tl.store(state, number)


@launched("rank", "num_pieces", "first")
def _send_rows(
    rows, bases, state,
    rank, num_pieces, first,
    R: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, STEP: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Copy this rank's rows, pieces of 16 bytes, to `first` bytes behind each lane's counters."""
    program = tl.program_id(0)
    number = tl.load(state) + 1
    num_words = num_pieces * 4  # a bound of which 4 is a divisor keeps loads and stores wide
    if program == 0:
        tl.store(state + 1, number)
    offset = first.to(tl.int64) + rank.to(tl.int64) * num_words * 4
    columns = tl.arange(0, C)
    for begin in range(program * C, num_words, STEP * C):
        mask = begin + columns < num_words
        words = tl.load(rows + begin + columns, mask=mask)
        for step in tl.static_range(R):
            place = tl.load(bases + (rank + 1 + step) % R) + offset
            target = pointer(place, tl.int32)
            tl.store(target + begin + columns, words, mask=mask)
    for step in tl.static_range(R):
        peer = tl.load(bases + (rank + 1 + step) % R)
        signal(peer, rank, number, peer != 0, UNITS // STEP, LINE)


@launched("rank")
def _await_rows(
    bases, state, ring,
    rank,
    R: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr, SECONDS: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks' rows have come."""
    number = tl.load(state + 1)
    record = record_of(ring, number, False, R, SLOTS)
    await_all(tl.load(bases + rank), number, record, 0, R, LINE, UNITS, SECONDS, SLOTS)
    tl.store(state, number)


class TritonLane:
    """The kernels of a rank for one lane, whose window begins at the lane's counters."""

    def __init__(self, window: Window[GatherShape], lane: Lane, buffer: Tensor) -> None:
        """Take the own buffer too, of which what was gathered is a view."""
        self._window, self._lane, self._buffer = window, lane, buffer

    def send(self, rows_tX: Tensor) -> None:
        """See `GatherKernels`."""
        window = self._window
        words = rows_tX.view(-1).view(torch.int32)
        step = min(UNITS, next_power_of_2(max(1, ceil_div(words.shape[0], GATHERED))))
        _send_rows(
            (step,),
            (words, window.bases, window.state),
            (),
            (window.rank, words.shape[0] // 4, self._lane.first - self._lane.counters),
            (window.shape.num_ranks, LINE, UNITS, step, GATHERED),
            num_warps=8,
        )

    def receive(self, rows_tX: Tensor) -> Tensor:
        """See `GatherKernels`."""
        window, shape = self._window, self._window.shape
        _await_rows(
            (1,),
            window.memory,
            (),
            (window.rank,),
            (shape.num_ranks, LINE, UNITS, *window.waiting),
            num_warps=1,
        )
        num_bytes = shape.num_ranks * rows_tX.numel() * rows_tX.element_size()
        gathered = self._buffer[self._lane.first : self._lane.first + num_bytes]
        return gathered.view(rows_tX.dtype).view(-1, *rows_tX.shape[1:])


class TritonSums:
    """The kernels of a rank, bound to its window; launches go to the current stream."""

    def __init__(self, window: Window[ReduceShape]) -> None:
        self.window = window

    def send(self, partial_PD: Tensor) -> None:
        """See `SumKernels`."""
        window, shape = self.window, self.window.shape
        num_rows = _rows_of(shape, partial_PD)
        step = min(UNITS, next_power_of_2(max(1, ceil_div(num_rows * shape.hidden_size, COPIED))))
        _send_shares(
            (step, shape.num_ranks),
            (partial_PD, window.bases, window.state),
            (),
            (window.rank, num_rows),
            (*_layout(shape), step, COPIED),
            num_warps=8,
        )

    def receive(self, partial_PD: Tensor, own_TD: Tensor | None) -> Tensor:
        """See `SumKernels`."""
        window, shape = self.window, self.window.shape
        num_rows = _rows_of(shape, partial_PD)
        size = (num_rows, shape.hidden_size)
        require(
            own_TD is None or (own_TD.shape == size and own_TD.dtype == torch.bfloat16),
            "own term",
            None if own_TD is None else (tuple(own_TD.shape), own_TD.dtype),
            f"{size} in bfloat16 is wanted",
        )
        out = partial_PD.new_empty(size)
        share = num_rows * shape.hidden_size
        block = SUMMED[share >= MANY]
        # Without rows a program waits all the same: what is sent next relies on it.
        _receive_shares(
            (max(1, ceil_div(share, block)),),
            (partial_PD, out if own_TD is None else own_TD.contiguous(), out, *window.memory),
            (),
            (window.rank, num_rows),
            (*_layout(shape), block, own_TD is not None, *window.waiting, 0),
            num_warps=block // 512,
        )
        return out

    def send_pairs(self, pairs: PairRows) -> None:
        """See `SumKernels`."""
        sum_kernels.send_sums(self.window, pairs.rows_MD, pairs.places_PK, pairs.weights_PK)

    def receive_pairs(self, pairs: PairRows, own_TD: Tensor | None) -> Tensor:
        """See `SumKernels`."""
        num_local = pairs.num_local_experts
        return sum_kernels.receive_sums(
            self.window, pairs.own_ids_TK, own_TD, num_local_experts=num_local
        )


def _layout(shape: ReduceShape) -> tuple[int, ...]:
    """Return the constants that both kernels begin with."""
    places = (shape.slot_bytes, shape.halves, shape.half_bytes)
    return (shape.num_ranks, shape.hidden_size, *places, LINE, UNITS)


def _rows_of(shape: ReduceShape, partial_PD: Tensor) -> int:
    """Return t of a part [R * t, D].

    Raises:
        InternalError: it is not one that fits.
    """
    num_rows, rest = divmod(partial_PD.shape[0], shape.num_ranks)
    require(
        not rest and num_rows <= shape.max_rows and partial_PD.is_contiguous(),
        "part of a sum",
        (tuple(partial_PD.shape), partial_PD.stride()),
        f"contiguous, at most {shape.max_rows} rows for each of {shape.num_ranks} ranks",
    )
    return num_rows
