"""Experts over the overflow: the rows behind the capacity of the contiguous layout (`alignment`).

Called by sets of kernels, behind the fast grouped GEMM and on its stream; nothing blocks the host,
which does not know whether there are such rows. Two kernels of one program per SM read on the
device how many there are; without any they end at once. The first reads the tokens' rows where they
are, so the overflow takes memory for its activations and results alone.
"""

import torch
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.formats.triton_gemm import overflow_kernel
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.invariants import require
from engine.kernels.alignment import Overflow

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
        _check(overflow, expert_V, (w13[0], w2[0]), out_VD)
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


def _check(
    overflow: Overflow, expert_V: Tensor, weights: tuple[Tensor, Tensor], out_VD: Tensor
) -> None:
    """Check that all sizes belong together; see `OverflowExperts.run`.

    Raises:
        InternalError: they do not.
    """
    (num_rows, hidden_size), (num_experts, _, width) = out_VD.shape, weights[1].shape
    places, source = overflow.places, overflow.source
    require(
        places.token_V.shape == expert_V.shape == (num_rows,)
        and places.ends_E.shape == (num_experts,)
        and not num_rows % TILE_M
        and out_VD.is_contiguous(),
        "rows behind the capacity",
        (tuple(places.token_V.shape), tuple(expert_V.shape), tuple(out_VD.shape)),
        f"one number a row is wanted, of {num_experts} experts and a multiple of {TILE_M} rows",
    )
    require(
        weights[0].shape == (num_experts, 2 * width, hidden_size)
        and weights[1].shape[1] == source.data_TK.shape[1] == hidden_size
        and not width % GROUP
        and not hidden_size % GROUP,
        "experts of rows behind the capacity",
        (tuple(weights[0].shape), tuple(weights[1].shape), source.data_TK.shape[1]),
        f"widths that belong together, in groups of {GROUP}, are wanted",
    )
