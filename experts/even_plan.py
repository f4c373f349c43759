"""Plans by rows: the fewest moves to ranks of even rows, whatever those are worth in time.

For GPUs of which no rates are known, and to see moves happen where time refuses them. Layers choose
among the same placements as by time (`experts.candidates`), and moves cost nothing; so a
layer that few moves even out is not placed afresh.

Letters in shapes: N rows of a window, L MoE layers, E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from experts.balancedness import rank_rows
from experts.candidates import choose_by_layer, find_candidates
from experts.plan import Expectation, Plan, plan_of, refuse_small_gain, sample_rows
from experts.told_rounds import ToldRounds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from experts.moves import Round
    from experts.windows import LoadWindow

_SAMPLED_ROWS: Final = 256
"""Of a window, by which placements are compared: passes of few tokens differ much."""


def plan_even_rows(
    counts_NLE: NDArray[np.int64],
    current_LP: NDArray[np.int64],
    *,
    num_ranks: int,
    min_gain: float,
    expert_bytes: int = 0,
) -> Plan:
    """Plan from what experts got; a layer that would not become better stays as it is.

    Args:
        counts_NLE: int64, of one pass or more in each row.
        current_LP: int64, the logical expert of every slot now.
        num_ranks: R, that share the experts.
        min_gain: by which share the rows of the fullest ranks, summed over layers and passes, have
            to become fewer; else nothing moves.
        expert_bytes: that a move copies, for what the plan says of itself.

    Returns:
        A plan whose gain is that share.
    """
    sample_NLE = sample_rows(counts_NLE, _SAMPLED_ROWS)

    def fullest_rows(placement_LP: NDArray[np.int64]) -> NDArray[np.float64]:
        rows_L: NDArray[np.float64] = (
            rank_rows(sample_NLE, placement_LP, num_ranks).max(axis=2).sum(axis=0)
        )
        return rows_L

    candidates = find_candidates(counts_NLE, current_LP, num_ranks=num_ranks)
    return plan_of(
        current_LP,
        choose_by_layer(current_LP, candidates, fullest_rows, 0.0),
        sample_NLE,
        num_ranks=num_ranks,
        expert_bytes=expert_bytes,
        other=0.0,
        refuse=partial(_refusal, min_gain),
    )


def even_rounds(
    window: LoadWindow, table_LP: NDArray[np.int64], *, num_ranks: int, min_gain: float
) -> Sequence[Round]:
    """Plan for a running instance: the rounds as they are told, none where nothing is to move.

    Args:
        window: of all ranks.
        table_LP: the expert of every slot now.
        num_ranks: see `plan_even_rows`.
        min_gain: the same.
    """
    counts_NLE = window.counts_LE[None]
    plan = plan_even_rows(counts_NLE, table_LP, num_ranks=num_ranks, min_gain=min_gain)
    return ToldRounds.of(plan.rounds)


def _refusal(min_gain: float, expectation: Expectation) -> str:
    if not expectation.num_moves:
        return f"no layer becomes evener: balancedness is {expectation.balancedness_before:.3f}"
    return refuse_small_gain(expectation, min_gain)
