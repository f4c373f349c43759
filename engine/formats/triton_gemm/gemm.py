"""Launches the Triton product: allocates the result, chooses the tiles, hands over pointers.

The methods of `TritonGemm` are those of `engine.formats.deep_gemm.DeepGemm`, so that one set of
kernels can be built on either. Nothing here waits for the device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from engine.formats.fp8_rows import GROUP, Fp8Rows
from engine.formats.triton_gemm import product
from engine.formats.triton_gemm.limits import DeviceLimits
from engine.formats.triton_gemm.tables import TunedTable, choose
from engine.formats.triton_gemm.tiles import ProductShape, RowLayout, TileConfig
from engine.invariants import require
from engine.kernels.alignment import ROW_BLOCK
from engine.kernels.masked_rows import MaskedRows

_LAYOUTS = {
    RowLayout.PLAIN: product.PLAIN.value,
    RowLayout.ALIGNED: product.ALIGNED.value,
    RowLayout.MASKED: product.MASKED.value,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product, ready to be launched with any tile.

    Attributes:
        layout: how rows find their weight.
        rows: [G, R, K] e4m3 and [G, R, K / 128] float32; unit stride along K, other strides free.
            G is 1, or with masked rows the number of experts.
        weight: [E, N, K] e4m3 and [E, ceil(N / 128), K / 128] float32, contiguous.
        experts: int32; aligned: [R] the expert of each row, or -1; masked: [G] the rows in use.
        out: [G, R, N] bfloat16, contiguous.
    """

    layout: RowLayout
    rows: tuple[Tensor, Tensor]
    weight: tuple[Tensor, Tensor]
    experts: Tensor
    out: Tensor

    def launch(self, tile: TileConfig, *, widen: bool) -> None:
        """Write `out`; rows of no expert or not in use are left as they are."""
        self._with(tile, widen, product.multiply.__getitem__)

    def compile(self, tile: TileConfig, *, widen: bool) -> object:
        """Compile what `launch` would run and return it; raises what the compiler raises."""

        def warm(grid: tuple[int]) -> Callable[..., object]:
            return lambda *arguments, **options: product.multiply.warmup(
                *arguments, grid=grid, **options
            )

        return self._with(tile, widen, warm)

    def _check(self, tile: TileConfig) -> None:
        """Raise InternalError unless sizes belong together: the kernel addresses memory by them."""
        (data, scale), (weight, weight_scale) = self.rows, self.weight
        num_groups, num_rows, depth = data.shape
        num_experts, num_columns, _ = weight.shape
        num_scales = depth // GROUP
        require(
            depth % GROUP == depth % tile.block_k == 0 and data.stride(2) == 1,
            "rows of a product",
            (tuple(data.shape), data.stride()),
            f"a depth in steps of {max(GROUP, tile.block_k)}, without gaps, is wanted",
        )
        wanted = {
            "scales of rows": (scale, (num_groups, num_rows, num_scales)),
            "weight": (weight, (num_experts, num_columns, depth)),
            "scales of the weight": (
                weight_scale,
                (num_experts, triton.cdiv(num_columns, GROUP), num_scales),
            ),
            "result": (self.out, (num_groups, num_rows, num_columns)),
        }
        for name, (tensor, shape) in wanted.items():
            require(tensor.shape == shape, name, tuple(tensor.shape), f"{shape} is wanted")
            is_dense = tensor is scale or tensor.is_contiguous()
            require(is_dense, name, tensor.stride(), "contiguous memory is wanted")

    def _with(
        self,
        tile: TileConfig,
        widen: bool,
        runner: Callable[[tuple[int]], Callable[..., object]],
    ) -> object:
        (data, scale), (weight, weight_scale) = self.rows, self.weight
        num_groups, num_rows, depth = data.shape
        num_columns = weight.shape[1]
        self._check(tile)
        if widen:
            data, weight = data.view(torch.uint8), weight.view(torch.uint8)
        tiles_m = num_groups * triton.cdiv(num_rows, tile.block_m)
        return runner((tiles_m * triton.cdiv(num_columns, tile.block_n),))(
            data, scale, weight, weight_scale, self.out, self.experts,
            num_rows, num_groups, num_columns, depth,
            data.stride(0), data.stride(1), scale.stride(0), scale.stride(1), scale.stride(2),
            tile.group_m,
            LAYOUT=_LAYOUTS[self.layout], WIDEN=widen,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


class TritonGemm:
    """The products of one kind of GPU."""

    def __init__(self, limits: DeviceLimits, table: TunedTable | None = None) -> None:
        """Take the device's limits, which may be tighter than the true ones, and its table."""
        self.limits = limits
        self._table = table
        # What was chosen for shapes seen before, rows rounded to a power of two.
        self._chosen: dict[ProductShape, TileConfig] = {}

    @property
    def widens(self) -> bool:
        """Whether numbers are multiplied as float16, because the GPU has no FP8."""
        return not self.limits.has_fp8

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Return [T, N] bfloat16 of [T, K] rows and a weight [N, K] e4m3; T may be 0."""
        out = _empty(weight_NK, x.num_rows, weight_NK.shape[0])
        if x.num_rows:
            weight = (weight_NK.unsqueeze(0), scale_inv_PQ.unsqueeze(0))
            self.run(_flat(RowLayout.PLAIN, x, weight, x.scale_TG, out), x.num_rows)
        return out

    def grouped_linear(
        self,
        x: Fp8Rows,
        expert_M: Tensor,
        weight_ENK: Tensor,
        scale_inv_EPQ: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply aligned rows with their expert's weight.

        Args:
            x: [M, K] rows in the layout of `Alignment`.
            expert_M: [M] int32; blocks of 128 rows of -1 cost nothing and stay uninitialised.
            weight_ENK: [E, N, K] e4m3.
            scale_inv_EPQ: [E, ceil(N / 128), K / 128] float32.
            out: [M, N] bfloat16, contiguous, to be written; None for one that is made here.

        Returns:
            [M, N] bfloat16.
        """
        require(
            x.num_rows % ROW_BLOCK == 0 and expert_M.shape == (x.num_rows,),
            "aligned rows",
            (x.num_rows, tuple(expert_M.shape)),
            f"a multiple of {ROW_BLOCK}, and an expert for each, are wanted",
        )
        if out is None:
            out = _empty(weight_ENK, x.num_rows, weight_ENK.shape[1])
        if x.num_rows:
            weight = (weight_ENK, scale_inv_EPQ)
            self.run(_flat(RowLayout.ALIGNED, x, weight, expert_M, out), x.num_rows)
        return out

    def masked_linear(self, x: MaskedRows, weight_LNK: Tensor, scale_inv_LPQ: Tensor) -> Tensor:
        """Multiply rows in use with their expert's weight; fixed shapes, no host read.

        Args:
            x: [L, M, K] rows.
            weight_LNK: [L, N, K] e4m3.
            scale_inv_LPQ: [L, ceil(N / 128), K / 128] float32.

        Returns:
            [L, M, N] bfloat16; rows that are not in use hold anything.
        """
        out = _empty(weight_LNK, *x.data_LMD.shape[:2], weight_LNK.shape[1])
        job = Product(
            layout=RowLayout.MASKED,
            rows=(x.data_LMD, x.scale_LMG),
            weight=(weight_LNK, scale_inv_LPQ),
            experts=x.num_rows_L,
            out=out,
        )
        self.run(job, min(x.expected_rows, x.data_LMD.shape[1]))
        return out

    def run(self, job: Product, num_rows: int) -> None:
        """Launch with the tile for `num_rows` rows, as `ProductShape` counts them."""
        num_experts, num_columns, depth = job.weight[0].shape
        shape = ProductShape(
            layout=job.layout,
            num_rows=triton.next_power_of_2(max(num_rows, 1)),
            num_columns=num_columns,
            depth=depth,
            num_experts=num_experts,
        )
        tile = self._chosen.get(shape)
        if tile is None:
            tile = choose(shape, self._table, self.limits)
            self._chosen[shape] = tile
        job.launch(tile, widen=self.widens)


def _empty(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=like.device)


def _flat(
    layout: RowLayout, x: Fp8Rows, weight: tuple[Tensor, Tensor], experts: Tensor, out: Tensor
) -> Product:
    """Return the product of rows in one run."""
    return Product(
        layout=layout,
        rows=(x.data_TK.unsqueeze(0), x.scale_TG.unsqueeze(0)),
        weight=weight,
        experts=experts,
        out=out.unsqueeze(0),
    )
