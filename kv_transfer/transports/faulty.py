"""A transport that misbehaves on purpose, around a real one: the fault harness.

The chooser decides the fate of each post as it is made; ``inject_faults`` takes one from the
cluster's configuration, so that whole clusters can be tested. Faults befall posts, so they belong
into processes that post (prefill workers). What a library does when it gives up while the hardware
goes on (LATE) is the case that matters most: the poster hears FAILED, and the bytes land later,
unless they are fenced.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence

from kv_transfer.transport import (
    MemoryRegion,
    PeerHandle,
    RegionWrite,
    TransferHandle,
    TransferState,
    Transport,
)
from kv_transfer.transports.faulty_posts import FaultyPost, PlannedPost, SourceCopy, first_half
from kv_transfer.transports.post_table import PostTable
from runtime.errors import PeerLostError, TandemError, TransferFailedError
from runtime.faults import Fault, FaultKind, FaultPlan
from runtime.logging import get_logger

__all__ = ["FaultyTransport", "PlannedPost", "inject_faults"]

_REAP_INTERVAL_S = 0.02
_HELD = frozenset({FaultKind.DELAY, FaultKind.DROP, FaultKind.REORDER, FaultKind.LATE})

_log = get_logger(__name__)


def inject_faults(inner: Transport, plan: FaultPlan) -> Transport:
    """``inner``, wrapped where ``plan`` affects its process."""
    instance, _, rest = inner.local_name.partition("@")
    if not plan.affects(instance):
        return inner
    worker = f"{instance}/{rest.rpartition('/')[2]}"  # without the epoch, to be repeatable
    shares = ", ".join(f"{rule.fault.kind.value} {rule.share:g}" for rule in plan.rules)
    _log.warning("KV TRANSFERS FAIL ON PURPOSE (kv_transfer.faults): %s", shares)
    return FaultyTransport(inner, lambda post: plan.fate(worker, post.index))


class FaultyTransport:
    """``inner`` with faults that ``choose`` picks; None lets a post through. Keeps all promises but
    those it breaks.
    """

    def __init__(self, inner: Transport, choose: Callable[[PlannedPost], Fault | None]) -> None:
        self._inner = inner
        self._choose = choose
        self._states = PostTable()
        self._posts: dict[int, FaultyPost] = {}  # by our post id, until release
        self._held: dict[int, FaultyPost] = {}  # not handed on yet
        self._copies: dict[int, SourceCopy] = {}  # of late posts, by our post id
        self._late: dict[int, TransferHandle] = {}  # handed on after FAILED
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

    @property
    def registered_bytes(self) -> int:
        """See ``Transport``; copies of late posts are among them."""
        return self._inner.registered_bytes

    def register(self, region: MemoryRegion) -> None:
        """See ``Transport``, as the methods without a comment below."""
        self._inner.register(region)

    def deregister(self, label: str) -> None:
        """See ``Transport``."""
        self._inner.deregister(label)

    def endpoint(self, peer: str) -> bytes:
        """See ``Transport``."""
        return self._inner.endpoint(peer)

    def connect(self, peer: str, endpoint: bytes) -> PeerHandle:
        """See ``Transport``."""
        return self._inner.connect(peer, endpoint)

    def post(
        self, peer: PeerHandle, writes: Sequence[RegionWrite], notify: bytes | None = None
    ) -> TransferHandle:
        """Ask the chooser, then hand on, hold, fail or swallow."""
        num_bytes = sum(write.nbytes for write in writes)
        handle = TransferHandle(peer, self._states.start(), num_bytes)
        with self._condition:
            planned = PlannedPost(self._num_posts, peer.peer, tuple(writes), notify)
            self._num_posts += 1
        fault = self._choose(planned)
        post = FaultyPost(handle=handle, planned=planned, fault=fault)
        self._posts[handle.post_id] = post
        if fault is not None and fault.kind in _HELD:
            self._hold(post, fault)
            return handle
        try:
            self._hand_on(post)
        except ValueError:
            del self._posts[handle.post_id]
            self._states.settle(handle.post_id, TransferFailedError("not posted"))
            self._states.release(handle.post_id)
            raise
        self._pass_by(post)
        return handle

    def poll(self, handle: TransferHandle) -> TransferState:
        """Of what was handed on, with the end that the fault has in store."""
        post = self._posts[handle.post_id]
        states = [self._inner.poll(inner) for inner in post.handed_on]
        is_over = bool(states) and TransferState.PENDING not in states
        if is_over and time.monotonic() >= post.told_at:
            failed = [h for h, s in zip(post.handed_on, states, strict=True) if s.value == "failed"]
            error = self._inner.error(failed[0]) if failed else post.ends_as
            self._states.settle(handle.post_id, error)
        return self._states.state(handle.post_id)

    def error(self, handle: TransferHandle) -> TandemError | None:
        """The injected one, or the inner transport's."""
        return self._states.error(handle.post_id)

    def release(self, handle: TransferHandle) -> None:
        """See ``Transport``."""
        self._states.release(handle.post_id)
        for inner in self._posts.pop(handle.post_id).handed_on:
            self._inner.release(inner)

    def is_connected(self, peer: PeerHandle) -> bool:
        """See ``Transport``."""
        return self._inner.is_connected(peer)

    def disconnect(self, peer: PeerHandle) -> None:
        """Also ends the posts that are held for this connection."""
        self._inner.disconnect(peer)
        self._fail_held(peer)

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
        self._fail_held(None)
        self._inner.close()
        self._copies.clear()

    def _hold(self, post: FaultyPost, fault: Fault) -> None:
        post_id = post.handle.post_id
        if fault.kind is FaultKind.LATE:
            copy = SourceCopy(f"late-{post_id}", post.planned.writes)
            self._inner.register(copy.region)
            self._copies[post_id] = copy
            self._states.settle(post_id, PeerLostError("gave up on a post (injected)"))
        with self._condition:
            self._held[post_id] = post
            if fault.kind is not FaultKind.DROP:
                self._wake_at(time.monotonic() + fault.delay_s, post_id)

    def _hand_on(self, post: FaultyPost) -> None:
        """Give a post to the inner transport, as its fault wants."""
        kind = post.fault.kind if post.fault else None
        peer, planned = post.handle.peer, post.planned
        if kind is FaultKind.LATE:
            copy = self._copies[post.handle.post_id]
            inner = self._inner.post(peer, copy.writes, planned.notify)
            self._late[post.handle.post_id] = inner
            return
        if kind is FaultKind.FAIL:
            self._states.settle(post.handle.post_id, TransferFailedError("post failed (injected)"))
            return
        if kind is FaultKind.DISCONNECT:
            self._states.settle(post.handle.post_id, PeerLostError("connection lost (injected)"))
            self.disconnect(peer)
            return
        writes: Sequence[RegionWrite] = planned.writes
        notify = None if kind in (FaultKind.MUTE, FaultKind.PARTIAL) else planned.notify
        if kind is FaultKind.PARTIAL:
            writes = first_half(writes)
            post.ends_as = TransferFailedError("only a part of a post was written (injected)")
        if kind is FaultKind.STALL and post.fault:
            post.told_at = time.monotonic() + post.fault.delay_s
            with self._condition:
                self._wake_at(post.told_at, post.handle.post_id)
        post.handed_on.append(self._inner.post(peer, writes, notify))
        if kind is FaultKind.DUPLICATE:
            post.handed_on.append(self._inner.post(peer, writes, notify))

    def _pass_by(self, post: FaultyPost) -> None:
        """Hand on what waited for a later post of the same connection."""
        with self._condition:
            passed = [
                held
                for held in self._held.values()
                if held.fault and held.fault.kind is FaultKind.REORDER
                if held.handle.peer == post.handle.peer
            ]
            for held in passed:
                del self._held[held.handle.post_id]
        for held in passed:
            self._hand_on(held)

    def _fail_held(self, peer: PeerHandle | None) -> None:
        """End what is held for a connection (None: for all); what is late lands nowhere."""
        with self._condition:
            ended = [i for i, held in self._held.items() if peer in (None, held.handle.peer)]
            for post_id in ended:
                del self._held[post_id]
        for post_id in ended:
            self._drop_copy(post_id)
            self._states.settle(post_id, PeerLostError("connection closed under a held post"))
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def _wake_at(self, moment: float, post_id: int) -> None:
        heapq.heappush(self._due, (moment, post_id))
        self._condition.notify()

    def _run(self) -> None:
        """The thread: hands on what is due, and forgets late posts that have landed."""
        while True:
            with self._condition:
                while not self._is_closing and not self._is_due() and not self._late:
                    wait_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._condition.wait(wait_s)
                if self._is_closing:
                    return
                if not self._is_due():
                    self._condition.wait(_REAP_INTERVAL_S)
                held = []
                while self._is_due():
                    held.append(self._held.pop(heapq.heappop(self._due)[1], None))
            for post in filter(None, held):
                self._hand_on(post)
            self._reap_late()
            self._tell()

    def _is_due(self) -> bool:
        return bool(self._due) and self._due[0][0] <= time.monotonic()

    def _reap_late(self) -> None:
        for post_id, inner in list(self._late.items()):
            if self._inner.poll(inner) is not TransferState.PENDING:
                del self._late[post_id]
                self._inner.release(inner)
                self._drop_copy(post_id)

    def _drop_copy(self, post_id: int) -> None:
        copy = self._copies.pop(post_id, None)
        if copy is not None:
            self._inner.deregister(copy.region.label)
