"""Which tokens' hidden states a rank of a tp group keeps between layers.

Tensor parallelism splits heads and widths, so every rank ends a layer with a part of a sum for all
T tokens. `ReplicatedTokens` adds the parts up on every rank: plain, and each rank then repeats the
norms and projections of the others. `ScatteredTokens` gives each rank the sums of its own rows
only (a reduce-scatter moves half of an all-reduce), lets it do norms and down-projections for
those, and gathers what is left to gather, the narrow latents.

Rows of a rank: ceil(T / ranks), consecutive, in rank order. What is beyond T is padding: its values
are finite and mean nothing, no other row depends on them, and gathers drop it.

Legend: T tokens of the step, t rows of this rank, P = t x ranks padded tokens, D hidden size.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from engine.formats.fp8_rows import Activation, Fp8Rows, packed_bytes
from engine.parallel.groups import RankGroup
from engine.parallel.pending import Pending, Ready, Then

RowCount: TypeAlias = Tensor | int | None
"""Rows of a rank that are no padding, its first ones: [1] int64 on the device, a number that the
host knows, or None for all."""


class TokenSharding(Protocol):
    """How the residual stream lies on the ranks; chosen once, when the model is built.

    Attributes:
        sends_rows: whether `start_gather_padded` moves anything; FP8 rows are then best packed.
    """

    @property
    def sends_rows(self) -> bool:
        """See the class."""
        ...

    def take(self, x_T: Tensor) -> Tensor:
        """Return this rank's rows [t, ...] of what all ranks hold, zero padded."""
        ...

    def count(self, num_rows: Tensor | None, num_tokens: int) -> RowCount:
        """Return how many of this rank's rows are no padding, the first ones; None for all.

        Args:
            num_rows: [1] int64, so many of all T are none; None where all are.
            num_tokens: T.
        """
        ...

    def pad(self, x_T: Tensor) -> Tensor:
        """Return [P, ...], zeros below the T rows: the shape that `start_reduce` wants."""
        ...

    def pads(self, num_tokens: int) -> bool:
        """Return whether `pad` adds anything to so many rows."""
        ...

    def start_gather(self, rows_t: Tensor, num_tokens: int) -> Pending[Tensor]:
        """Start to bring every rank's rows to every rank: [T, ...], without the padding."""
        ...

    def start_gather_padded(self, rows_tD: Activation) -> Pending[Activation]:
        """Start to bring every rank's rows to every rank: [P, D], in the format they came in."""
        ...

    def start_reduce(self, partial_PD: Tensor) -> Pending[Tensor]:
        """Start to sum the ranks' parts of all tokens; returns this rank's rows [t, D].

        The argument may be overwritten.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReplicatedTokens:
    """Every rank keeps all rows (t = P = T): the reference, and a rank that runs alone."""

    group: RankGroup

    @property
    def sends_rows(self) -> bool:
        """See `TokenSharding`."""
        return False

    def take(self, x_T: Tensor) -> Tensor:
        """See `TokenSharding`."""
        return x_T

    def count(self, num_rows: Tensor | None, num_tokens: int) -> RowCount:
        """See `TokenSharding`."""
        return num_rows

    def pad(self, x_T: Tensor) -> Tensor:
        """See `TokenSharding`."""
        return x_T

    def pads(self, num_tokens: int) -> bool:
        """See `TokenSharding`."""
        return False

    def start_gather(self, rows_t: Tensor, num_tokens: int) -> Pending[Tensor]:
        """See `TokenSharding`."""
        assert rows_t.shape[0] == num_tokens
        return Ready(rows_t)

    def start_gather_padded(self, rows_tD: Activation) -> Pending[Activation]:
        """See `TokenSharding`."""
        return Ready(rows_tD)

    def start_reduce(self, partial_PD: Tensor) -> Pending[Tensor]:
        """See `TokenSharding`."""
        return self.group.start_all_reduce(partial_PD)


@dataclass(frozen=True, slots=True)
class ScatteredTokens:
    """Every rank keeps its share of the rows."""

    group: RankGroup

    @property
    def sends_rows(self) -> bool:
        """See `TokenSharding`."""
        return True

    def take(self, x_T: Tensor) -> Tensor:
        """See `TokenSharding`."""
        rows_P = self.pad(x_T)
        share = rows_P.shape[0] // self.group.size
        return rows_P[share * self.group.rank : share * (self.group.rank + 1)]

    def count(self, num_rows: Tensor | None, num_tokens: int) -> RowCount:
        """See `TokenSharding`; where the host knows the number, the device is not asked."""
        share = -(-num_tokens // self.group.size)
        first = share * self.group.rank
        if num_rows is not None:
            return (num_rows - first).clamp(0, share)
        own = min(max(num_tokens - first, 0), share)
        return None if own == share else own

    def pad(self, x_T: Tensor) -> Tensor:
        """See `TokenSharding`."""
        missing = -x_T.shape[0] % self.group.size
        return F.pad(x_T, (0, 0) * (x_T.dim() - 1) + (0, missing)) if missing else x_T

    def pads(self, num_tokens: int) -> bool:
        """See `TokenSharding`."""
        return num_tokens % self.group.size > 0

    def start_gather(self, rows_t: Tensor, num_tokens: int) -> Pending[Tensor]:
        """See `TokenSharding`."""
        return Then(self.group.start_all_gather(rows_t), lambda rows_P: rows_P[:num_tokens])

    def start_gather_padded(self, rows_tD: Activation) -> Pending[Activation]:
        """See `TokenSharding`."""
        if isinstance(rows_tD, Fp8Rows):
            num_columns = rows_tD.data_TK.shape[1]
            packed = self.group.start_all_gather(packed_bytes(rows_tD))
            return Then(packed, lambda bytes_PB: Fp8Rows.packed(bytes_PB, num_columns))
        return self.group.start_all_gather(rows_tD)

    def start_reduce(self, partial_PD: Tensor) -> Pending[Tensor]:
        """See `TokenSharding`."""
        return self.group.start_reduce_scatter(partial_PD)
