"""What the paired transports ask of a library: one instance of it serves one end of one connection.

An instance per connection, because destroying it is the only fence that all the libraries have in
common: its memory registrations, sockets, queue pairs and threads go with it, and those of other
peers stay. It also ends two other quarrels: no instance is ever used for two peers at once, and
none is used by two threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kv_transfer.transport import MemoryRegion


class EngineError(Exception):
    """The library failed or refused; the connection that it served is over. The text is the
    library's.
    """


class EngineWrite(NamedTuple):
    """Copy ``nbytes`` from our ``src_address`` to the peer's ``dst_address``; devices as in
    ``MemoryRegion``.
    """

    src_address: int
    dst_address: int
    nbytes: int
    src_device: int | None
    dst_device: int | None


class EnginePost(Protocol):
    """Writes under way, opaque to all but their engine."""


class WriteEngine(Protocol):
    """One instance of a library. Calls come one at a time, from threads of the connection; all of
    them but ``close`` may raise ``EngineError``.
    """

    def register(self, region: MemoryRegion) -> None:
        """Let the library read, and the peer write, ``region``."""
        ...

    def deregister(self, region: MemoryRegion) -> None:
        """The opposite; no write of ours reads it any more."""
        ...

    def address(self) -> bytes:
        """On the receiving end, after ``register``: what the peer's ``attach`` needs."""
        ...

    def attach(self, address: bytes) -> None:
        """On the sending end: reach the peer. May take seconds."""
        ...

    def start(self, writes: Sequence[EngineWrite]) -> EnginePost:
        """Begin ``writes``. May take as long as the CPU needs to copy them."""
        ...

    def poll(self, post: EnginePost) -> bool:
        """Whether all bytes are in the peer's memory. Does not block."""
        ...

    def release(self, post: EnginePost) -> None:
        """Forget a post that is complete."""
        ...

    def close(self) -> None:
        """Destroy the instance: after return it reads and writes no memory. Blocks for bounded
        time. Idempotent.
        """
        ...


class EngineFactory(Protocol):
    """Makes instances of one library, configured alike."""

    @property
    def library(self) -> str:
        """Its name with what both ends must have in common; the connection is refused where it
        differs.
        """
        ...

    @property
    def bypasses_receiver(self) -> bool:
        """Whether a process of the receiver's host may write without the receiver's process and
        without a network card: memory mapped from another process. Destroying the receiver's
        instance does not stop such a writer; only its own word or its end does.
        """
        ...

    def create(self, name: str) -> WriteEngine:
        """A new instance; ``name`` is unique.

        Raises:
            EngineError: the library does not start.
        """
        ...
