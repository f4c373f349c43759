"""The experts' gated MLP over masked rows, as two streamed products with nothing between them."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.formats.expert_stream import kernel
from engine.formats.expert_stream.tiles import StreamTile, StreamTiles, choose_tiles, refusal
from engine.formats.fp8_rows import GROUP
from engine.invariants import require
from engine.kernels.fused.dependent import joins_chain
from engine.kernels.masked_rows import MaskedRows, empty_masked
from runtime.errors import InternalError

Weight = tuple[Tensor, Tensor]
"""[L, N, K] e4m3 and [L, N / 128, K / 128] float32, contiguous."""


class ExpertStream:
    """Runs the MLPs that its table has tiles for."""

    def __init__(self, table: tuple[StreamTiles, ...], num_sms: int) -> None:
        """Take tiles by rows, fewest first, and the GPU's SMs."""
        self._table = table
        self._num_sms = num_sms

    def takes(self, rows: MaskedRows, w13: Weight, w2: Weight) -> bool:
        """Return whether there are tiles for so many rows, and both products can be cut into them.

        Tiles were measured on one shape (see `tiles.MEASURED`); others run with the same.
        """
        tiles, max_rows = choose_tiles(self._table, rows.expected_rows), rows.data_LMD.shape[1]
        return (
            tiles is not None
            and not refusal(tiles.gated, max_rows, *w13[0].shape[1:], is_gated=True)
            and not refusal(tiles.down, max_rows, *w2[0].shape[1:], is_gated=False)
        )

    def masked_fp8_mlp(self, rows: MaskedRows, w13: Weight, w2: Weight) -> Tensor:
        """Run each expert's MLP over its rows in use; see `expert_reference.masked_fp8_mlp`.

        Between the products numbers stay in float32, where the reference rounds to bfloat16.
        """
        tiles = choose_tiles(self._table, rows.expected_rows)
        if tiles is None:
            raise InternalError(f"no tiles for {rows.expected_rows} rows: `takes` was not asked")
        hidden = gated_product(rows, w13, tiles.gated, num_sms=self._num_sms)
        return down_product(hidden, w2, tiles.down, num_sms=self._num_sms)


def gated_product(rows: MaskedRows, w13: Weight, tile: StreamTile, *, num_sms: int) -> MaskedRows:
    """Return silu(gate) * up, quantised: [L, M, F] of rows [L, M, D] and [L, 2F, D]."""
    num_experts, max_rows, _ = rows.data_LMD.shape
    data, scale = empty_masked(num_experts, max_rows, w13[0].shape[1] // 2, rows.data_LMD.device)
    launch(rows, w13, (data, scale), tile, num_sms=num_sms)
    return MaskedRows(
        data_LMD=data,
        scale_LMG=scale,
        num_rows_L=rows.num_rows_L,
        expected_rows=rows.expected_rows,
    )


def down_product(rows: MaskedRows, w2: Weight, tile: StreamTile, *, num_sms: int) -> Tensor:
    """Return [L, M, D] bfloat16 of rows [L, M, F] and [L, D, F]."""
    shape = (*rows.data_LMD.shape[:2], w2[0].shape[1])
    out = torch.empty(shape, dtype=torch.bfloat16, device=rows.data_LMD.device)
    launch(rows, w2, (out, rows.scale_LMG), tile, num_sms=num_sms)
    return out


def launch(
    rows: MaskedRows,
    weight: Weight,
    out: tuple[Tensor, Tensor],
    tile: StreamTile,
    *,
    num_sms: int,
    run: Callable[..., Any] | None = None,
) -> object:
    """Write `out`: numbers, and their scales if the numbers are e4m3 (then gate and up are fused).

    Args:
        rows: [L, M, K].
        weight: [L, N, K].
        out: [L, M, N] bfloat16 and anything; or [L, M, N / 2] e4m3 and scales as in `MaskedRows`.
        tile: how to cut it.
        num_sms: of the GPU.
        run: takes the kernel's arguments and `grid`; by default they are launched.
    """
    data, scale = rows.data_LMD, rows.scale_LMG
    num_groups, max_rows, depth = data.shape
    width = weight[0].shape[1]
    is_gated = out[0].dtype == torch.float8_e4m3fn
    problem = refusal(tile, max_rows, width, depth, is_gated=is_gated)
    if problem:
        raise InternalError(f"streamed product: {problem}; `takes` is to be asked first")
    _check(rows, weight, out[0])
    is_compiled = isinstance(kernel.stream, triton.runtime.JITFunction)
    waits = joins_chain() and is_compiled
    options = {"launch_pdl": True} if waits else {}
    run = run or _run
    return run(
        TensorDescriptor.from_tensor(weight[0].view(-1, depth), [tile.block_n, GROUP]), weight[1],
        TensorDescriptor.from_tensor(data.view(-1, depth), [tile.block_m, GROUP]), scale,
        rows.num_rows_L, *out, max_rows,
        NUM_GROUPS=num_groups, LANES=triton.next_power_of_2(num_groups), WIDTH=width, DEPTH=depth,
        ACTIVATE=is_gated, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        UNROLL=tile.unroll, STAGES=tile.num_stages, WAITS=waits,
        num_warps=tile.num_warps, grid=(num_sms * tile.per_sm,), **options,
    )  # fmt: skip


def _check(rows: MaskedRows, weight: Weight, out: Tensor) -> None:
    """Raise InternalError unless sizes belong together: the kernel addresses memory by them."""
    num_groups, max_rows, depth = rows.data_LMD.shape
    width = weight[0].shape[1]
    is_gated = out.dtype == torch.float8_e4m3fn
    scale_strides = rows.scale_LMG.stride()
    require(
        scale_strides == (depth // GROUP * max_rows, 1, max_rows),
        "scales of masked rows",
        scale_strides,
        "one matrix an expert, column after column, is wanted",
    )
    wanted = {
        "weight": (weight[0], (num_groups, width, depth)),
        "scales of the weight": (weight[1], (num_groups, width // GROUP, depth // GROUP)),
        "counts of rows": (rows.num_rows_L, (num_groups,)),
        "masked rows": (rows.data_LMD, (num_groups, max_rows, depth)),
        "result": (out, (num_groups, max_rows, width // 2 if is_gated else width)),
    }
    for name, (tensor, shape) in wanted.items():
        is_right = tensor.shape == shape and tensor.is_contiguous()
        require(is_right, name, tuple(tensor.shape), f"contiguous {shape} is wanted")


def _run(*arguments: Any, grid: tuple[int], **options: Any) -> object:
    return kernel.stream[grid](*arguments, **options)
