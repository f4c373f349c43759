"""The format of no format: weights and rows are numbers of the compute dtype, as they are.

Plain PyTorch on every device.
"""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from engine.formats.base import QuantizedConfig, RowCodec, Storage
from engine.formats.expert_rows import ExpertRows, GroupedRows, plain
from engine.formats.fp8_rows import Activation
from engine.formats.stored_weight import StoredWeight
from engine.kernels import few_rows
from engine.kernels.masked_rows import MaskedRows
from engine.weights.slices import AsNumbers
from runtime.errors import InternalError


class PlainWeights(AsNumbers):
    """See `WeightLayout`; every shape is held, and there are no scales."""

    def why_not(self, parts: Sequence[int], columns: int, *, whole: bool) -> str:
        """See `WeightLayout`."""
        return ""

    def storage(self, num_rows: int, num_columns: int) -> Storage:
        """See `WeightLayout`."""
        return Storage()

    def scale_rows(self, first: int, num_rows: int) -> slice:
        """See `WeightLayout`."""
        return slice(0, 0)

    def dequantize(self, weight: StoredWeight) -> Tensor:
        """See `WeightLayout`."""
        return weight.numbers


class PlainFormat:
    """See `NumberFormat`."""

    name = "plain"
    is_quantized = False
    weights = PlainWeights()
    rows: RowCodec | None = None

    def holds(self, config: QuantizedConfig) -> bool:
        """See `NumberFormat`; numbers of any format can be dequantised."""
        return True

    def linear(self, x: Activation, weight: StoredWeight) -> Tensor:
        """See `NumberFormat`."""
        return few_rows.linear(plain(x), weight.numbers)

    def grouped_mlp(self, rows: GroupedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """See `NumberFormat`."""
        assert isinstance(rows, ExpertRows)
        return few_rows.grouped_mlp(rows.rows_MD, rows.num_rows_per_expert, w13.numbers, w2.numbers)

    def masked_mlp(self, rows: MaskedRows, w13: StoredWeight, w2: StoredWeight) -> Tensor:
        """See `NumberFormat`."""
        raise InternalError("rows in the masked layout are quantised, and these weights are plain")


PLAIN: Final = PlainFormat()
"""The one there is: it has no state, and is the same on every device."""
