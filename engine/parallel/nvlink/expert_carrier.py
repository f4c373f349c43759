"""Experts between GPUs of one host: copies into the inbox of a peer, whose memory is mapped here.

A copy is issued by the engine loop's thread to the stream of moving experts, where it follows the
packing; no thread helps, because a copy that another thread issues may wait in the driver for a
graph's launch, and the graph for that thread. When its event is over the bytes are in the peer's
memory, and nothing of them can land later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.parallel.groups import RankGroup
from engine.parallel.nvlink.open import map_peer_memory
from engine.streams import Streams, StreamUse


class NvlinkCarrier:
    """See `engine.experts.carrier.Carrier`."""

    def __init__(
        self,
        outbox: Tensor,
        inboxes: Sequence[Tensor],
        stream: torch.cuda.Stream,
        close: Callable[[], None],
    ) -> None:
        """Take what is mapped.

        Args:
            outbox: of this rank, uint8.
            inboxes: of all ranks, as this GPU sees them.
            stream: on which the outbox is packed.
            close: gives the mapping back; all ranks call.
        """
        self._outbox, self._inboxes, self._stream = outbox, inboxes, stream
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.close = close

    @property
    def is_ready(self) -> bool:
        """Whether the latest copy is over: then nothing of it can land."""
        return self.is_sent()

    def send(self, rank: int) -> None:
        """See `Carrier`."""
        with torch.cuda.stream(self._stream):
            self._inboxes[rank].copy_(self._outbox, non_blocking=True)
            self._sent.record(self._stream)

    def is_sent(self) -> bool:
        """See `Carrier`; a copy that fails takes the device along."""
        return bool(self._sent.query())  # type: ignore[no-untyped-call]

    def recover(self) -> None:
        """See `Carrier`; `is_ready` waits for what is under way."""


def open_nvlink_carrier(
    group: RankGroup, streams: Streams, nbytes: int
) -> tuple[NvlinkCarrier, tuple[Tensor, Tensor]] | None:
    """Allocate boxes that the peers can reach; all ranks call.

    Args:
        group: the ranks; each has a GPU.
        streams: of this rank.
        nbytes: of a box.

    Returns:
        The carrier, outbox and inbox; None where the ranks cannot reach each other's memory.
    """
    memory = map_peer_memory(group, streams.device, 2 * nbytes, num_zeros=2 * nbytes)
    if memory is None:
        return None
    seen = [
        memory.handle.get_buffer(rank, (2 * nbytes,), torch.uint8)  # type: ignore[attr-defined]
        for rank in range(group.size)
    ]
    outbox, inbox = memory.buffer[:nbytes], memory.buffer[nbytes:]
    held: list[object] = [memory, seen]

    def close() -> None:
        torch.cuda.synchronize(streams.device)
        group.barrier()
        held.clear()

    inboxes = [box[nbytes:] for box in seen]
    stream = streams.of(StreamUse.EXPERT_COPIES)
    return NvlinkCarrier(outbox, inboxes, stream, close), (outbox, inbox)
