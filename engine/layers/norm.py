"""Root-mean-square norm, whole on every rank, and the residual stream that it reads.

The key idea: a layer does not add its output to the stream. It hands it on beside the stream, and
the next norm adds both while it reads them anyway.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from torch import Tensor, nn

from engine.formats.fp8_rows import Activation, Fp8Rows, empty_packed
from engine.layers.context import LayerContext
from engine.ops.norm import ADD_RMS_NORM, ADD_RMS_NORM_FP8, RMS_NORM
from engine.weights.slices import WeightSlice


class FeedFormat(Enum):
    """What a layer wants from the norm before it."""

    PLAIN = auto()
    FP8 = auto()
    PACKED_FP8 = auto()
    """As bytes that can be sent (`engine.formats.fp8_rows`)."""

    @classmethod
    def of(cls, *, is_quantized: bool, is_sent: bool = False) -> "FeedFormat":
        """Return the format for a layer that takes quantised rows or not, and sends them or not."""
        if not is_quantized:
            return cls.PLAIN
        return cls.PACKED_FP8 if is_sent else cls.FP8


@dataclass(frozen=True, slots=True)
class Residual:
    """The stream between layers: its value is `rows_TD + delta_TD`.

    Attributes:
        rows_TD: [T, D], this rank's rows.
        delta_TD: [T, D], what came last and is not added yet; None for nothing.
    """

    rows_TD: Tensor
    delta_TD: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Normed:
    """What a norm feeds into products, in one or both formats.

    Attributes:
        plain_TD: [T, D] in the compute dtype, or None.
        fp8_TD: the same, quantised, or None.
    """

    plain_TD: Tensor | None
    fp8_TD: Fp8Rows | None

    @property
    def feed(self) -> Activation:
        """Quantised if there is that, else plain."""
        if self.fp8_TD is not None:
            return self.fp8_TD
        return self.plain

    @property
    def plain(self) -> Tensor:
        """[T, D], for somebody who asked for it."""
        assert self.plain_TD is not None
        return self.plain_TD


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, ctx: LayerContext, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self._rms_norm = ctx.ops[RMS_NORM]
        self._add_rms_norm = ctx.ops[ADD_RMS_NORM]
        self._add_rms_norm_fp8 = ctx.ops[ADD_RMS_NORM_FP8]
        self.eps = eps
        self.weight = ctx.parameter(size)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to the same shape and dtype."""
        return self._rms_norm(x, self.weight, self.eps)

    def add(
        self, stream: Residual, feed: FeedFormat, *, with_plain: bool = False
    ) -> tuple[Tensor, Normed]:
        """Add up the stream and norm it.

        Args:
            stream: of [T, size].
            feed: what the norm is wanted as.
            with_plain: it is wanted in the compute dtype too.

        Returns:
            The sum [T, size], and its norm.
        """
        rows_TD, delta_TD = stream.rows_TD, stream.delta_TD
        if feed is not FeedFormat.PLAIN:
            out = None
            if feed is FeedFormat.PACKED_FP8:
                out = empty_packed(rows_TD.shape[0], rows_TD.shape[1], rows_TD.device)
            rows_TD, plain_TD, fp8_TD = self._add_rms_norm_fp8(
                rows_TD, delta_TD, self.weight, self.eps, with_plain=with_plain, out=out
            )
            return rows_TD, Normed(plain_TD=plain_TD, fp8_TD=fp8_TD)
        if delta_TD is None:
            return rows_TD, Normed(plain_TD=self(rows_TD), fp8_TD=None)
        rows_TD, plain_TD = self._add_rms_norm(rows_TD, delta_TD, self.weight, self.eps)
        return rows_TD, Normed(plain_TD=plain_TD, fp8_TD=None)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)
