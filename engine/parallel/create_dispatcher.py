"""Choose the way tokens travel, from the axes in use and the format of the experts."""

from typing import Any

from engine.kernels.base import Kernels
from engine.parallel.all_to_all_dispatcher import AllToAllDispatcher
from engine.parallel.gathered_dispatcher import GatheredDispatcher
from engine.parallel.groups import ProcessGroups, RankGroup
from engine.parallel.local_dispatcher import LocalDispatcher
from engine.parallel.row_formats import AlignedFp8, ExpertShare, PlainRows, RowFormat
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
        and experts: `AllToAllDispatcher`. Otherwise each has all rows it needs: `LocalDispatcher`.
    """
    share = ExpertShare(
        first=groups.ep_group.rank * num_local_experts,
        num_local=num_local_experts,
        num_ranks=groups.dims.ep,
    )
    rows: RowFormat[Any] = PlainRows(share)
    if fp8_kernels is not None:
        rows = AlignedFp8(fp8_kernels, share)
    if scattered_over is not None:
        return GatheredDispatcher(rows, scattered_over)
    if groups.dims.ep > 1 and groups.dims.tp == 1:
        return AllToAllDispatcher(rows, groups.ep_group)
    return LocalDispatcher(rows, groups.tp_group if groups.dims.ep == 1 else groups.ep_group)
