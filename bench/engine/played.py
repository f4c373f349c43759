"""Which ranks of a larger group the real ones play, and how many rows their experts get for it.

A step waits for the fullest rank in every layer, and the fullest of eight with 256 experts is
fuller than that of four with 128. So the rows are those of the larger group: its tokens choose by a
skew over all experts, these stand on its ranks in order or as a recording places them, and four of
its ranks are played: in every layer rank 0 plays the busiest one, exactly, and the others those
three of the seven whose rows come closest to what is left for them (a token still has K experts),
scaled by what is missing. Slots of a played rank keep their shares of its rows.

Tokens then draw slots with given chances, by a systematic sample in an order of their own: each
has K different ones, and a slot comes exactly as often as it should, in the mean. Expert e is dealt
to its slots by the token's number, as in a worker; so where experts here have two slots, a token
draws among those slots that its number gives it.

Letters: L layers, E experts and P slots and R ranks of the larger group, e, p and r of those here,
C classes of tokens by number, T tokens, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from experts.balancedness import slot_rows
from runtime.errors import ConfigError

Floats = npt.NDArray[np.float64]
Table = npt.NDArray[np.int64]

MOST_CHANCE = 0.95
"""Of a slot to be a token's: fewer tokens than in the larger group cannot choose it oftener."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedRanks:
    """The ranks of all layers that are played.

    Attributes:
        ranks_Lr: which rank of the larger group each real one plays.
        rows_LR: of all ranks of the larger group, over their mean.
        played_Lr: of those here, the same after scaling.
        chance_Lp: of each slot here, of being one of a token's K, in the mean over tokens.
        moved: share of the rows that are another slot's of the same rank, for `MOST_CHANCE`.
    """

    ranks_Lr: Table
    rows_LR: Floats
    played_Lr: Floats
    chance_Lp: Floats
    moved: float

    @property
    def balancedness(self) -> float:
        """Of the larger group: sum of means over sum of maxima."""
        return float(len(self.rows_LR) / self.rows_LR.max(axis=1).sum())


def play_ranks(
    counts_LE: Table,
    placed_LP: Table,
    table_Lp: Table,
    *,
    num_ranks: int,
    num_here: int,
    top_k: int,
) -> PlayedRanks:
    """Choose the ranks of every layer, and the chances of the slots here.

    Args:
        counts_LE: tokens of each expert of the larger group.
        placed_LP: where these stand.
        table_Lp: the expert here of every slot here; a rank has as many as a larger group's.
        num_ranks: R.
        num_here: r, fewer.
        top_k: K.

    Raises:
        ConfigError: the busiest rank gets more rows than tokens here can bring to its slots.
    """
    layers = len(counts_LE)
    slots_LP = slot_rows(counts_LE[None], placed_LP)[:, :, 0]
    slots_LRS = slots_LP.reshape(layers, num_ranks, -1)
    slots_LRS = slots_LRS / (slots_LRS.sum(axis=(1, 2), keepdims=True) / num_ranks)
    rows_LR = slots_LRS.sum(axis=2)
    ranks_Lr = np.array([choose_ranks(rows_R, num_here) for rows_R in rows_LR])
    taken_LrS = np.take_along_axis(slots_LRS, ranks_Lr[:, :, None], axis=1)
    # What the busiest leaves to the others: all of them together have r times the mean.
    left_L = num_here - taken_LrS[:, 0].sum(axis=1)
    taken_LrS[:, 1:] *= (left_L / taken_LrS[:, 1:].sum(axis=(1, 2)))[:, None, None]
    wanted_LrS = taken_LrS * top_k / num_here
    chance_Lp, moved = np.empty(table_Lp.shape), 0.0
    for layer, table_p in enumerate(table_Lp):
        copies_p = np.bincount(table_p)[table_p]
        most_rS = (MOST_CHANCE / copies_p).reshape(num_here, -1)
        if wanted_LrS[layer].min() < 0 or (wanted_LrS[layer] - most_rS).sum(axis=1).max() > 0:
            problem = f"the busiest of {num_ranks} has {rows_LR[layer].max():.2f} times the mean"
            fix = f"another --seed: tokens of {num_here} ranks cannot bring so many to its slots"
            raise ConfigError("play-ranks", num_here, problem, fix)
        laid_rS = _lay_out(wanted_LrS[layer], most_rS)
        even_rS = _cap(laid_rS, most_rS)
        moved += float(np.abs(even_rS - laid_rS).sum()) / 2 / top_k
        chance_Lp[layer] = even_rS.ravel()
    return PlayedRanks(
        ranks_Lr=ranks_Lr,
        rows_LR=rows_LR,
        played_Lr=taken_LrS.sum(axis=2),
        chance_Lp=chance_Lp,
        moved=moved / layers,
    )


def choose_ranks(rows_R: Floats, num_here: int) -> tuple[int, ...]:
    """Return the busiest rank, and those others that leave least to be scaled.

    Args:
        rows_R: of each rank, over the mean.
        num_here: how many.
    """
    busiest = int(rows_R.argmax())
    others = [rank for rank in range(len(rows_R)) if rank != busiest]
    left = num_here - rows_R[busiest]
    chosen = min(
        combinations(others, num_here - 1),
        key=lambda ranks: abs(float(rows_R[list(ranks)].sum()) - left),
    )
    return busiest, *chosen


def _lay_out(wanted_rS: Floats, most_rS: Floats) -> Floats:
    """Return the same of each rank in another order: the lightest where there is least room."""
    laid_rS = np.empty_like(wanted_rS)
    room_rS = np.argsort(most_rS, axis=1, kind="stable")
    np.put_along_axis(laid_rS, room_rS, np.sort(wanted_rS, axis=1), axis=1)
    return laid_rS


def _cap(wanted_rS: Floats, most_rS: Floats) -> Floats:
    """Return the same sum of each rank, where no slot has more than it can."""
    capped_rS = wanted_rS
    for _ in range(wanted_rS.shape[1]):
        over_r1 = np.maximum(capped_rS - most_rS, 0.0).sum(axis=1, keepdims=True)
        if not over_r1.any():
            break
        capped_rS = np.minimum(capped_rS, most_rS)
        free_rS = np.where(capped_rS < most_rS, capped_rS, 0.0)
        capped_rS = capped_rS + over_r1 * free_rS / np.maximum(
            free_rS.sum(axis=1, keepdims=True), 1e-30
        )
    return capped_rS


def chances_of(chance_p: Floats, table_p: Sequence[int], top_k: int) -> Tensor:
    """Return [C, e] float64: of each expert to be a token's, by the token's number modulo C.

    Args:
        chance_p: of the slots of a layer, in the mean over tokens.
        table_p: their experts; a token is dealt to an expert's slots in turn.
        top_k: K, which every row sums to.
    """
    slots_of: list[list[int]] = [[] for _ in range(max(table_p) + 1)]
    for slot, expert in enumerate(table_p):
        slots_of[expert].append(slot)
    num_classes = math.lcm(*map(len, slots_of))
    chance_Ce = np.array(
        [
            [len(slots) * chance_p[slots[number % len(slots)]] for slots in slots_of]
            for number in range(num_classes)
        ]
    )
    is_alone_e = np.array([len(slots) == 1 for slots in slots_of])
    # Those with one slot make up, as far as each can, for what others' slots of one number have
    # more than those of another, and in the mean over numbers by nothing.
    room_e = np.where(is_alone_e, np.minimum(chance_Ce, 1.0 - chance_Ce)[0], 0.0)
    left_C1 = top_k - chance_Ce.sum(axis=1, keepdims=True)
    chance_Ce += left_C1 * room_e / room_e.sum()
    assert 0.0 <= chance_Ce.min() <= chance_Ce.max() < 1.0, chance_Ce
    return torch.from_numpy(chance_Ce)


def sampled_experts(
    chance_Ce: Tensor, num_tokens: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Return [num_tokens, K] int64 on the generator's device: different ones of each token.

    Args:
        chance_Ce: of `chances_of`.
        num_tokens: T.
        top_k: K.
        generator: of the draws.
    """
    device, num_experts = generator.device, chance_Ce.shape[1]
    number_T = torch.arange(num_tokens, device=device) % len(chance_Ce)
    drawn_Te = torch.rand((num_tokens, num_experts), generator=generator, device=device)
    order_Te = drawn_Te.argsort(dim=1)
    ends_Te = chance_Ce.to(device)[number_T].gather(1, order_Te).cumsum(dim=1)
    ends_Te[:, -1] = top_k  # but for rounding it is
    # In float32, so that K and what is just below 1 are less than K + 1.
    first_T1 = torch.rand((num_tokens, 1), generator=generator, device=device).double()
    passed_Te = (ends_Te + first_T1).floor()
    before_Te = torch.nn.functional.pad(passed_Te[:, :-1], (1, 0))
    places_TK = (passed_Te > before_Te).float().topk(top_k, dim=1).indices
    return order_Te.gather(1, places_TK)


def draw_played(
    chances: Sequence[Tensor], *, num_steps: int, num_tokens: int, top_k: int,
    generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Return [num_steps, L, num_tokens, K] int64, with the same chances at every step.

    Args:
        chances: of `chances_of`, of every layer.
        num_steps: how many.
        num_tokens: T.
        top_k: K.
        generator: of the draws.
    """
    shape = (num_steps, len(chances), num_tokens, top_k)
    drawn = torch.empty(shape, dtype=torch.int64, device=generator.device)
    for step in drawn:
        for layer, chance_Ce in zip(step, chances, strict=True):
            layer.copy_(sampled_experts(chance_Ce, num_tokens, top_k, generator))
    return drawn
