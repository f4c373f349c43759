"""Choose the way tokens travel, from the axes in use."""

from typing import Any

from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.groups import ProcessGroups
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.replicated_dispatcher import ReplicatedDispatcher
from engine.parallel.token_dispatcher import TokenDispatcher


def create_dispatcher(groups: ProcessGroups, num_local_experts: int) -> TokenDispatcher[Any]:
    """Return the dispatcher for these axes; its handles are opaque to the caller.

    ep = 1: `LocalDispatcher`. ep > 1: `ReplicatedDispatcher` where the ranks run the same tokens
    (tp > 1), `AllToAllDispatcher` where each has its own (dp > 1).
    """
    if groups.dims.ep == 1:
        return LocalDispatcher(num_local_experts, groups.tp_group)
    if groups.dims.tp > 1:
        return ReplicatedDispatcher(num_local_experts, groups.ep_group)
    return AllToAllDispatcher(num_local_experts, groups.ep_group)
