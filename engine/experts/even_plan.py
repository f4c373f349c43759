"""The way to the most even rows that `balance_layers` finds, if it is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.experts.balance import balance_layers
from engine.experts.balancedness import rank_rows
from engine.experts.moves import Round, order_moves
from engine.experts.told_rounds import ToldRounds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.experts.windows import LoadWindow


def plan_even_rows(
    window: LoadWindow, table_LP: NDArray[np.int64], *, num_ranks: int, min_gain: float
) -> Sequence[Round]:
    """Plan from what experts got; a layer that would not become better stays as it is.

    Args:
        window: of all ranks.
        table_LP: the expert of every slot now.
        num_ranks: that share the experts.
        min_gain: by which share the rows of the slowest ranks, summed over layers, have to become
            fewer; else nothing moves.
    """
    counts_NLE = window.counts_LE[None]
    even_LP = balance_layers(
        counts_NLE.astype(np.float64), num_slots=table_LP.shape[1], num_ranks=num_ranks
    )
    now_L, then_L = (
        rank_rows(counts_NLE, placement_LP, num_ranks)[0].max(axis=1)
        for placement_LP in (table_LP, even_LP)
    )
    before, after = float(now_L.sum()), float(np.minimum(now_L, then_L).sum())
    if not after or before / after - 1 < min_gain:
        return ()
    target_LP = np.where((then_L < now_L)[:, None], even_LP, table_LP)
    return ToldRounds.of(order_moves(table_LP, target_LP, num_ranks=num_ranks)[1])
