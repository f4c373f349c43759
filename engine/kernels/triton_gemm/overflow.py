"""Experts over the overflow: the rows behind the capacity of the contiguous layout (`alignment`).

Called by sets of kernels, behind the fast grouped GEMM and on its stream; nothing blocks the host,
which does not know whether there are such rows. Two kernels of one program per SM read on the
device how many there are; without any they end at once. The first reads the tokens' rows where they
are, so the overflow takes memory for its activations and results alone.
"""

import torch
from torch import Tensor

from engine.kernels.alignment import Overflow
from engine.kernels.fp8_rows import GROUP, Fp8Rows
from engine.kernels.triton_gemm import overflow_kernel
from engine.kernels.triton_gemm.limits import DeviceLimits

TILE_M = 64
"""Rows of a tile; it has 128 columns. An expert's run is a multiple of 128 rows."""


class OverflowExperts:
    """See `parts.OverflowMlp`."""

    def __init__(self, limits: DeviceLimits) -> None:
        """Take what the GPU can do."""
        self._num_programs = limits.num_sms
        self._widens = not limits.has_fp8

    def run(
        self,
        overflow: Overflow,
        expert_V: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        out_VD: Tensor,
    ) -> None:
        """Write the rows in use of `out_VD`; see `parts.OverflowMlp`."""
        (num_rows, hidden_size), (num_experts, _, width) = out_VD.shape, w2[0].shape
        source, places = overflow.source, overflow.places
        assert places.token_V.shape == expert_V.shape == (num_rows,)
        assert source.data_TK.shape[1] == w13[0].shape[2] == w2[0].shape[1] == hidden_size
        assert w13[0].shape[:2] == (num_experts, 2 * width)
        assert places.ends_E.shape == (num_experts,)
        assert not width % GROUP
        assert not hidden_size % GROUP
        assert not num_rows % TILE_M
        assert out_VD.is_contiguous()
        if not num_rows or not source.num_rows:
            return
        hidden = Fp8Rows.empty(num_rows, width, out_VD.device)
        constants, scale_column = (self._widens, TILE_M), hidden.scale_TG.stride(1)
        overflow_kernel.up(
            (self._num_programs,),
            (
                self._bits(source.data_TK), source.scale_TG, places.token_V, places.ends_E,
                expert_V, self._bits(w13[0]), w13[1], self._bits(hidden.data_TK), hidden.scale_TG,
            ),
            (source.data_TK.stride(0), num_experts, hidden_size, width),
            (*source.scale_TG.stride(), scale_column, source.num_rows, places.capacity),
            constants,
            num_warps=8,
        )  # fmt: skip
        overflow_kernel.down(
            (self._num_programs,),
            (
                self._bits(hidden.data_TK), hidden.scale_TG, places.ends_E, expert_V,
                self._bits(w2[0]), w2[1], out_VD,
            ),
            (num_experts, width, hidden_size),
            (scale_column, places.capacity),
            constants,
            num_warps=8,
        )  # fmt: skip

    def _bits(self, numbers: Tensor) -> Tensor:
        """Return what a kernel is given of e4m3 numbers."""
        return numbers.view(torch.uint8) if self._widens else numbers
