"""FP8 in blocks of 128: the format of DeepSeek-V3's checkpoints, kept as it is stored.

A weight is e4m3 numbers with a float32 scale per 128 x 128 block (`engine.weights.fp8`), so nothing
is lost or grown at load; rows are e4m3 numbers with a scale per 128 neighbours (`fp8_rows`). What
multiplies them on a kind of GPU is `Fp8Products`; the format itself knows no device.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.formats.base import NumberFormat, QuantizedConfig, Storage
from engine.formats.expert_rows import AlignedRows, GroupedRows, quantized
from engine.formats.fp8_rows import GROUP, Activation, Fp8Rows, packed_bytes
from engine.formats.stored_weight import StoredWeight
from engine.kernels.alignment import Overflow
from engine.kernels.base import KernelSet
from engine.kernels.masked_rows import MaskedRows
from engine.weights.fp8 import dequantize_block, quantize_block, scale_shape
from engine.weights.slices import TensorSource, WeightSlice


class Fp8Products(Protocol):
    """What a device does with the format; see `fp8_products`."""

    def quantize_rows(self, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
        """Quantise in groups of 128, into `out` if given."""
        ...

    def linear(self, x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
        """Multiply with one weight: [T, N] bfloat16."""
        ...

    def grouped_mlp(
        self,
        rows: Fp8Rows,
        expert_M: Tensor,
        w13: tuple[Tensor, Tensor],
        w2: tuple[Tensor, Tensor],
        overflow: Overflow | None = None,
    ) -> Tensor:
        """Run experts over aligned rows; see `expert_reference.grouped_fp8_mlp`."""
        ...

    def masked_mlp(
        self, rows: MaskedRows, w13: tuple[Tensor, Tensor], w2: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Run experts over masked rows; see `expert_reference.masked_fp8_mlp`."""
        ...


class Fp8Weights:
    """See `WeightLayout`."""

    def why_not(self, parts: Sequence[int], columns: int, *, whole: bool) -> str:
        """See `WeightLayout`; blocks of scales end with each tensor, but for the last."""
        inner = parts if whole else parts[:-1]
        if columns % GROUP or any(part % GROUP for part in inner):
            shares = " + ".join(map(str, parts))
            return f"{shares} rows x {columns} columns are not blocks of {GROUP}"
        return ""

    def storage(self, num_rows: int, num_columns: int) -> Storage:
        """See `WeightLayout`."""
        return Storage(torch.float8_e4m3fn, scale_shape(num_rows, num_columns))

    def scale_rows(self, first: int, num_rows: int) -> slice:
        """See `WeightLayout`."""
        return slice(first // GROUP, -(-(first + num_rows) // GROUP))

    def dequantize(self, weight: StoredWeight) -> Tensor:
        """See `WeightLayout`."""
        return dequantize_block(*weight.pair())

    def read(self, source: TensorSource, part: WeightSlice) -> None:
        """See `LoadRule`; the checkpoint's own bytes."""
        self._write(part, *source.read_quantized(part.name, part.ranges))

    def draw(self, values: Tensor, part: WeightSlice) -> None:
        """See `LoadRule`."""
        self._write(part, *quantize_block(values))

    def _write(self, part: WeightSlice, numbers: Tensor, scale: Tensor) -> None:
        assert part.destination is not None
        assert part.scale is not None
        part.destination.copy_(numbers)
        part.scale.copy_(scale)


class Fp8RowCodec:
    """See `RowCodec`; packed rows are those of `Fp8Rows.packed`."""

    def __init__(self, products: Fp8Products) -> None:
        self.quantize_rows = products.quantize_rows

    def pack(self, rows: Fp8Rows) -> Tensor:
        """See `RowCodec`; rows that lie packed already stay where they are."""
        return packed_bytes(rows)

    def unpack(self, bytes_TB: Tensor, num_columns: int) -> Fp8Rows:
        """See `RowCodec`."""
        return Fp8Rows.packed(bytes_TB, num_columns)


class Fp8Block:
    """See `NumberFormat`.

    Attributes:
        products: of the device.
    """

    name = f"FP8 in blocks of {GROUP}"
    is_quantized = True
    weights = Fp8Weights()

    def __init__(self, products: Fp8Products) -> None:
        """Take what multiplies on the device."""
        self.products = products
        self.rows = Fp8RowCodec(products)

    def holds(self, config: QuantizedConfig) -> bool:
        """See `NumberFormat`; checkpoints have blocks of other sizes too."""
        return config.fp8_block_size == GROUP

    def linear(self, x: Activation, weight: StoredWeight) -> Tensor:
        """See `NumberFormat`."""
        return self.products.linear(quantized(x), *weight.pair())

    def grouped_mlp(self, rows: GroupedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """See `NumberFormat`; bfloat16."""
        assert isinstance(rows, AlignedRows)
        if not rows.expert_M.shape[0]:
            return torch.empty_like(rows.rows.data_TK, dtype=torch.bfloat16)
        return self.products.grouped_mlp(
            rows.rows, rows.expert_M, w13.pair(), w2.pair(), overflow=rows.overflow
        )

    def masked_mlp(self, rows: MaskedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """See `NumberFormat`; bfloat16."""
        return self.products.masked_mlp(rows, w13.pair(), w2.pair())


def create(kernels: KernelSet, device: torch.device) -> NumberFormat | None:
    """Return the format with the products of a set of kernels; None for plain PyTorch.

    There weights are dequantised at load, which is faster without hardware.
    """
    if kernels is KernelSet.PORTABLE:
        return None
    from engine.formats import fp8_triton  # late: without a GPU nobody imports Triton

    make = fp8_triton.hopper if kernels is KernelSet.HOPPER else fp8_triton.triton
    return Fp8Block(make(device))
