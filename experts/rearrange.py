"""The fewest moves to even ranks: from the placement that stands, not from an empty one.

A placement computed afresh shares little with the one before, and moving all of DeepSeek-V3's
experts is 654 GB. Three steps, of all layers at once. *Recast*: slots of experts with more copies
than their load deserves are given to those with fewer. *Exchange*: of the fullest and a light rank
the two slots whose exchange evens the pair best, over and over, until the fullest rank is within a
tolerance of the mean or nothing helps. *Keep* serves a placement that was computed afresh: ranks
take the names, and slots the places, that most experts have already.

With groups of experts, an exchange is also judged by how far it tears them apart, and only what is
too hot to be dealt gets copies; spare slots that are left hold what is coldest.

Letters in shapes: L MoE layers, E logical experts, P physical slots, R ranks, S slots of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from experts.balance import replicate, replicate_hot
from experts.balancedness import copies_of
from experts.group_loads import GroupLoads

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PARTNERS: Final = 6
"""How many of the lightest ranks are tried in turn before a layer is left as it is."""
_EXCHANGES: Final = 256
"""The most of a layer: each lightens its fullest rank, so far fewer are used."""
_TORN_WEIGHT: Final = 0.5
"""Of what an exchange tears, beside what it leaves uneven; from 0.3 to 1 plans are as good."""


def rearrange(
    current_LP: NDArray[np.int64],
    load_LE: NDArray[np.float64],
    *,
    num_ranks: int,
    tolerance: float = 0.01,
    num_groups: int = 1,
) -> NDArray[np.int64]:
    """Even ranks out by few moves.

    Args:
        current_LP: the logical expert of every slot now.
        load_LE: work of each expert, more than nothing of some expert in every layer.
        num_ranks: R.
        tolerance: by how much the fullest rank may pass the mean and is left alone.
        num_groups: of neighbouring experts, that are to be torn apart little; 1: they do not count.

    Returns:
        [L, P] int64. Every expert has a slot, and no two on one rank where that can be avoided.
    """
    placement_LP = current_LP.copy()
    num_slots, num_experts = current_LP.shape[1], load_LE.shape[1]
    load_LE = np.maximum(load_LE, 1e-6 * np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-30))
    if num_slots > num_experts:
        choose = replicate_hot if num_groups > 1 else _replicate_once
        _recast(placement_LP, load_LE, choose(load_LE, num_slots, num_ranks), num_ranks)
        _part_twins(placement_LP, load_LE, num_ranks)
    _exchange(placement_LP, load_LE, num_ranks, tolerance, num_groups)
    return placement_LP


def _replicate_once(
    load_LE: NDArray[np.float64], num_slots: int, num_ranks: int
) -> NDArray[np.int64]:
    return replicate(load_LE[None], num_slots, num_ranks)


def _recast(
    placement_LP: NDArray[np.int64],
    load_LE: NDArray[np.float64],
    wanted_LE: NDArray[np.int64],
    num_ranks: int,
) -> None:
    """Give slots of experts with a copy too many to those with too few, heaviest first."""
    layers, num_slots = placement_LP.shape
    num_experts, share = load_LE.shape[1], num_slots // num_ranks
    copies_LE = copies_of(placement_LP, num_experts)
    lacks_LE = np.maximum(wanted_LE - copies_LE, 0)
    most = int(lacks_LE.sum(axis=1).max(initial=0))
    if not most:
        return
    carried_LE = load_LE / wanted_LE
    is_free_LP = _surplus(placement_LP, copies_LE - wanted_LE, carried_LE, num_ranks)
    carried_LP = np.take_along_axis(carried_LE, placement_LP, axis=1)
    loads_LR = np.where(is_free_LP, 0.0, carried_LP).reshape(layers, num_ranks, share).sum(axis=2)
    free_LR = is_free_LP.reshape(layers, num_ranks, share).sum(axis=2)
    stays_LP = np.where(is_free_LP, num_experts, placement_LP)
    held_LRE = _held(stays_LP, num_experts + 1, num_ranks) > 0
    heavy_LE = np.argsort(-np.where(lacks_LE > 0, carried_LE, -1.0), axis=1, kind="stable")
    # A layer's experts that lack a slot, in that order, each as often as it lacks one.
    num_lacks_L = lacks_LE.sum(axis=1)
    lacks = np.take_along_axis(lacks_LE, heavy_LE, axis=1).ravel()
    comers_LM = np.zeros((layers, most), np.int64)
    comers_LM[np.arange(most) < num_lacks_L[:, None]] = np.repeat(heavy_LE.ravel(), lacks)
    beyond = 10 * (loads_LR.sum(axis=1, keepdims=True) + load_LE.sum(axis=1, keepdims=True))
    for turn in range(most):
        at = np.flatnonzero(num_lacks_L > turn)
        comer_A = comers_LM[at, turn]
        cost_AR = loads_LR[at] + held_LRE[at, :, comer_A] * beyond[at]
        rank_A = np.where(free_LR[at] > 0, cost_AR, np.inf).argmin(axis=1)
        # The first free slot of the rank.
        is_free_ARS = is_free_LP.reshape(layers, num_ranks, share)[at, rank_A]
        slot_A = rank_A * share + is_free_ARS.argmax(axis=1)
        placement_LP[at, slot_A] = comer_A
        is_free_LP[at, slot_A] = False
        free_LR[at, rank_A] -= 1
        loads_LR[at, rank_A] += carried_LE[at, comer_A]
        held_LRE[at, rank_A, comer_A] = True


def _surplus(
    placement_LP: NDArray[np.int64],
    surplus_LE: NDArray[np.int64],
    carried_LE: NDArray[np.float64],
    num_ranks: int,
) -> NDArray[np.bool_]:
    """Return [L, P], the slots that experts with a surplus give up: those on the fullest ranks."""
    layers, num_slots = placement_LP.shape
    carried_LP = np.take_along_axis(carried_LE, placement_LP, axis=1)
    load_LR = carried_LP.reshape(layers, num_ranks, -1).sum(axis=2)
    load_LP = np.repeat(load_LR, num_slots // num_ranks, axis=1)
    # By expert, the slot on the fullest rank first; then each slot's turn among its expert's.
    order_LP = np.lexsort((-load_LP, placement_LP), axis=1)
    sorted_LP = np.take_along_axis(placement_LP, order_LP, axis=1)
    place_P = np.arange(num_slots)
    begins_LP = np.ones(sorted_LP.shape, bool)
    begins_LP[:, 1:] = sorted_LP[:, 1:] != sorted_LP[:, :-1]
    begin_LP = np.maximum.accumulate(np.where(begins_LP, place_P, 0), axis=1)
    gives_LP = place_P - begin_LP < np.take_along_axis(surplus_LE, sorted_LP, axis=1)
    is_free_LP = np.zeros(placement_LP.shape, bool)
    np.put_along_axis(is_free_LP, order_LP, gives_LP, axis=1)
    return is_free_LP


def _part_twins(
    placement_LP: NDArray[np.int64], load_LE: NDArray[np.float64], num_ranks: int
) -> None:
    """Exchange copies that came to stand beside another one: few, in few layers."""
    layers, num_slots = placement_LP.shape
    share = num_slots // num_ranks
    held_LRS = np.sort(placement_LP.reshape(layers, num_ranks, share), axis=2)
    for layer in np.flatnonzero((held_LRS[..., 1:] == held_LRS[..., :-1]).any(axis=(1, 2))):
        row_P = placement_LP[layer]
        rank_P = np.arange(num_slots) // share
        held_RE = np.zeros((num_ranks, load_LE.shape[1]), np.int64)
        np.add.at(held_RE, (rank_P, row_P), 1)
        each_E = load_LE[layer] / held_RE.sum(axis=0)
        for slot in np.flatnonzero(held_RE[rank_P, row_P] > 1):
            rank, expert = rank_P[slot], row_P[slot]
            if held_RE[rank, expert] < 2:
                continue
            fits_P = (held_RE[rank_P, expert] == 0) & (held_RE[rank, row_P] == 0)
            unlike_P = np.where(fits_P, np.abs(each_E[row_P] - each_E[expert]), np.inf)
            other = int(unlike_P.argmin())
            if fits_P[other]:
                held_RE[[rank, rank_P[other]], [expert, row_P[other]]] -= 1
                held_RE[[rank, rank_P[other]], [row_P[other], expert]] += 1
                row_P[[slot, other]] = row_P[[other, slot]]


def slot_loads(
    placement_LP: NDArray[np.int64], load_LE: NDArray[np.float64], copies_LE: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return [L, P] float64, the work of each slot."""
    return np.take_along_axis(load_LE / np.maximum(copies_LE, 1), placement_LP, axis=1)


def _exchange(
    placement_LP: NDArray[np.int64],
    load_LE: NDArray[np.float64],
    num_ranks: int,
    tolerance: float,
    num_groups: int,
) -> None:
    """Exchange slots of full ranks with those of light ones while that lightens the fullest."""
    layers, half = len(placement_LP), num_ranks // 2
    if not half:
        return
    loads_LP = slot_loads(placement_LP, load_LE, copies_of(placement_LP, load_LE.shape[1]))
    limit_L = _least_possible(loads_LP, num_ranks) * (1 + tolerance)
    loads_LRS = loads_LP.reshape(layers, num_ranks, -1)
    slots_LRS = placement_LP.reshape(layers, num_ranks, -1)
    # With how many light ranks in vain the fullest rank was paired; too often ends a layer.
    turn_L = np.zeros(layers, np.int64)
    has_twins = placement_LP.shape[1] > load_LE.shape[1]
    held_LRE = _held(placement_LP, load_LE.shape[1], num_ranks) > 0
    groups = None
    if num_groups > 1:
        sizes = {"num_ranks": num_ranks, "num_groups": num_groups}
        groups = GroupLoads(placement_LP, loads_LP, num_experts=load_LE.shape[1], **sizes)
    rank_LR = loads_LRS.sum(axis=2)
    for _ in range(_EXCHANGES):
        at = np.flatnonzero((turn_L < min(half, _PARTNERS)) & (rank_LR.max(axis=1) > limit_L))
        if not len(at):
            break
        layer, pair, full, light = _pair_up(rank_LR, turn_L, limit_L, at)
        from_AS, to_AS = loads_LRS[layer, full], loads_LRS[layer, light]
        refused_ASS = None
        if has_twins:
            # What is on the one rank and would come to stand beside itself on the other.
            goes_AS = held_LRE[layer[:, None], light[:, None], slots_LRS[layer, full]]
            comes_AS = held_LRE[layer[:, None], full[:, None], slots_LRS[layer, light]]
            refused_ASS = goes_AS[:, :, None] | comes_AS[:, None, :]
        torn_ASS = None
        if groups is not None:
            experts_AS = slots_LRS[layer, full], slots_LRS[layer, light]
            torn_ASS = groups.torn(layer, (full, light), experts_AS, (from_AS, to_AS))
        helps, slot, other = _best_exchange(from_AS, to_AS, refused_ASS, torn_ASS)
        is_fullest = pair == 0
        turn_L[layer[is_fullest]] = np.where(helps[is_fullest], 0, turn_L[layer[is_fullest]] + 1)
        layer, full, light = layer[helps], full[helps], light[helps]
        slot, other = slot[helps], other[helps]
        goer, comer = slots_LRS[layer, full, slot], slots_LRS[layer, light, other]
        held_LRE[layer, full, goer] = held_LRE[layer, light, comer] = False
        held_LRE[layer, full, comer] = held_LRE[layer, light, goer] = True
        if groups is not None:
            groups.move(layer, (full, light), goer, loads_LRS[layer, full, slot])
            groups.move(layer, (light, full), comer, loads_LRS[layer, light, other])
        for array in (loads_LRS, slots_LRS):
            mine = array[layer, full, slot]
            array[layer, full, slot] = array[layer, light, other]
            array[layer, light, other] = mine
        for rank in (full, light):
            rank_LR[layer, rank] = loads_LRS[layer, rank].sum(axis=1)


def _pair_up(
    rank_LR: NDArray[np.float64],
    turn_L: NDArray[np.int64],
    limit_L: NDArray[np.float64],
    at: NDArray[np.int64],
) -> tuple[NDArray[np.int64], ...]:
    """Full ranks and light ranks in pairs, the fullest with the lightest, next turn another.

    Returns:
        Of each pair of the layers `at`: layer, number in it (0: the fullest rank's), full rank and
        light rank.
    """
    num_ranks = rank_LR.shape[1]
    # Several pairs at once take fewer rounds and somewhat more moves.
    pairs, half = max(num_ranks // 8, 1), num_ranks // 2
    order_AR = np.argsort(-rank_LR[at], axis=1)
    light_AH = (np.arange(pairs) + turn_L[at, None]) % half
    light_AH = np.take_along_axis(order_AR[:, ::-1], light_AH, axis=1)
    full_AH = order_AR[:, :pairs]
    is_over_AH = np.take_along_axis(rank_LR[at], full_AH, axis=1) > limit_L[at, None]
    entry, pair = np.nonzero(is_over_AH)
    return at[entry], pair, full_AH[entry, pair], light_AH[entry, pair]


def _least_possible(loads_LP: NDArray[np.float64], num_ranks: int) -> NDArray[np.float64]:
    """Return [L], which load no exchange gets below: the mean's, or the heaviest slot's rank's."""
    share = loads_LP.shape[1] // num_ranks
    lightest_L = np.sort(loads_LP, axis=1)[:, : share - 1].sum(axis=1)
    least: NDArray[np.float64] = np.maximum(
        loads_LP.sum(axis=1) / num_ranks, loads_LP.max(axis=1) + lightest_L
    )
    return least


def _best_exchange(
    from_AS: NDArray[np.float64],
    to_AS: NDArray[np.float64],
    refused_ASS: NDArray[np.bool_] | None,
    torn_ASS: NDArray[np.float64] | None,
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
    """For pairs of ranks: whether an exchange helps, and of which slot with which."""
    gap_A = from_AS.sum(axis=1) - to_AS.sum(axis=1)
    # Best is what brings the two together: half of the gap travels.
    short_ASS = from_AS[:, :, None] - (to_AS + gap_A[:, None] / 2)[:, None, :]
    np.abs(short_ASS, out=short_ASS)
    if refused_ASS is not None:
        short_ASS[refused_ASS] = np.inf
    # The larger of the two loads falls by gap / 2 - short.
    most_A = 0.48 * gap_A
    if torn_ASS is None:
        cost_ASS = short_ASS
    else:
        cost_ASS = short_ASS + _TORN_WEIGHT * torn_ASS
        cost_ASS[short_ASS >= most_A[:, None, None]] = np.inf
    best_A = cost_ASS.reshape(len(gap_A), -1).argmin(axis=1)
    slot_A, other_A = np.divmod(best_A, to_AS.shape[1])
    return short_ASS[np.arange(len(gap_A)), slot_A, other_A] < most_A, slot_A, other_A


def keep_slots(
    current_LP: NDArray[np.int64],
    target_LP: NDArray[np.int64],
    *,
    num_ranks: int,
    num_hosts: int = 1,
) -> NDArray[np.int64]:
    """Rename ranks within their hosts, and slots within ranks, so that fewest experts move.

    Rank by rank takes the name under which it shares most, and all of a layer keep theirs where
    that is no better; the experts that are together stay together.

    Returns:
        [L, P] int64, with the same experts together as in `target_LP`.
    """
    layers, num_slots = target_LP.shape
    per_host = num_ranks // num_hosts
    num_experts = int(max(current_LP.max(), target_LP.max())) + 1
    counted = [_held(placement, num_experts, num_ranks) for placement in (current_LP, target_LP)]
    hosts = (layers * num_hosts, per_host, num_experts)
    now_BRE, then_BRE = (held_LRE.reshape(hosts).astype(np.float32) for held_LRE in counted)
    # min(a, b) of counts: all copies but the first are rare, so they are left out of the match.
    shared_BRR = np.minimum(now_BRE, 1) @ np.minimum(then_BRE, 1).transpose(0, 2, 1)
    names_BR = _match(shared_BRR)
    same_B = np.einsum("brr->b", shared_BRR)
    matched_B = np.take_along_axis(shared_BRR, names_BR[:, :, None], axis=2).sum(axis=(1, 2))
    names_BR[matched_B <= same_B] = np.arange(per_host)
    ranks_BRS = target_LP.reshape(layers * num_hosts, per_host, -1)
    renamed_BRS = np.take_along_axis(ranks_BRS, names_BR[:, :, None], axis=1)
    return _keep_places(current_LP, renamed_BRS.reshape(layers, num_slots), num_ranks)


def _held(placement_LP: NDArray[np.int64], num_experts: int, num_ranks: int) -> NDArray[np.int64]:
    """Return [L, R, E] int64, how many slots of each rank hold each expert."""
    layers, slots = placement_LP.shape
    rank_P = np.arange(slots) // (slots // num_ranks)
    flat = (np.arange(layers)[:, None] * num_ranks + rank_P) * num_experts + placement_LP
    held = np.bincount(flat.ravel(), minlength=layers * num_ranks * num_experts)
    return held.reshape(layers, num_ranks, num_experts)


def _match(shared_BRR: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return [B, R] int64: for each rank the target's rank that becomes it, rank by rank."""
    batch, ranks = shared_BRR.shape[:2]
    names_BR = np.zeros((batch, ranks), np.int64)
    is_taken_BR = np.zeros((batch, ranks), bool)
    at = np.arange(batch)
    for rank in range(ranks):
        names_BR[:, rank] = np.where(is_taken_BR, -1, shared_BRR[:, rank]).argmax(axis=1)
        is_taken_BR[at, names_BR[:, rank]] = True
    return names_BR


def _keep_places(
    current_LP: NDArray[np.int64], target_LP: NDArray[np.int64], num_ranks: int
) -> NDArray[np.int64]:
    """Within each rank, put experts that stay into their slots and the others into the rest."""
    share = current_LP.shape[1] // num_ranks
    now_BS, then_BS = current_LP.reshape(-1, share), target_LP.reshape(-1, share)
    placed_BS = np.full_like(now_BS, -1)
    is_left_BS = np.ones(then_BS.shape, bool)
    at = np.arange(len(now_BS))
    for slot in range(share):
        same_BS = (then_BS == now_BS[:, slot : slot + 1]) & is_left_BS
        found_B = same_BS.any(axis=1)
        which_B = same_BS.argmax(axis=1)
        placed_BS[found_B, slot] = now_BS[found_B, slot]
        is_left_BS[at[found_B], which_B[found_B]] = False
    # Row by row as many slots are empty as experts are left.
    placed_BS[placed_BS < 0] = then_BS[is_left_BS]
    return placed_BS.reshape(target_LP.shape)
