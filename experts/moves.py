"""In which order experts change their slots, so that a rank stages one of them at a time.

A *round* is what all ranks do together: each receives at most one expert into its staging slot,
while the placement serves as it is, and then all flip at one step. The key idea: between any two
rounds every expert stands somewhere, so a source can always be found and every flip leaves a
placement that serves.

That asks for little. Only of an expert all of whose slots are given up must one copy stay until a
new one has come: one of its moves away comes *after* one of its arrivals, or in its round. So each
move waits for one other at most, and is waited for by one at most: the moves of a layer are chains
and circles. What waits for nothing goes into the first round in which its rank is free, the next of
a chain not before it. A circle, experts of a single slot each that change places, is one round,
each rank once; which slot of a rank an expert comes to is free, so circles can be cut that small.

Letters in shapes: L MoE layers, P physical slots, E logical experts, M moves, H slots that hold
an expert at any time, N moves beside these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial, reduce
from itertools import islice
from operator import or_
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NEVER: Final = 1 << 40
"""The round in which what stays leaves."""


class Move(NamedTuple):
    """One expert's weights and scales, copied into a slot of another rank.

    A tuple, because a plan has ten thousand.

    Attributes:
        layer: which of the MoE layers, from 0.
        slot: the physical slot that it comes to; its rank is slot // (P / R).
        expert: the logical expert that comes.
        replaced: the logical expert that stands in the slot until the flip.
        sources: all slots of the layer that hold the expert before this round; any will do, and
            none of them changes before the flip.
    """

    layer: int
    slot: int
    expert: int
    replaced: int
    sources: tuple[int, ...]


Round = tuple[Move, ...]
"""Moves that are staged together and flipped at one step; no two have one receiving rank."""


def order_moves(
    current_LP: NDArray[np.int64],
    target_LP: NDArray[np.int64],
    *,
    num_ranks: int,
    layers: Sequence[int] | None = None,
) -> tuple[NDArray[np.int64], tuple[Round, ...]]:
    """Order the way from one placement to another.

    Args:
        current_LP: the logical expert of every slot now.
        target_LP: the same afterwards; every expert has a slot in both.
        num_ranks: R; a rank's slots stand together.
        layers: the order in which layers begin; None for the model's.

    Returns:
        [L, P] int64, the placement behind the last round, and the rounds. It has the same experts
        on each rank as `target_LP`, though maybe in other slots of the rank.
    """
    num_layers, num_slots = current_LP.shape
    num_experts = int(max(current_LP.max(), target_LP.max())) + 1
    begins = np.arange(num_layers) if layers is None else np.asarray(layers, np.int64)
    # Moves by layers as these begin; expert e of layer l is numbered l x E + e.
    at_M, slot_M = np.nonzero(current_LP[begins] != target_LP[begins])
    layer_M = begins[at_M]
    number_L1 = np.arange(num_layers)[:, None] * num_experts
    now_LP, reached_LP = current_LP + number_L1, target_LP + number_L1
    goer_M, comer_M = now_LP[layer_M, slot_M], reached_LP[layer_M, slot_M]
    rank_M = (slot_M // (num_slots // num_ranks)).tolist()
    after_M = _waits(np.bincount(now_LP.ravel()), goer_M, comer_M)
    circles = _cut_circles(after_M, comer_M, rank_M, num_slots)
    reached_LP[layer_M, slot_M] = comer_M
    by_round = _deal_rounds(after_M.tolist(), circles, rank_M)
    if not by_round:
        return reached_LP - number_L1, ()
    in_order = np.concatenate([np.asarray(moves) for moves in by_round])
    round_M = np.repeat(np.arange(len(by_round)), [len(moves) for moves in by_round])
    layer_M, slot_M = layer_M[in_order], slot_M[in_order]
    sources = _sources(now_LP, reached_LP, layer_M, slot_M, round_M)
    columns = (layer_M, slot_M, comer_M[in_order] % num_experts, goer_M[in_order] % num_experts)
    fields = zip(*(column.tolist() for column in columns), sources, strict=True)
    made = map(partial(tuple.__new__, Move), fields)  # A third of the time of Move(...).
    rounds = tuple(tuple(islice(made, len(moves))) for moves in by_round)
    return reached_LP - number_L1, rounds


def _waits(
    copies: NDArray[np.int64], goer_M: NDArray[np.int64], comer_M: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return [M] int64, the move that must not be in a later round than this one, or -1.

    Args:
        copies: how many slots hold each expert now, by its number.
        goer_M: the expert that leaves a move's slot.
        comer_M: the one that comes to it.
    """
    number_M = np.arange(len(goer_M))
    bare = np.flatnonzero((np.bincount(goer_M, minlength=len(copies)) == copies) & (copies > 0))
    # Of several moves of an expert numpy keeps the last: the last to leave, the first to come.
    leaver, comer = np.zeros_like(copies), np.zeros_like(copies)
    leaver[goer_M] = number_M
    comer[comer_M[::-1]] = number_M[::-1]
    after_M = np.full(len(goer_M), -1)
    after_M[leaver[bare]] = comer[bare]
    return after_M


def _cut_circles(
    after_M: NDArray[np.int64],
    comer_M: NDArray[np.int64],
    rank_M: Sequence[int],
    longest: int,
) -> list[list[int]]:
    """Find the moves that wait for each other in circles, and cut these until ranks are different.

    Two slots of one rank exchange in `comer_M` what comes to them. A circle of one is a slot that
    keeps its expert.
    """
    end = len(after_M)
    reached = np.append(np.where(after_M < 0, end, after_M), end)
    for _ in range(longest.bit_length()):
        reached = reached[reached]
    # Not waiting in a circle is waiting for -1; whose circle was found waits no more.
    after, before = np.where(reached[:end] < end, after_M, -1).tolist(), [-1] * end
    in_circles = np.flatnonzero(reached[:end] < end).tolist()
    for move in in_circles:
        before[after[move]] = move
    circles: list[list[int]] = []
    for move in in_circles:
        path: list[int] = []
        on_rank: dict[int, int] = {}
        while after[move] >= 0:
            rank = rank_M[move]
            begin = on_rank.get(rank)
            if begin is None:
                on_rank[rank] = len(path)
                path.append(move)
                move = after[move]
                continue
            # The circle closes in the move of this rank that is on the path.
            closing = path[begin]
            if closing != move:
                comer_M[[closing, move]] = comer_M[[move, closing]]
                first, last = before[closing], before[move]
                after[first], after[last] = move, closing
                before[move], before[closing] = first, last
            circles.append(path[begin:])
            for done in circles[-1]:
                del on_rank[rank_M[done]]
                after[done] = -1
            del path[begin:]
    return circles


def _deal_rounds(
    after: Sequence[int], circles: Sequence[Sequence[int]], rank_M: Sequence[int]
) -> list[list[int]]:
    """Give every move, in order, the first round in which its rank is free and it may be."""
    waiting = {other: move for move, other in enumerate(after) if other >= 0}
    circle_of = {move: circle for circle in circles for move in circle}
    # A round is a bit: of each rank those in which it receives, and what is dealt to each.
    busy = [0] * (max(rank_M, default=0) + 1)
    dealt: defaultdict[int, list[int]] = defaultdict(list)
    for first, waits_for in enumerate(after):
        circle = circle_of.get(first)
        if circle is not None:
            if circle[0] != first or len(circle) == 1:
                continue  # Dealt with its first move; or it moves nothing.
            taken = reduce(or_, (busy[rank_M[move]] for move in circle))
            free = ~taken & (taken + 1)
            for move in circle:
                busy[rank_M[move]] |= free
            dealt[free] += circle
        elif waits_for < 0:
            chained: int | None = first
            earliest = 1
            while chained is not None:
                rank = rank_M[chained]
                taken = busy[rank] | (earliest - 1)
                earliest = ~taken & (taken + 1)
                busy[rank] |= earliest
                dealt[earliest].append(chained)
                chained = waiting.get(chained)
    return [dealt[bit] for bit in sorted(dealt)]


def _sources(
    now_LP: NDArray[np.int64],
    reached_LP: NDArray[np.int64],
    layer_M: NDArray[np.int64],
    slot_M: NDArray[np.int64],
    round_M: NDArray[np.int64],
) -> list[tuple[int, ...]]:
    """For each move the slots in which its expert stands before the move's round."""
    comer_M = reached_LP[layer_M, slot_M]
    leaves_LP = np.full(now_LP.shape, _NEVER)
    leaves_LP[layer_M, slot_M] = round_M
    is_asked = np.zeros(int(max(now_LP.max(), reached_LP.max())) + 1, bool)
    is_asked[comer_M] = True
    # A holder stands from behind the round of its arrival until the round in which it leaves.
    layer_H, slot_H = np.nonzero(is_asked[now_LP])
    expert_H = np.concatenate([now_LP[layer_H, slot_H], comer_M])
    leaves_H = np.concatenate([leaves_LP[layer_H, slot_H], np.full(len(slot_M), _NEVER)])
    comes_H = np.concatenate([np.full(len(slot_H), -1), round_M])
    slot_H = np.concatenate([slot_H, slot_M])
    by_expert = np.argsort(expert_H, kind="stable")
    counts = np.bincount(expert_H, minlength=len(is_asked))
    begins = np.cumsum(counts) - counts
    # Every move beside every holder that its expert ever has.
    holders_M = counts[comer_M]
    move_N = np.repeat(np.arange(len(slot_M)), holders_M)
    first_N = np.repeat(begins[comer_M] - (np.cumsum(holders_M) - holders_M), holders_M)
    holder_N = by_expert[first_N + np.arange(len(move_N))]
    stands_N = (comes_H[holder_N] < round_M[move_N]) & (round_M[move_N] <= leaves_H[holder_N])
    slots = slot_H[holder_N[stands_N]].tolist()
    ends = np.cumsum(np.bincount(move_N[stands_N], minlength=len(slot_M))).tolist()
    return [tuple(slots[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
