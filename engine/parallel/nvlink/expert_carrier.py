"""Experts between GPUs of one host: packed into the inbox of a peer, whose memory is mapped here.

What packs an expert (`engine.experts.staging`) copies it there itself, on the stream of moving
experts: nothing is left to be sent, and when it is packed the bytes are in the peer's memory, and
nothing of them can land later. The engine loop's thread issues these copies; no thread helps,
because a copy that another thread issues may wait in the driver for a graph's launch, and the graph
for that thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.open import map_peer_memory


class NvlinkCarrier:
    """See `engine.experts.carrier.Carrier`."""

    is_ready = True
    """Nothing is under way that is not being packed."""

    def __init__(self, inboxes: Sequence[Tensor], close: Callable[[], None]) -> None:
        """Take what is mapped.

        Args:
            inboxes: of all ranks, as this GPU sees them.
            close: gives the mapping back; all ranks call.
        """
        self._inboxes = inboxes
        self.close = close

    def box(self, rank: int) -> Tensor:
        """See `Carrier`."""
        return self._inboxes[rank]

    def send(self, rank: int, start: int, end: int) -> None:
        """See `Carrier`; it is there."""

    def is_sent(self) -> bool:
        """See `Carrier`."""
        return True

    def recover(self) -> None:
        """See `Carrier`; what is being packed is waited for by whoever packs."""


def open_nvlink_carrier(
    group: RankGroup, device: torch.device, nbytes: int
) -> tuple[NvlinkCarrier, Tensor] | None:
    """Allocate an inbox that the peers can reach; all ranks call.

    Args:
        group: the ranks; each has a GPU.
        device: of this rank.
        nbytes: of an inbox.

    Returns:
        The carrier, and the inbox, of zeros; None where the ranks cannot reach each other's memory.
    """
    memory = map_peer_memory(group, device, nbytes, num_zeros=nbytes)
    if memory is None:
        return None
    inboxes = [
        memory.handle.get_buffer(rank, (nbytes,), torch.uint8)  # type: ignore[attr-defined]
        for rank in range(group.size)
    ]
    held: list[object] = [memory, inboxes]

    def close() -> None:
        torch.cuda.synchronize(device)
        group.barrier()
        held.clear()

    return NvlinkCarrier(inboxes, close), memory.buffer[:nbytes]
