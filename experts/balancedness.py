"""How evenly ranks are loaded, as the time that is lost by it.

All ranks wait for the slowest one in every MoE layer, so a pass takes as long as the sum over its
layers of the fullest rank. *Balancedness* is the sum of the means over the sum of the maxima, over
layers and passes: 1 - balancedness is the share of that time in which a mean rank waits. Others
mean other things by the word (the mean of the layers' ratios, or max / mean - 1): never compare.

Letters in shapes: N rows of a trace, L MoE layers, E logical experts, P physical slots, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Balancedness:
    """Of a stretch of passes.

    Attributes:
        overall: sum of means over sum of maxima, over all layers and passes; 1.0 is even.
        worst_layer: the least that any layer has by itself, over its passes.
        worst_layer_index: which layer that is.
    """

    overall: float
    worst_layer: float
    worst_layer_index: int


def even_placement(num_experts: int, num_slots: int, num_ranks: int) -> NDArray[np.int64]:
    """Return [P] int64: experts in order, the first ones again in spare slots, dealt to ranks.

    Without spare slots that is slot p for expert p. With them every rank gets its experts in
    order, and then as many spare ones as another.
    """
    spare = (num_slots - num_experts) // num_ranks
    if num_slots % num_ranks or (num_slots - num_experts) % num_ranks:
        # Ranks do not hold as many experts each: deal slots in turns, copies far from each other.
        return np.arange(num_slots).reshape(-1, num_ranks).T.ravel() % num_experts
    own = np.arange(num_experts).reshape(num_ranks, -1)
    # A spare slot holds an expert of the rank half way round.
    spares = np.roll(own, num_ranks // 2, axis=0)[:, :spare]
    if spares.shape[1] < spare:
        return np.arange(num_slots).reshape(-1, num_ranks).T.ravel() % num_experts
    return np.concatenate([own, spares], axis=1).ravel()


def copies_of(placement_LP: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Return [L, E] int64, how many slots hold each expert."""
    layers = len(placement_LP)
    flat = (placement_LP + np.arange(layers)[:, None] * num_experts).ravel()
    return np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)


def rank_rows(
    counts_NLE: NDArray[np.int64], placement_LP: NDArray[np.int64], num_ranks: int
) -> NDArray[np.float64]:
    """Return [N, L, R] float64, rows that come to each rank.

    Tokens of an expert are dealt to its slots in turn (`ExpertPlacement.to_physical`), so a slot
    gets the expert's rows divided by its slots.
    """
    slots_LPN = slot_rows(counts_NLE, placement_LP)
    layers, num_slots, rows = slots_LPN.shape
    by_rank_LRSN = slots_LPN.reshape(layers, num_ranks, num_slots // num_ranks, rows)
    sums: NDArray[np.float64] = by_rank_LRSN.sum(axis=2).transpose(2, 0, 1)
    return sums


def slot_rows(
    counts_NLE: NDArray[np.int64], placement_LP: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [L, P, N] float64, rows that come to each slot.

    Rows of the trace last: slots are then gathered, and ranks added up, by whole lines of memory.
    """
    rows, layers, experts = counts_NLE.shape
    share_NLE = counts_NLE / np.maximum(copies_of(placement_LP, experts), 1)
    share_XN = np.ascontiguousarray(share_NLE.reshape(rows, -1).T)
    slots: NDArray[np.float64] = share_XN[placement_LP + np.arange(layers)[:, None] * experts]
    return slots


def balancedness_of(load_NLR: NDArray[np.float64]) -> Balancedness:
    """Measure how even loads of ranks are; 1.0 where nothing is loaded."""
    means_L, maxima_L = load_NLR.mean(axis=2).sum(axis=0), load_NLR.max(axis=2).sum(axis=0)
    ratios_L = np.divide(means_L, maxima_L, out=np.ones_like(means_L), where=maxima_L > 0)
    worst = int(ratios_L.argmin()) if len(ratios_L) else 0
    total = float(maxima_L.sum())
    return Balancedness(
        overall=float(means_L.sum()) / total if total > 0 else 1.0,
        worst_layer=float(ratios_L[worst]) if len(ratios_L) else 1.0,
        worst_layer_index=worst,
    )
