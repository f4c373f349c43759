"""In which order experts change their slots, so that a rank stages one of them at a time.

A *round* is what all ranks do together: each receives at most one expert into its staging slot,
while the placement serves as it is, and then all flip at one step. The key idea: between any two
rounds every expert stands somewhere, so a source can always be found and every flip leaves a
placement that serves. A slot whose expert stands elsewhere too can be overwritten alone. Where only
last copies are left, they move in a circle over ranks, each rank once, and the circle is one round;
which slot of a rank an expert comes to is free, so circles can always be cut that small.

Letters in shapes: L MoE layers, P physical slots.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOOK_BACK: Final = 64
"""How many of the latest rounds are searched for one whose ranks are free: bounds the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One expert's weights and scales, copied into a slot of another rank.

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
    reached_LP = target_LP.copy()
    share = target_LP.shape[1] // num_ranks
    rounds: list[list[tuple[int, int]]] = []
    taken: list[int] = []
    for layer in range(len(current_LP)) if layers is None else layers:
        reached = reached_LP[layer].tolist()
        earliest = 0
        for group in _safe_groups(current_LP[layer].tolist(), reached, share):
            ranks = sum(1 << (slot // share) for slot in group)
            at = max(earliest, len(rounds) - _LOOK_BACK)
            while at < len(rounds) and taken[at] & ranks:
                at += 1
            if at == len(rounds):
                rounds.append([])
                taken.append(0)
            rounds[at] += [(layer, slot) for slot in group]
            taken[at] |= ranks
            # A later group of this layer may overwrite a source or a last copy but one: not before.
            earliest = at
        reached_LP[layer] = reached
    return reached_LP, _with_sources(current_LP, reached_LP, rounds)


def _safe_groups(current: list[int], target: list[int], share: int) -> list[list[int]]:
    """Slots to overwrite, in order; slots of one group only together, one of a rank at most.

    Exchanges slots of `target` inside ranks where that keeps circles small.
    """
    now = list(current)
    copies = Counter(now)
    pending = {slot for slot, expert in enumerate(now) if target[slot] != expert}
    waiting: dict[int, list[int]] = defaultdict(list)
    for slot in pending:
        waiting[now[slot]].append(slot)
    groups: list[list[int]] = []
    free = [slot for slot in pending if copies[now[slot]] > 1]
    while free:
        slot = free.pop()
        goer, comer = now[slot], target[slot]
        if slot not in pending or copies[goer] == 1:
            continue
        pending.discard(slot)
        groups.append([slot])
        now[slot] = comer
        copies[goer] -= 1
        copies[comer] += 1
        free += waiting[comer]
    # Now every slot that waits holds a last copy. Circles leave as many copies as there were, so
    # nothing else is needed any more.
    goes_to = {target[slot]: slot for slot in pending}
    while pending:
        circle = _circle(now, target, goes_to, min(pending), share)
        for slot in circle:
            now[slot] = target[slot]
            goes_to.pop(target[slot])
        pending.difference_update(circle)
        if len(circle) > 1:
            groups.append(circle)
    return groups


def _circle(
    now: list[int], target: list[int], goes_to: dict[int, int], first: int, share: int
) -> list[int]:
    """Slots of different ranks, each of which gets the last copy of the slot before it."""
    path = [first]
    on_rank = {first // share: 0}
    while True:
        follower = goes_to[now[path[-1]]]
        begin = on_rank.get(follower // share)
        if begin is not None:
            # The circle closes in the slot of this rank that is on the path; the slots of a rank
            # are alike, so the two exchange what they were to get.
            closing = path[begin]
            target[closing], target[follower] = target[follower], target[closing]
            goes_to[target[closing]], goes_to[target[follower]] = closing, follower
            return path[begin:]
        on_rank[follower // share] = len(path)
        path.append(follower)


def _with_sources(
    current_LP: NDArray[np.int64],
    reached_LP: NDArray[np.int64],
    rounds: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Round, ...]:
    """Replay the rounds and note where each expert stands before its own."""
    holders: dict[tuple[int, int], list[int]] = defaultdict(list)
    moving = {layer for moves in rounds for layer, _ in moves}
    for layer in moving:
        for slot, expert in enumerate(current_LP[layer].tolist()):
            holders[layer, expert].append(slot)
    now, reached = current_LP.tolist(), reached_LP.tolist()
    done: list[Round] = []
    for moves in rounds:
        done.append(
            tuple(
                Move(
                    layer=layer,
                    slot=slot,
                    expert=reached[layer][slot],
                    replaced=now[layer][slot],
                    sources=tuple(holders[layer, reached[layer][slot]]),
                )
                for layer, slot in moves
            )
        )
        for move in done[-1]:
            holders[move.layer, move.replaced].remove(move.slot)
            holders[move.layer, move.expert].append(move.slot)
            now[move.layer][move.slot] = move.expert
    return tuple(done)
