"""Which rows of a step a layer is asked about, where of the others only what it keeps is wanted.

A step that verifies drafts brings several rows of each sequence to the layer for multi-token
prediction, and wants one guess behind them: at the last row that counts. What the layer keeps of a
row depends on this row alone, before anybody attends. So the others are over with that, and the
products, experts and exchanges behind attention have one row a sequence.

Legend: S sequences, R rows of each, T = S * R, s and t those of this rank.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.parallel.token_sharding import TokenSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRows:
    """The row of each sequence that is asked about, as a step says it to the model.

    Attributes:
        place_S: [S] int64, which of the R rows of its sequence.
        num_rows: R.
        num_seqs: [1] int64 on the device, how many of the sequences, the first ones, are
            somebody's; the others are padding. None where there is none.
    """

    place_S: Tensor
    num_rows: int
    num_seqs: Tensor | None

    def of(self, rows_T: Tensor) -> Tensor:
        """Return them among the rows [T, ...] of all sequences, [S, ...]."""
        return rows_T.index_select(0, _numbers(self.place_S, self.num_rows))

    def take(self, sharding: TokenSharding, x_T: Tensor) -> Tensor:
        """Return this rank's rows of what all ranks hold: those of whole sequences, [t, ...]."""
        x_SR = x_T.view(-1, self.num_rows, *x_T.shape[1:])
        return sharding.take(x_SR).flatten(0, 1)

    def asking(self, sharding: TokenSharding) -> "AskingRows":
        """Return them by their numbers, of a step whose rows were taken by `take`."""
        own_s = sharding.take(self.place_S)
        rows_S = _numbers(self.place_S, self.num_rows)
        is_all = own_s is self.place_S  # where every rank keeps all rows
        return AskingRows(
            rows_S=rows_S, own_rows_s=rows_S if is_all else _numbers(own_s, self.num_rows)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingRows:
    """The same, as layers of a step select them.

    Attributes:
        rows_S: [S] int64, of all T rows of the step.
        own_rows_s: [s] int64, of the t rows that this rank keeps between layers.
    """

    rows_S: Tensor
    own_rows_s: Tensor


def _numbers(place_S: Tensor, num_rows: int) -> Tensor:
    """Return the numbers of rows of which each is one of `num_rows` neighbours."""
    firsts = torch.arange(0, len(place_S) * num_rows, num_rows, device=place_S.device)
    return firsts + place_S
