"""Experts that one token uses should share a host: then its row leaves the host less often.

Exchanges of slots that carry about as much, between ranks of different hosts, as long as they bring
co-activated experts together: ranks stay balanced. Works layer by layer, and only where
pairs were recorded and there is more than one host.

Letters in shapes: L MoE layers, E logical experts, P physical slots, H hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from experts.balancedness import copies_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXCHANGES: Final = 48
"""Of a layer: the first ones bring most."""


def join_pairs(
    placement_LP: NDArray[np.int64],
    load_LE: NDArray[np.float64],
    coactivation_LEE: NDArray[np.int64],
    *,
    num_ranks: int,
    num_hosts: int,
    slack: float = 0.01,
) -> NDArray[np.int64]:
    """Exchange slots of like load between hosts, so that more pairs stand together.

    Args:
        placement_LP: the logical expert of every slot.
        load_LE: work of each expert.
        coactivation_LEE: tokens that chose both.
        num_ranks: R.
        num_hosts: of neighbouring ranks.
        slack: by which share of the mean rank's load a rank may become heavier in one exchange.

    Returns:
        [L, P] int64, with the same copies of every expert.
    """
    joined_LP = placement_LP.copy()
    copies_LE = copies_of(placement_LP, load_LE.shape[1])
    carried_LE = load_LE / np.maximum(copies_LE, 1)
    for layer, row_P in enumerate(joined_LP):
        pairs_EE = coactivation_LEE[layer] * (1.0 - np.eye(load_LE.shape[1]))
        # A pair stands together in proportion to the shares of both, so copies split its worth.
        pairs_EE = pairs_EE / np.outer(copies_LE[layer], copies_LE[layer])
        most = slack * float(load_LE[layer].sum()) / num_ranks
        _join_layer(
            row_P, carried_LE[layer], pairs_EE, num_ranks=num_ranks, num_hosts=num_hosts, most=most
        )
    return joined_LP


def _join_layer(
    row_P: NDArray[np.int64],
    carried_E: NDArray[np.float64],
    pairs_EE: NDArray[np.float64],
    *,
    num_ranks: int,
    num_hosts: int,
    most: float,
) -> None:
    slots = len(row_P)
    share, per_host = slots // num_ranks, slots // num_hosts
    host_P, rank_P = np.arange(slots) // per_host, np.arange(slots) // share
    pairs_PP = pairs_EE[np.ix_(row_P, row_P)]
    for _ in range(_EXCHANGES):
        # How much of each slot's pairs stands on each host: [P, H].
        near_PH = np.add.reduceat(pairs_PP, np.arange(0, slots, per_host), axis=1)
        moved_PP = near_PH[:, host_P] - near_PH[np.arange(slots), host_P][:, None]
        gain_PP = moved_PP + moved_PP.T - 2 * pairs_PP
        carried_P = carried_E[row_P]
        is_like_PP = np.abs(carried_P[:, None] - carried_P) <= most
        held_RE = np.zeros((num_ranks, len(carried_E)), bool)
        held_RE[rank_P, row_P] = True
        # No expert comes to a rank that has it already.
        twins_PP = held_RE[rank_P][:, row_P]
        allowed_PP = is_like_PP & ~twins_PP & ~twins_PP.T & (host_P[:, None] != host_P)
        gain_PP[~allowed_PP] = 0.0
        mine, other = divmod(int(gain_PP.argmax()), slots)
        if gain_PP[mine, other] <= 0:
            return
        row_P[[mine, other]] = row_P[[other, mine]]
        order = np.arange(slots)
        order[[mine, other]] = other, mine
        pairs_PP = pairs_PP[order][:, order]
