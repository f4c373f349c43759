"""What a number format is: how weights lie, how rows travel to them, and what multiplies the two.

A format is one object of a device. It is chosen once, when the model is built, by what the
checkpoint says (`Formats.of`); matrices, experts, loaders and dispatchers ask it, and never which
one it is. The key idea: weights that a format cannot hold, or that the checkpoint leaves as they
are, have the plain one, so there is no case of "no format".

Legend: T tokens, N rows and K columns of a weight, L local experts, M rows at them, D hidden size,
F expert width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.formats.expert_rows import GroupedRows, Rows
from engine.formats.fp8_rows import Activation, Fp8Rows
from engine.formats.stored_weight import StoredWeight
from engine.kernels.masked_rows import MaskedRows
from engine.weights.slices import LoadRule


class Storage(NamedTuple):
    """What a weight of one shape is kept in.

    Attributes:
        dtype: of the numbers; None for the compute dtype.
        scale_shape: of their float32 scales; None without scales.
    """

    dtype: torch.dtype | None = None
    scale_shape: tuple[int, ...] | None = None


class WeightLayout(LoadRule, Protocol):
    """How weights of a format lie in memory, and how they come there."""

    def why_not(self, parts: Sequence[int], columns: int, *, whole: bool) -> str:
        """Return why a weight cannot be kept so, or nothing.

        Args:
            parts: rows of the checkpoint tensors that lie one below the other.
            columns: K.
            whole: whether the last part too ends where scales do, because more of its tensor lies
                on other ranks.
        """
        ...

    def storage(self, num_rows: int, num_columns: int) -> Storage:
        """Return what a weight [N, K] is kept in."""
        ...

    def scale_rows(self, first: int, num_rows: int) -> slice:
        """Return the rows of the scales that belong to rows [first, first + num_rows)."""
        ...

    def dequantize(self, weight: StoredWeight) -> Tensor:
        """Return [N, K]: the numbers themselves, or a copy in float32."""
        ...


class RowCodec(Protocol):
    """How rows are quantised for products, and packed for a journey."""

    def quantize_rows(self, x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
        """Quantise rows, into `out` if given."""
        ...

    def pack(self, rows: Fp8Rows) -> Tensor:
        """Return [T, B] uint8: a row's numbers and scales as one run of bytes."""
        ...

    def unpack(self, bytes_TB: Tensor, num_columns: int) -> Fp8Rows:
        """Return views of the rows in what `pack` returned."""
        ...


class NumberFormat(Protocol):
    """A format on one device."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether weights are other numbers than those of the compute dtype."""
        ...

    @property
    def weights(self) -> WeightLayout:
        """How weights lie in memory, and how they are loaded."""
        ...

    @property
    def rows(self) -> RowCodec | None:
        """How the rows of its products are quantised; None if they come in the compute dtype."""
        ...

    def holds(self, config: "QuantizedConfig") -> bool:
        """Return whether a checkpoint's quantised weights can be kept so."""
        ...

    def linear(self, x: Activation, weight: StoredWeight) -> Tensor:
        """Multiply with one weight.

        Args:
            x: [T, K], quantised by `rows`; [..., K] in the compute dtype without that.
            weight: [N, K].

        Returns:
            [T, N] or [..., N]; bfloat16 from quantised rows.
        """
        ...

    def grouped_mlp(self, rows: GroupedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """Run each expert's gated MLP over its rows, in the contiguous layout of the format.

        Args:
            rows: `AlignedRows`; without `rows`, `ExpertRows`.
            w13: [L, 2F, D], gate over up.
            w2: [L, D, F].

        Returns:
            [M, D] in the order of the rows; those of no token hold anything.
        """
        ...

    def masked_mlp(self, rows: MaskedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """Do the same in the masked layout, which a format without `rows` has not: [L, M, D].

        Raises:
            InternalError: the format has no masked layout.
        """
        ...


def run_experts(
    number_format: NumberFormat, rows: Rows, w13: StoredWeight, w2: StoredWeight
) -> Tensor:
    """Run each expert's gated MLP over its rows, whatever their layout.

    Args:
        number_format: of both weights.
        rows: a layout that the format has.
        w13: [L, 2F, D], gate over up.
        w2: [L, D, F].

    Returns:
        [M, D] in the order of the rows; [L, M, D] in the masked layout.

    Raises:
        InternalError: the format has no masked layout.
    """
    if isinstance(rows, MaskedRows):
        return number_format.masked_mlp(rows, w13, w2)
    return number_format.grouped_mlp(rows, w13, w2)


class QuantizedConfig(Protocol):
    """What a format asks of a model's configuration."""

    @property
    def fp8_block_size(self) -> int:
        """Edge of a block of scales if the checkpoint may hold FP8 weights, else 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The formats that a device multiplies in.

    Attributes:
        plain: the compute dtype.
        quantized: others, the best first.
    """

    plain: NumberFormat
    quantized: tuple[NumberFormat, ...] = ()

    def of(self, config: QuantizedConfig) -> NumberFormat:
        """Return the format of the weights that a checkpoint quantises.

        It is the plain one if nothing is quantised, or if the device multiplies in nothing that
        holds the checkpoint's numbers: then they are dequantised at load.
        """
        return next((one for one in self.quantized if one.holds(config)), self.plain)

    def describe(self) -> str:
        """Name all but the plain one."""
        return ", ".join(one.name for one in self.quantized) or "none"
