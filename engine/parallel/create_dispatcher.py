"""Choose the way tokens travel, from the axes in use and the format of the experts."""

from typing import Any

from engine.kernels.base import Kernels
from engine.parallel.aligned_dispatcher import AlignedDispatcher
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.replicated_dispatcher import ReplicatedDispatcher
from engine.parallel.token_dispatcher import TokenDispatcher


def create_dispatcher(
    groups: ProcessGroups, num_local_experts: int, fp8_kernels: Kernels | None = None
) -> TokenDispatcher[Any]:
    """Return the dispatcher for these axes; its handles are opaque to the caller.

    ep = 1: `LocalDispatcher`. ep > 1: `ReplicatedDispatcher` where the ranks run the same tokens
    (tp > 1), `AllToAllDispatcher` where each has its own (dp > 1). Experts in FP8 (`fp8_kernels`
    given) take the `AlignedDispatcher` instead of the first two.
    """
    if groups.dims.ep > 1 and groups.dims.tp == 1:
        return AllToAllDispatcher(num_local_experts, groups.ep_group)
    if fp8_kernels is not None:
        first = groups.ep_group.rank * num_local_experts
        group = groups.tp_group if groups.dims.ep == 1 else groups.ep_group
        return AlignedDispatcher(fp8_kernels, num_local_experts, first, group)
    if groups.dims.ep == 1:
        return LocalDispatcher(num_local_experts, groups.tp_group)
    return ReplicatedDispatcher(num_local_experts, groups.ep_group)
