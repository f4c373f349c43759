"""Which errors of a step in a group mean that another rank is gone.

A rank whose peer dies learns it on the host, where sockets close, or on its GPU: a library of
collectives reports it, or a kernel that has waited for too long ends itself (a trap, see
`engine.parallel.nvlink.signals`), which the driver calls an unspecified launch failure. That error
has other causes too, and all of them leave this rank without a device; none is a request's fault.
Illegal addresses and failed assertions have names of their own, and stay this rank's errors.
"""

from __future__ import annotations

from torch.distributed import DistBackendError

from runtime.errors import PeerLostError

_TRAPPED = "unspecified launch failure"


def as_lost_peer(error: BaseException) -> PeerLostError | None:
    """Return what another rank's loss is called here; None where the error is something else.

    Args:
        error: of a step, or of the meeting before it, of a rank in a group.
    """
    if isinstance(error, PeerLostError):
        return error
    if isinstance(error, DistBackendError):
        return PeerLostError(f"another rank was lost in a collective: {error}")
    if isinstance(error, RuntimeError) and _TRAPPED in str(error):
        reason = str(error).partition("\n")[0]
        return PeerLostError(f"a kernel gave up, as it does when another rank is lost: {reason}")
    return None
