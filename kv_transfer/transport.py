"""The interface of a library that writes into a peer's registered memory, and its value types.

One-sided: the receiver only registers memory and hands out an endpoint; it takes no part in a
write. What every transport promises, and what each adapter of a library has to make true:

- **Order.** Posts of one connection may complete in any order; a post's ``notify`` arrives after
  all its bytes.
- **DONE** means that the bytes are in the peer's memory.
- **FAILED** means that the *source* is not read any more. Bytes may have landed, and may still land
  until the receiver fences us: whoever needs the destination back must see DONE of every post, or
  fence.
- **fence(peer)**, on the receiver: when it returns, nothing from a connection that the peer opened
  with an endpoint handed out before can land, ever. The peer needs a new endpoint (a new claim)
  to connect again.
- **Threads.** Every method may be called from any thread; a library that is not thread-safe is
  locked by its adapter. ``post`` and ``poll`` never block on the network. ``connect``, ``fence``,
  ``close`` may block, for bounded time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from runtime.errors import TandemError

KV_REGION = "kv"
METADATA_REGION = "metadata"


def peer_name(instance: str, epoch: int, rank: int) -> str:
    """The name of a rank in the transports; a restarted process (new epoch) is another peer."""
    return f"{instance}@{epoch:016x}/{rank}"


def owner_of(peer: str) -> str:
    """The instance and epoch in a peer's name: what all ranks of one life of an instance share."""
    return peer.rpartition("/")[0] or peer


class TransferState(enum.Enum):
    """Where a post stands. DONE and FAILED are final."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that peers may write, or that posts read: ``nbytes`` from ``address``. Its owner keeps
    it alive.
    """

    label: str
    address: int
    nbytes: int
    device: int | None = None
    """CUDA ordinal in the owner's process; None is host memory."""
    scratch_bytes: int = 0
    """So many bytes at the region's start hold nothing of value: a new connection may warm up by
    writing there."""


class RegionWrite(NamedTuple):
    """Copy ``nbytes`` from our ``src_address`` to ``dst_offset`` of the peer's region ``label``."""

    label: str
    src_address: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PeerHandle:
    """One connection to a peer; a later connection to the same peer has another
    ``connection_id``.
    """

    peer: str
    connection_id: int


@dataclass(frozen=True, slots=True)
class TransferHandle:
    """One post in flight."""

    peer: PeerHandle
    post_id: int
    num_bytes: int


class Transport(Protocol):
    """What the sender and the receiver use. The promises are in the module's docstring."""

    @property
    def local_name(self) -> str:
        """Our name among peers, with our epoch."""
        ...

    @property
    def poll_interval_s(self) -> float | None:
        """How often to poll for completions and notifications; None where listeners are told of
        each.
        """
        ...

    @property
    def fence_generation(self) -> int:
        """Number of fences so far. An endpoint and a ticket carry it: see
        ``kv_transfer.ticket``.
        """
        ...

    @property
    def registered_bytes(self) -> int:
        """Bytes of all regions that are registered now."""
        ...

    def register(self, region: MemoryRegion) -> None:
        """Make ``region`` writable for connected peers and readable for our posts.

        Raises:
            ValueError: the label is taken, or the region overlaps another.
        """
        ...

    def deregister(self, label: str) -> None:
        """After return no peer's write lands in the region. Our own posts that read it must be
        over.
        """
        ...

    def endpoint(self, peer: str) -> bytes:
        """What ``peer`` needs to write here: address, region keys, connection token. Secret: for
        authenticated peers. All ranks of its instance and epoch can use it, nobody else.
        """
        ...

    def connect(self, peer: str, endpoint: bytes) -> PeerHandle:
        """Open a connection to ``peer``. Blocks for seconds at most.

        Raises:
            StaleTicketError: another process answers there, or the endpoint is of before a fence or
                was given to another peer.
            PeerLostError: nobody answers.
        """
        ...

    def post(
        self, peer: PeerHandle, writes: Sequence[RegionWrite], notify: bytes | None = None
    ) -> TransferHandle:
        """Start the writes, then deliver ``notify``. On a dead connection the handle is FAILED at
        once.

        Raises:
            ValueError: a source outside our registered regions, too many writes, or too long a
                notification (errors of ours, nothing is sent).
        """
        ...

    def poll(self, handle: TransferHandle) -> TransferState:
        """The state now. A final state must be followed by ``release``."""
        ...

    def error(self, handle: TransferHandle) -> TandemError | None:
        """Why it FAILED: PeerLostError where the connection is dead, TransferFailedError where it
        was refused.
        """
        ...

    def release(self, handle: TransferHandle) -> None:
        """Forget a post whose state is final."""
        ...

    def is_connected(self, peer: PeerHandle) -> bool:
        """Whether the connection can still carry posts, as far as is known. Listeners hear of a
        loss.
        """
        ...

    def disconnect(self, peer: PeerHandle) -> None:
        """Close one of our connections; its pending posts become FAILED before this returns."""
        ...

    def fence(self, peer: str) -> None:
        """Shut out ``peer`` as a writer: after return nothing of it lands. Never from inside a
        listener.
        """
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """(peer, message) pairs since the last call. Hints: a bounded queue, the oldest are dropped
        when it is full.
        """
        ...

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each completion or notification, from a thread of the transport;
        it must not block.
        """
        ...

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Stop calling ``listener``."""
        ...

    def close(self) -> None:
        """Fail what is pending, close all connections, join all threads. Idempotent."""
        ...
