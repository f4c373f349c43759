"""Placements that may be better than the one that stands, and which of them each layer takes.

Found are a few moves from where experts stand (`experts.rearrange`) and, where these do not
even a layer, placements computed afresh (`experts.balance`), whose experts keep their places
as far as they can. What is better, somebody else says: time by a model, or rows. Pure, on the host.

Letters in shapes: N rows of a window, L MoE layers, E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from experts.affinity import join_pairs
from experts.balance import balance_layers
from experts.balancedness import rank_rows
from experts.rearrange import keep_slots, rearrange

if TYPE_CHECKING:
    from numpy.typing import NDArray

_POINTS: Final = 4
"""In time, that a placement computed afresh evens out together."""
_GOOD_ENOUGH: Final = 0.97
"""Balancedness of a layer's sums that no fresh placement is computed beyond."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What the layers took.

    Attributes:
        placement_LP: [L, P] int64, the logical expert of every slot.
        now_L: [L] what layers cost as experts stand now.
        then_L: the same as they stand in it.
    """

    placement_LP: NDArray[np.int64]
    now_L: NDArray[np.float64]
    then_L: NDArray[np.float64]


def find_candidates(
    counts_NLE: NDArray[np.int64],
    current_LP: NDArray[np.int64],
    *,
    num_ranks: int,
    num_hosts: int = 1,
    num_groups: int = 1,
    coactivation_LEE: NDArray[np.int64] | None = None,
) -> list[NDArray[np.int64]]:
    """Find placements [L, P] of all layers that may be better, those of few moves first.

    Args:
        counts_NLE: int64, tokens of each expert in a window.
        current_LP: int64, the logical expert of every slot now.
        num_ranks: R.
        num_hosts: that neighbouring ranks share.
        num_groups: of neighbouring experts, that save tokens their ways where they are together; 1
            where that does not matter.
        coactivation_LEE: int64, tokens that chose both of two experts; None where that is unknown.
    """
    load_LE = counts_NLE.sum(axis=0).astype(np.float64)
    few_LP = rearrange(current_LP, load_LE, num_ranks=num_ranks)
    found = [few_LP]
    if 1 < num_ranks <= num_groups:
        # Ranks that have room for whole groups: those together save tokens their ways.
        found.append(rearrange(current_LP, load_LE, num_ranks=num_ranks, num_groups=num_groups))
    if num_hosts > 1 and coactivation_LEE is not None:
        found.append(
            join_pairs(few_LP, load_LE, coactivation_LEE, num_ranks=num_ranks, num_hosts=num_hosts)
        )
    rows_LR = rank_rows(load_LE[None], few_LP, num_ranks)[0]
    even_L = rows_LR.mean(axis=1) >= _GOOD_ENOUGH * rows_LR.max(axis=1)
    # Hosts are worth whole groups of experts even where ranks are even.
    forms = [(1, 1)] if num_hosts == 1 else [(1, 1), (num_groups, num_hosts)]
    for groups, hosts in forms:
        layers = np.flatnonzero(~even_L) if hosts == 1 else np.arange(len(even_L))
        if not len(layers) or (hosts > 1 and groups % hosts):
            continue
        parts = np.array_split(counts_NLE[:, layers], min(_POINTS, len(counts_NLE)))
        points_TLE = np.stack([part.sum(axis=0) for part in parts]).astype(np.float64)
        fresh_LP = balance_layers(
            points_TLE,
            num_slots=current_LP.shape[1],
            num_ranks=num_ranks,
            num_groups=groups,
            num_hosts=hosts,
        )
        kept_LP = keep_slots(current_LP[layers], fresh_LP, num_ranks=num_ranks, num_hosts=hosts)
        whole_LP = few_LP.copy()
        whole_LP[layers] = kept_LP
        found.append(whole_LP)
    return found


def choose_by_layer(
    current_LP: NDArray[np.int64],
    candidates: Sequence[NDArray[np.int64]],
    cost_L: Callable[[NDArray[np.int64]], NDArray[np.float64]],
    cost_per_move: float,
) -> Choice:
    """Choose for each layer what saves most, less its moves; standing still saves nothing.

    Args:
        current_LP: as experts stand now.
        candidates: other placements.
        cost_L: what each layer of a placement costs, [L]: seconds of a pass, or rows.
        cost_per_move: in the same.
    """
    now_L = cost_L(current_LP)
    chosen_LP, then_L, best_L = current_LP, now_L, np.zeros(len(now_L))
    for candidate_LP in candidates:
        moves_L = (candidate_LP != current_LP).sum(axis=1)
        candidate_L = cost_L(candidate_LP)
        saved_L = now_L - candidate_L - moves_L * cost_per_move
        is_better_L = saved_L > best_L
        chosen_LP = np.where(is_better_L[:, None], candidate_LP, chosen_LP)
        then_L = np.where(is_better_L, candidate_L, then_L)
        best_L = np.maximum(saved_L, best_L)
    return Choice(placement_LP=chosen_LP, now_L=now_L, then_L=then_L)
