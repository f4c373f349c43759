"""Choose the way tokens travel, from the axes in use and the format of the experts."""

from typing import Any

from engine.kernels.base import Kernels
from engine.parallel.aligned_dispatcher import AlignedDispatcher, ExpertShare
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.gathered_dispatcher import GatheredDispatcher, GatheredFp8Dispatcher
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.replicated_dispatcher import ReplicatedDispatcher
from engine.parallel.token_dispatcher import TokenDispatcher


def create_dispatcher(
    groups: ProcessGroups,
    num_local_experts: int,
    fp8_kernels: Kernels | None = None,
    *,
    scattered_over: RankGroup | None = None,
) -> TokenDispatcher[Any]:
    """Return the dispatcher for these axes; its handles are opaque to the caller.

    Args:
        groups: the axes.
        num_local_experts: experts of this rank.
        fp8_kernels: if the experts are in FP8.
        scattered_over: the ranks of the tp group, if each has its own rows.

    Returns:
        Ranks with their own rows of one step: `GatheredDispatcher`. With their own steps (dp > 1)
        and experts: `AllToAllDispatcher`. Otherwise each has all rows it needs: with FP8
        `AlignedDispatcher`, else `ReplicatedDispatcher` (ep > 1) or `LocalDispatcher`.
    """
    first = groups.ep_group.rank * num_local_experts
    share = ExpertShare(first=first, num_local=num_local_experts, num_ranks=groups.dims.ep)
    if scattered_over is not None:
        if fp8_kernels is not None:
            return GatheredFp8Dispatcher(fp8_kernels, share, scattered_over)
        return GatheredDispatcher(num_local_experts, first, scattered_over)
    if groups.dims.ep > 1 and groups.dims.tp == 1:
        return AllToAllDispatcher(num_local_experts, groups.ep_group, fp8_kernels)
    if fp8_kernels is not None:
        group = groups.tp_group if groups.dims.ep == 1 else groups.ep_group
        return AlignedDispatcher(fp8_kernels, share, group)
    if groups.dims.ep == 1:
        return LocalDispatcher(num_local_experts, groups.tp_group)
    return ReplicatedDispatcher(num_local_experts, groups.ep_group)
