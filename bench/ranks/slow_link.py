"""An exchange by NVLink stores whose way to one rank is slow: rows go by a detour.

What the rank sends to the other lands in memory of its own, as if that were the other's; then a few
programs on a stream of their own spin, copy it over and raise the counter. The rank does not wait
for them until it sends again, so nobody but the receiver notices. Needs Triton and GPUs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.formats.fp8_rows import Fp8Rows
from engine.parallel.nvlink.buffer import NvlinkBuffer, ReceivedRows
from engine.parallel.nvlink.shape import LINE, UNITS, NvlinkShape
from engine.parallel.nvlink.signals import signal
from engine.parallel.nvlink.triton_exchange import TritonExchange
from engine.parallel.nvlink.window import Window

PARTS = 8
"""Programs of a detour; a power of two."""


@triton.jit
def _copy(source, target, first, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy this program's share of words of 4 bytes."""
    lanes = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * BLOCK, count, PARTS * BLOCK):
        word = first + start + lanes
        mask = start + lanes < count
        tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


@triton.jit
def _forward(
    limbo, bases, state, nanoseconds, rank, target,
    first_0, count_0, first_1, count_1, first_2, count_2,
    HALVES: tl.constexpr, HALF: tl.constexpr, LINE: tl.constexpr, UNITS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Wait, bring three runs of words of the half to the target, and say that they are there."""
    number = tl.load(state + 1)
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred p;
            .reg .b64 begin, now;
            mov.u32 $0, 0;
            mov.u64 begin, %globaltimer;
        AGAIN:
            mov.u64 now, %globaltimer;
            sub.u64 now, now, begin;
            setp.lt.u64 p, now, $1;
            @p bra AGAIN;
        }
        """,
        "=r,l",
        [nanoseconds.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    base = tl.load(bases + target)
    half = HALVES + (number % 2) * HALF
    source = (limbo.to(tl.int64) + half).to(tl.pointer_type(tl.int32))
    peer = (base + half).to(tl.pointer_type(tl.int32))
    _copy(source, peer, first_0, count_0, PARTS, BLOCK)
    _copy(source, peer, first_1, count_1, PARTS, BLOCK)
    _copy(source, peer, first_2, count_2, PARTS, BLOCK)
    signal(base, rank, number, number > 0, UNITS // PARTS, LINE)


def _rows_of(shape: NvlinkShape, rank: int) -> tuple[int, ...]:
    """Return where in a half, and how long, what a rank dispatches is, in words."""
    tallies, tokens = shape.num_local_experts + 1, shape.max_tokens_per_rank
    route, row = 2 * shape.top_k, shape.row_bytes // 4
    first = rank * tokens
    return (
        *(rank * tallies, tallies),
        *(shape.routes // 4 + first * route, tokens * route),
        *(shape.rows // 4 + first * row, tokens * row),
    )


def _sums_of(shape: NvlinkShape, rank: int) -> tuple[int, ...]:
    """The same for what it combines."""
    words = shape.max_tokens_per_rank * shape.hidden_size // 2
    return (rank * words, words, 0, 0, 0, 0)


class DetouredExchange(TritonExchange):
    """See the module."""

    def __init__(
        self, window: Window[NvlinkShape], target: int, seconds: float, num_layers: int
    ) -> None:
        """Send by a detour.

        Args:
            window: of this rank.
            target: to whom.
            seconds: that it takes longer, and the copy on top.
            num_layers: of a step; behind its last nothing is on its way any more.
        """
        device, shape = window.bases.device, window.shape
        self._limbo = torch.zeros(shape.buffer_bytes, dtype=torch.uint8, device=device)
        self._real, self._target = window.bases, target
        bases = window.bases.clone()
        bases[target] = self._limbo.data_ptr()
        super().__init__(dataclasses.replace(window, bases=bases))
        self._nanoseconds, self._num_layers = int(1e9 * seconds), num_layers
        self._stream = torch.cuda.Stream(device)
        self._num_combines = 0
        self._is_under_way = False

    def send_rows(self, rows: Fp8Rows, ids_TK: Tensor, weights_TK: Tensor) -> None:
        """See `Exchange`."""
        self._join()
        super().send_rows(rows, ids_TK, weights_TK)
        self._detour(_rows_of(self.window.shape, self.window.rank))

    def send_sums(self, out_LMD: Tensor, received: ReceivedRows) -> None:
        """See `Exchange`."""
        self._join()
        super().send_sums(out_LMD, received)
        self._detour(_sums_of(self.window.shape, self.window.rank))

    def receive_sums(self, ids_TK: Tensor, own_TD: Tensor | None) -> Tensor:
        """See `Exchange`."""
        out = super().receive_sums(ids_TK, own_TD)
        self._num_combines += 1
        if self._num_combines % self._num_layers == 0:
            self._join()  # a graph ends with one stream
        return out

    def _detour(self, runs: tuple[int, ...]) -> None:
        shape = self.window.shape
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            _forward[(PARTS,)](
                self._limbo,
                self._real,
                self.window.state,
                self._nanoseconds,
                self.window.rank,
                self._target,
                *runs,
                HALVES=shape.halves,
                HALF=shape.half_bytes,
                LINE=LINE,
                UNITS=UNITS,
                PARTS=PARTS,
                BLOCK=4096,
                num_warps=8,
            )
        self._is_under_way = True

    def _join(self) -> None:
        if self._is_under_way:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._is_under_way = False


@contextlib.contextmanager
def slowed(buffer: NvlinkBuffer, target: int, seconds: float, num_layers: int) -> Iterator[None]:
    """Send what goes to `target` by a detour, in what is captured and run in the body."""
    real = buffer.exchange
    assert isinstance(real, TritonExchange), type(real)
    buffer.exchange = DetouredExchange(real.window, target, seconds, num_layers)
    try:
        yield
    finally:
        buffer.exchange = real
