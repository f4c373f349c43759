"""What each rank carries of each group of experts, while slots are exchanged.

A token chooses its experts in few groups, so a rank that holds much of a group spares tokens of it
the way to another rank. An exchange *tears* as much as its two experts leave of their groups behind
and find less of them where they come to.

Letters in shapes: L MoE layers, R ranks, G groups, P physical slots, A pairs of ranks, S slots of a
rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class GroupLoads:
    """Of all layers at once.

    Attributes:
        loads_LRG: float64, what the slots of a group's experts carry on each rank.
    """

    def __init__(
        self,
        placement_LP: NDArray[np.int64],
        loads_LP: NDArray[np.float64],
        *,
        num_ranks: int,
        num_groups: int,
        num_experts: int,
    ) -> None:
        """Add up the slots of each rank by their groups of neighbouring experts."""
        layers, slots = placement_LP.shape
        self._size = num_experts // num_groups
        rank_LP = np.arange(layers)[:, None] * num_ranks + np.arange(slots) // (slots // num_ranks)
        flat_LP = rank_LP * num_groups + placement_LP // self._size
        size = layers * num_ranks * num_groups
        sums = np.bincount(flat_LP.ravel(), loads_LP.ravel(), size).astype(np.float64)
        self.loads_LRG: NDArray[np.float64] = sums.reshape(layers, num_ranks, num_groups)
        self._mean_L = loads_LP.sum(axis=1) / num_ranks

    def torn(
        self,
        layer_A: NDArray[np.int64],
        ranks_A: tuple[NDArray[np.int64], NDArray[np.int64]],
        experts_AS: tuple[NDArray[np.int64], NDArray[np.int64]],
        loads_AS: tuple[NDArray[np.float64], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """Return [A, S, S], what each exchange of a slot of one rank with one of the other tears.

        In the unit of loads: that of an expert, times what its group carries more on the rank that
        it leaves than on the other, as a share of a mean rank. Less than 0 where it joins.

        Args:
            layer_A: of each pair.
            ranks_A: the one and the other.
            experts_AS: what stands in their slots.
            loads_AS: what these carry.
        """
        one_A, other_A = ranks_A
        more_AG = self.loads_LRG[layer_A, one_A] - self.loads_LRG[layer_A, other_A]
        more_AG = more_AG / self._mean_L[layer_A, None]
        goes_AS, comes_AS = (
            loads * np.take_along_axis(more_AG, experts // self._size, axis=1)
            for experts, loads in zip(experts_AS, loads_AS, strict=True)
        )
        torn_ASS: NDArray[np.float64] = goes_AS[:, :, None] - comes_AS[:, None, :]
        return torn_ASS

    def move(
        self,
        layer_A: NDArray[np.int64],
        ranks_A: tuple[NDArray[np.int64], NDArray[np.int64]],
        expert_A: NDArray[np.int64],
        load_A: NDArray[np.float64],
    ) -> None:
        """One expert of each pair leaves the one rank for the other; no two pairs share a rank."""
        group_A = expert_A // self._size
        for rank_A, change_A in zip(ranks_A, (-load_A, load_A), strict=True):
            self.loads_LRG[layer_A, rank_A, group_A] += change_A
