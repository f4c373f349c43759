"""The ranks of an instance one after another in one process: shards without collectives.

`rank_context` builds layers as rank r of n would; what an all-reduce would sum is left to the test.
For the collectives themselves see `rank_main`.
"""

from torch import Tensor

from engine.layers.context import LayerContext
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.pending import Pending, Ready


class SilentGroup(RankGroup):
    """A group of several ranks whose all-reduce leaves each rank's part alone."""

    def start_all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        return Ready(tensor)


def rank_context(rank: int, *, tp: int = 1, dp: int = 1, ep: int = 1) -> LayerContext:
    dims = ParallelDims(tp=tp, dp=dp, ep=ep, rank=rank)
    groups = ProcessGroups(
        dims=dims,
        tp_group=SilentGroup(rank=dims.tp_rank, size=tp),
        ep_group=SilentGroup(rank=dims.ep_rank, size=ep),
    )
    return LayerContext(groups=groups)
