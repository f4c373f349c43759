"""A transport that misbehaves on purpose, around a real one. For tests; never created by name.

The caller decides the fate of each post as it is made. What a library does when it gives up while
the hardware goes on (LATE) is the case that matters most: the poster hears FAILED, and the bytes
land later, unless they are fenced.
"""

from __future__ import annotations

import ctypes
import enum
import heapq
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kv_transfer.transport import (
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
    Transport,
)
from kv_transfer.transports.post_table import PostTable
from runtime.errors import PeerLostError, TandemError, TransferFailedError


class FaultKind(enum.Enum):
    """What happens to a post."""

    DELAY = "delay"
    """It is handed on after ``delay_s``, PENDING until then."""
    DROP = "drop"
    """It stays PENDING until the connection is closed, then it is FAILED; nothing is written."""
    FAIL = "fail"
    """It is FAILED at once; nothing is written."""
    LATE = "late"
    """It is FAILED at once, and its bytes (as they are now) are handed on after ``delay_s`` all the
    same."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The fate of one post; ``delay_s`` in seconds."""

    kind: FaultKind
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlannedPost:
    """What the chooser sees: ``index`` counts the posts of this transport from 0."""

    index: int
    peer: str
    writes: tuple[RegionWrite, ...]
    notify: bytes | None


@dataclass(slots=True)
class _HeldPost:
    handle: TransferHandle
    post: PlannedPost
    is_late: bool
    memory: mmap.mmap | None = None  # keeps a late post's copy alive


class FaultyTransport:
    """``inner`` with faults that ``choose`` picks; None lets a post through. Keeps all promises but
    those it breaks.
    """

    def __init__(self, inner: Transport, choose: Callable[[PlannedPost], Fault | None]) -> None:
        self._inner = inner
        self._choose = choose
        self._posts = PostTable()
        self._forwarded: dict[int, TransferHandle] = {}  # inner handles, by our post id
        self._held: dict[int, _HeldPost] = {}
        # Handed on after FAILED: their copies live until close.
        self._late: list[tuple[_HeldPost, TransferHandle]] = []
        self._due: list[tuple[float, int]] = []  # heap of (time, post id)
        self._listeners: tuple[Callable[[], None], ...] = ()
        self._num_posts = 0
        self._is_closing = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-faulty", daemon=True)
        self._thread.start()

    @property
    def local_name(self) -> str:
        """Of the inner transport, as the next two."""
        return self._inner.local_name

    @property
    def poll_interval_s(self) -> float | None:
        """See ``Transport``."""
        return self._inner.poll_interval_s

    @property
    def fence_generation(self) -> int:
        """See ``Transport``."""
        return self._inner.fence_generation

    def register(self, region: MemoryRegion) -> None:
        """See ``Transport``, as the methods without a comment below."""
        self._inner.register(region)

    def deregister(self, label: str) -> None:
        """See ``Transport``."""
        self._inner.deregister(label)

    def endpoint(self) -> bytes:
        """See ``Transport``."""
        return self._inner.endpoint()

    def connect(self, peer: str, endpoint: bytes) -> PeerHandle:
        """See ``Transport``."""
        return self._inner.connect(peer, endpoint)

    def post(
        self, peer: PeerHandle, writes: Sequence[RegionWrite], notify: bytes | None = None
    ) -> TransferHandle:
        """Ask the chooser, then hand on, hold, fail or swallow."""
        num_bytes = sum(write.nbytes for write in writes)
        handle = TransferHandle(peer, self._posts.start(), num_bytes)
        with self._condition:
            post = PlannedPost(self._num_posts, peer.peer, tuple(writes), notify)
            self._num_posts += 1
        fault = self._choose(post)
        if fault is None:
            self._forwarded[handle.post_id] = self._inner.post(peer, writes, notify)
            return handle
        held = _HeldPost(handle, post, is_late=fault.kind is FaultKind.LATE)
        if fault.kind is FaultKind.LATE:
            self._copy_source(held)
            self._posts.settle(handle.post_id, PeerLostError("gave up on a post (injected)"))
        if fault.kind is FaultKind.FAIL:
            self._posts.settle(handle.post_id, TransferFailedError("post failed (injected)"))
            return handle
        with self._condition:
            self._held[handle.post_id] = held
            if fault.kind is not FaultKind.DROP:
                heapq.heappush(self._due, (time.monotonic() + fault.delay_s, handle.post_id))
                self._condition.notify()
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """Of the inner post once it was handed on."""
        inner = self._forwarded.get(handle.post_id)
        return self._inner.poll(inner) if inner else self._posts.state(handle.post_id)

    def error(self, handle: TransferHandle) -> TandemError | None:
        """The injected one, or the inner transport's."""
        inner = self._forwarded.get(handle.post_id)
        return self._inner.error(inner) if inner else self._posts.error(handle.post_id)

    def release(self, handle: TransferHandle) -> None:
        """See ``Transport``."""
        inner = self._forwarded.pop(handle.post_id, None)
        if inner is not None:
            self._inner.release(inner)
            self._posts.settle(handle.post_id, None)
        self._posts.release(handle.post_id)

    def is_connected(self, peer: PeerHandle) -> bool:
        """See ``Transport``."""
        return self._inner.is_connected(peer)

    def disconnect(self, peer: PeerHandle) -> None:
        """Also ends the posts that are held for this connection."""
        self._inner.disconnect(peer)
        self._fail_held(lambda held: held.handle.peer == peer)

    def fence(self, peer: str) -> None:
        """See ``Transport``."""
        self._inner.fence(peer)

    def notifications(self) -> list[tuple[str, bytes]]:
        """See ``Transport``."""
        return self._inner.notifications()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """See ``Transport``."""
        with self._condition:
            self._listeners = (*self._listeners, listener)
        self._inner.add_listener(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """See ``Transport``."""
        with self._condition:
            self._listeners = tuple(other for other in self._listeners if other != listener)
        self._inner.remove_listener(listener)

    def close(self) -> None:
        """See ``Transport``."""
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        self._thread.join()
        self._fail_held(lambda held: True)
        self._inner.close()
        while self._late:
            self._inner.release(self._late.pop()[1])

    def _copy_source(self, held: _HeldPost) -> None:
        """A FAILED post may not read its source any more, so the bytes that land later are a
        copy.
        """
        memory = mmap.mmap(-1, max(1, held.handle.num_bytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._inner.register(MemoryRegion(f"late-{held.handle.post_id}", address, len(memory)))
        writes, offset = [], 0
        for write in held.post.writes:
            ctypes.memmove(address + offset, write.src_address, write.nbytes)
            writes.append(write._replace(src_address=address + offset))
            offset += write.nbytes
        held.memory = memory
        held.post = replace(held.post, writes=tuple(writes))

    def _fail_held(self, matches: Callable[[_HeldPost], bool]) -> None:
        with self._condition:
            ended = [post_id for post_id, held in self._held.items() if matches(held)]
            for post_id in ended:
                del self._held[post_id]
        for post_id in ended:
            self._posts.settle(post_id, PeerLostError("connection closed under a held post"))
        for listener in self._listeners:
            listener()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._is_closing and not self._is_due():
                    timeout_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._condition.wait(timeout_s)
                if self._is_closing:
                    return
                _, post_id = heapq.heappop(self._due)
                held = self._held.pop(post_id, None)
            if held is not None:
                self._hand_on(held)

    def _is_due(self) -> bool:
        return bool(self._due) and self._due[0][0] <= time.monotonic()

    def _hand_on(self, held: _HeldPost) -> None:
        inner = self._inner.post(held.handle.peer, held.post.writes, held.post.notify)
        if held.is_late:
            self._late.append((held, inner))
        else:
            self._forwarded[held.handle.post_id] = inner
        for listener in self._listeners:
            listener()
