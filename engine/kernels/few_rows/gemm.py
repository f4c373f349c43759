"""Launches the product of few rows, and leaves all others to another implementation.

`FewRowsGemm` is a `BlockGemm` around a `BlockGemm`: which products it takes follows from a table of
what was measured. Nothing here waits for the device, and everything can be captured in a graph.
"""

import torch
from torch import Tensor

from engine.kernels.few_rows import product
from engine.kernels.few_rows.cuts import MAX_ROWS, Cut, block_m_of
from engine.kernels.few_rows.tables import CutTable
from engine.kernels.fp8_rows import GROUP, Fp8Rows
from engine.kernels.parts import BlockGemm

MAX_TILES = 4096
"""Tiles of a weight, at most."""


class Arrivals:
    """Counters of finished parts, zero between products.

    Products on one stream follow each other and share them; those on another stream get their own.
    """

    def __init__(self) -> None:
        self._counters: dict[tuple[torch.device, int], Tensor] = {}

    def take(self, device: torch.device) -> Tensor:
        """Return [MAX_TILES] int32 zeros for the current stream of the device.

        A stream's first product must not be captured: its counters would be the graph's memory,
        and zero only after the first replay.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        counters = self._counters.get((device, stream))
        if counters is None:
            assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
            with torch.inference_mode(False):
                counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
            self._counters[device, stream] = counters
        return counters


def multiply(
    x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor, cut: Cut, arrivals: Arrivals
) -> Tensor:
    """Return [T, N] bfloat16 of [T, K] rows, 1 to 128 of them, and a weight [N, K] e4m3.

    Args:
        x: rows, their scales with any strides.
        weight_NK: contiguous; K is a multiple of 128.
        scale_inv_PQ: [ceil(N / 128), K / 128] float32, contiguous.
        cut: a legal one.
        arrivals: of this thread.
    """
    (num_columns, depth), num_rows, data = weight_NK.shape, x.num_rows, x.data_TK
    assert data.stride(1) == 1
    assert weight_NK.is_contiguous()
    assert scale_inv_PQ.is_contiguous()
    block_m, num_tiles = block_m_of(num_rows), cut.num_tiles(num_columns)
    assert depth % (GROUP * cut.unroll) == 0
    assert num_tiles <= MAX_TILES
    out = torch.empty((num_rows, num_columns), dtype=torch.bfloat16, device=data.device)
    partial, counters = x.scale_TG, x.scale_TG  # if there is nothing to add up
    if cut.num_splits > 1:
        room = cut.partial_numbers(num_columns, num_rows)
        partial = torch.empty(room, dtype=torch.float32, device=data.device)
        counters = arrivals.take(data.device)
    scale_row, scale_group = x.scale_TG.stride()
    is_full = num_rows == block_m == scale_group and scale_row == 1
    ahead = cut.reads_ahead and is_full  # with masks it would take too many registers
    product.multiply(
        (num_tiles, cut.num_splits),
        (data, x.scale_TG, weight_NK, scale_inv_PQ, out, partial, counters),
        (data.stride(0), num_columns, depth, scale_row),
        (scale_group, num_rows),
        (
            *(cut.block_n, block_m, cut.num_splits, is_full),
            *(cut.sum_rows(num_rows), ahead, cut.unroll),
        ),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out


class FewRowsGemm:
    """See `BlockGemm`."""

    def __init__(self, others: BlockGemm, table: CutTable) -> None:
        """Take what multiplies all that the table does not name."""
        self._others = others
        self._table = table
        self._arrivals = Arrivals()
        # What was chosen for shapes seen before.
        self._chosen: dict[tuple[int, int, int], Cut | None] = {}
        self.grouped_linear = others.grouped_linear
        self.masked_linear = others.masked_linear

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Return [T, N] bfloat16 of [T, K] rows and a weight [N, K] e4m3; T may be 0."""
        cut = self._choose(x.num_rows, weight_NK)
        if cut is None:
            return self._others.linear(x, weight_NK, scale_inv_PQ)
        return multiply(x, weight_NK, scale_inv_PQ, cut, self._arrivals)

    def _choose(self, num_rows: int, weight_NK: Tensor) -> Cut | None:
        if not 0 < num_rows <= MAX_ROWS:
            return None
        key = (num_rows, *weight_NK.shape)
        if key not in self._chosen:
            self._chosen[key] = self._table.choose(*key)
        return self._chosen[key]
