"""Whether a rank records how long it waits for the others, and what that needs."""

from __future__ import annotations

from engine.options import EngineOptions, Switch, TokenSteps
from engine.parallel.groups import ProcessGroups
from engine.parallel.rank_flags import open_rank_flags
from engine.parallel.wait_recorder import WaitRecorder


def open_wait_recorder(
    options: EngineOptions, groups: ProcessGroups, epoch: int, rendezvous: str
) -> WaitRecorder | None:
    """Open the recorder of a rank; all ranks call.

    Args:
        options: of the engine.
        groups: the ranks.
        epoch: of this life of the instance.
        rendezvous: where they met.

    Returns:
        None where there is nobody to wait for, or it is not wanted.

    Raises:
        PeerLostError: a rank is not reached.
    """
    steps, group = options.steps, groups.ep_group
    if not isinstance(steps, TokenSteps) or group.size == 1 or steps.record_waits is Switch.OFF:
        return None
    return WaitRecorder(group.size, open_rank_flags(groups.boot_group, epoch, rendezvous))
