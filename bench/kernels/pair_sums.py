"""Experts' results on their way home, for `collectives`: what is sent, by either way, and expected.

A layer of DeepSeek-V3's width whose 256 experts are shared by eight ranks, of which those of this
host are there: tokens choose 8 experts each, evenly, and what others would send is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.alignment import Alignment
from engine.kernels.base import Kernels
from engine.ops.permute import UNPERMUTE_ROWS
from engine.parallel.groups import RankGroup
from engine.parallel.pair_rows import PairRows
from engine.parallel.pending import Pending

NUM_EXPERTS, NUM_LOCAL, TOP_K = 256, 32, 8


def draw_pairs(num_rows: int, hidden_size: int, group: RankGroup, *, seed: int) -> PairRows:
    """Return a rank's results for `num_rows` tokens of all ranks, which all ranks draw alike."""
    shared = torch.Generator("cuda").manual_seed(seed)
    ids = torch.rand(num_rows, NUM_EXPERTS, device="cuda", generator=shared)
    ids = ids.topk(TOP_K, dim=1).indices
    weights = torch.rand(ids.shape, device="cuda", generator=shared)
    is_here = ids // NUM_LOCAL == group.rank
    own = torch.Generator("cuda").manual_seed(1000 * seed + group.rank)
    num_pairs = int(is_here.sum())
    places = torch.full(ids.shape, -1, dtype=torch.int32, device="cuda")
    places[is_here] = torch.randperm(num_pairs, device="cuda", generator=own).int()
    rows = torch.randn(num_pairs, hidden_size, device="cuda", generator=own).bfloat16()
    return PairRows(
        rows_MD=rows,
        places_PK=places,
        weights_PK=weights,
        own_ids_TK=ids.chunk(group.size)[group.rank].contiguous(),
        num_local_experts=NUM_LOCAL,
    )


def start_combine(kernels: Kernels, group: RankGroup, pairs: PairRows) -> Pending[Tensor]:
    """Start as the dispatcher does: where sums travel by stores in one, else per token before."""
    if group.sums_pairs(pairs):
        return group.start_sum_of_pairs(pairs)
    unused = torch.empty(pairs.rows_MD.shape[0], dtype=torch.int32, device="cuda")
    places = Alignment(rows_TK=pairs.places_PK, expert_M=unused)
    summed = kernels.ops[UNPERMUTE_ROWS](pairs.rows_MD, places, pairs.weights_PK, None)
    return group.start_reduce_scatter(summed)


def sum_of(pairs: PairRows, part: slice) -> Tensor:
    """Return one rank's term for some tokens, in float32."""
    places, weights = pairs.places_PK[part], pairs.weights_PK[part]
    total = torch.zeros(places.shape[0], pairs.rows_MD.shape[1], device="cuda")
    for k in range(TOP_K):
        here = places[:, k] >= 0
        rows = pairs.rows_MD[places[here, k].long()].float()
        total[here] += rows * weights[here, k, None]
    return total
