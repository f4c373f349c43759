"""Experts between ranks by the library that moves KV: TCP on CPUs, NIXL between GPUs of two hosts.

A transport of its own, so that a fence here shuts out ranks of this group and no writer of KV. Its
only regions are the boxes of a move. Connections are made on the side thread, all ranks together,
and anew after every retreat, behind a fence: nothing that was posted before can land then.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from torch import Tensor

from engine.experts.side_thread import SideThread, gather_bytes
from engine.experts.staging import Staging
from engine.parallel.groups import RankGroup
from kv_transfer.transport import (
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
    Transport,
)
from runtime.errors import TransferFailedError

_OUTBOX: Final = "expert-outbox"
_INBOX: Final = "expert-inbox"


class TransportCarrier:
    """See `engine.experts.carrier.Carrier`."""

    def __init__(
        self,
        transport: Transport,
        staging: Staging,
        side: SideThread,
        group: RankGroup,
        *,
        names: Sequence[str],
    ) -> None:
        """Begin to connect; all ranks call.

        Args:
            transport: of this rank, without regions; closed with this.
            staging: whose boxes are written.
            side: for what takes time.
            group: of the ranks, for that thread alone.
            names: of all ranks in the transports, in rank order.
        """
        self._transport, self._staging = transport, staging
        self._side, self._group, self._names = side, group, names
        self._peers: dict[int, PeerHandle] = {}
        self._post: TransferHandle | None = None
        transport.register(_region(_OUTBOX, staging.outbox))
        transport.register(_region(_INBOX, staging.inbox))
        self._connecting: Future[dict[int, PeerHandle]] = side.submit(self._connect)

    @property
    def is_ready(self) -> bool:
        """See `Carrier`."""
        if not self._connecting.done():
            return False
        self._peers = self._connecting.result()
        return True

    def box(self, rank: int) -> Tensor:
        """See `Carrier`."""
        return self._staging.outbox

    def send(self, rank: int, start: int, end: int) -> None:
        """See `Carrier`."""
        source = self._staging.outbox.data_ptr() + start
        write = RegionWrite(_INBOX, source, start, end - start)
        self._post = self._transport.post(self._peers[rank], [write])

    def is_sent(self) -> bool:
        """See `Carrier`."""
        post = self._post
        if post is None:
            return True
        state = self._transport.poll(post)
        if state is TransferState.PENDING:
            return False
        error = self._transport.error(post)
        self._transport.release(post)
        self._post = None
        if state is TransferState.FAILED:
            raise error or TransferFailedError(f"an expert did not come to {post.peer.peer}")
        return True

    def recover(self) -> None:
        """See `Carrier`."""
        self._post, old = None, self._peers
        self._peers = {}
        self._connecting = self._side.submit(partial(self._reconnect, old))

    def close(self) -> None:
        """See `Carrier`."""
        self._transport.close()

    def _reconnect(self, old: dict[int, PeerHandle]) -> dict[int, PeerHandle]:
        """Have nothing of before land any more, from here and here; then connect again."""
        for handle in old.values():
            self._transport.disconnect(handle)
        for rank, name in enumerate(self._names):
            if rank != self._group.rank:
                self._transport.fence(name)
        return self._connect()

    def _connect(self) -> dict[int, PeerHandle]:
        # All ranks of one life of an instance may use the same endpoint.
        others = [name for rank, name in enumerate(self._names) if rank != self._group.rank]
        endpoints = gather_bytes(self._group, self._transport.endpoint(others[0]))
        return {
            rank: self._transport.connect(name, endpoints[rank])
            for rank, name in enumerate(self._names)
            if rank != self._group.rank
        }


def _region(label: str, box: Tensor) -> MemoryRegion:
    device = box.device.index if box.device.type == "cuda" else None
    return MemoryRegion(label, box.data_ptr(), box.nbytes, device=device)
