"""A connection that we opened to write: one thread drives the library, one reads the control
socket.

The drive thread polls posts and starts those that the CPU copies; at the end it destroys the
instance, fails what is pending, and says BYE; so a FAILED post is never still being read from, and
BYE is true. Whoever notices trouble only sets the reason and wakes it. Posts that a device copies,
and small ones, are started by the caller: a hand-over to another thread would cost as much as they.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.transport import MemoryRegion, PeerHandle
from kv_transfer.transports.paired.engine import EngineError, EnginePost, EngineWrite, WriteEngine
from kv_transfer.transports.paired.frames import FrameKind, receive_frame, send_frame
from kv_transfer.transports.paired.pacing import Pacer
from kv_transfer.transports.post_table import PostTable
from kv_transfer.transports.sockets import ByteSocket
from runtime.errors import PeerLostError
from runtime.logging import get_logger

_log = get_logger(__name__)


_MOST_BYTES_AT_ONCE = 1 << 16
"""Of host memory, in a post that its caller starts."""


@dataclass(frozen=True, slots=True)
class QueuedPost:
    """A post that is not started yet."""

    post_id: int
    writes: Sequence[EngineWrite]
    notify: bytes | None

    @property
    def is_quick(self) -> bool:
        """Whether starting it takes no longer than handing it to another thread."""
        host_bytes = sum(w.nbytes for w in self.writes if w.src_device is None)
        return host_bytes <= _MOST_BYTES_AT_ONCE


@dataclass(frozen=True, slots=True)
class _StartedPost:
    queued: QueuedPost
    post: EnginePost


class OutgoingPeer:
    """Posts to one peer. Thread-safe; ``engine`` is attached already and belongs to this object."""

    def __init__(
        self,
        sock: ByteSocket,
        handle: PeerHandle,
        engine: WriteEngine,
        posts: PostTable,
        *,
        regions: dict[str, MemoryRegion],
        on_event: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.regions = regions
        """The peer's, by label."""
        self._sock = sock
        self._engine = engine
        self._engine_lock = threading.Lock()
        self._posts = posts
        self._on_event = on_event
        self._condition = threading.Condition()
        self._queue: deque[QueuedPost] = deque()
        self._started: list[_StartedPost] = []
        self._failed: list[QueuedPost] = []
        """That could not be started: several threads start posts, and each may find the end."""
        self._progress = 0  # counts posts that were started or completed
        self._is_closing = False
        self._is_over = False
        self._reason = ""
        name = f"kv-paired-{handle.peer}"
        self._driver = threading.Thread(target=self._drive, name=f"{name}-drive", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"{name}-control", daemon=True)
        self._reader.start()
        self._driver.start()

    @property
    def is_alive(self) -> bool:
        """Whether posts can still be started."""
        return not self._is_closing

    def post(self, post: QueuedPost) -> None:
        """Start or enqueue; on a dead connection the post is FAILED already when this returns."""
        if post.is_quick and not self._is_closing and self._start_now(post):
            return
        with self._condition:
            if not self._is_over:
                self._queue.append(post)
                self._condition.notify()
                return
        self._posts.settle(post.post_id, self._lost())

    def _start_now(self, post: QueuedPost) -> bool:
        """False: it has to be enqueued, to be started or failed with the others."""
        with self._engine_lock:
            if self._is_closing:
                return False
            try:
                self._start(post)
                if not self._settle_completed():
                    with self._condition:
                        self._condition.notify()
            except (EngineError, OSError) as error:
                self._begin_close(str(error))
        return True

    def register(self, region: MemoryRegion) -> None:
        """Let later posts read ``region``."""
        with self._engine_lock:
            if not self._is_over:
                self._engine.register(region)

    def deregister(self, region: MemoryRegion) -> None:
        """No later post reads ``region``."""
        with self._engine_lock:
            if not self._is_over:
                self._engine.deregister(region)

    def close(self) -> None:
        """Fail what is pending, destroy our end, join both threads. Idempotent; not from a
        listener.
        """
        self._begin_close("closed by us")
        self._driver.join()
        self._reader.join()

    def _begin_close(self, reason: str) -> None:
        with self._condition:
            if not self._is_closing:
                self._is_closing = True
                self._reason = reason
            self._condition.notify()

    # --- The drive thread.

    def _drive(self) -> None:
        pacer, progress = Pacer(), 0
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(
                        lambda: self._queue or self._started or self._is_closing
                    )
                    if self._is_closing:
                        break
                    queued = self._queue.popleft() if self._queue else None
                with self._engine_lock:
                    if queued is not None:
                        self._start(queued)
                    self._settle_completed()
                    if progress != self._progress:
                        progress = self._progress
                        pacer.progressed()
                if self._started and not self._queue:
                    pacer.pause()
        except (EngineError, OSError) as error:
            self._begin_close(str(error))
        except Exception as error:
            _log.exception("the connection to %s fails", self.handle.peer)
            self._begin_close(repr(error))
        self._end()

    def _start(self, queued: QueuedPost) -> None:
        try:
            post = self._engine.start(queued.writes)
        except BaseException:
            self._failed.append(queued)  # the drive thread fails it with the others
            raise
        self._started.append(_StartedPost(queued, post))
        self._progress += 1

    def _settle_completed(self) -> bool:
        completed = [started for started in self._started if self._engine.poll(started.post)]
        if not completed:
            return False
        for started in completed:
            self._started.remove(started)
            self._engine.release(started.post)
            self._posts.settle(started.queued.post_id, None)
            if started.queued.notify is not None:
                send_frame(self._sock, FrameKind.NOTIFY, started.queued.notify)
        self._progress += 1
        self._on_event()
        return True

    def _end(self) -> None:
        with self._engine_lock:
            self._engine.close()  # no quick post is started after, since the connection is closing
            pending = [started.queued for started in self._started] + self._failed
            self._started.clear()
            with self._condition:
                self._is_over = True
                pending += self._queue
                self._queue.clear()
        for post in pending:
            self._posts.settle(post.post_id, self._lost())
        self._on_event()
        with contextlib.suppress(OSError):  # the peer was first
            send_frame(self._sock, FrameKind.BYE)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"connection to {self.handle.peer} is lost: {self._reason}")

    # --- The control thread.

    def _read(self) -> None:
        try:
            while True:
                kind, payload = receive_frame(self._sock)
                if kind is FrameKind.FENCE:
                    self._begin_close("the peer has fenced us")
                elif kind is FrameKind.ERROR:
                    self._begin_close(payload.decode(errors="replace"))
        except OSError as error:
            self._begin_close(str(error))


def wait_for_post(engine: WriteEngine, post: EnginePost, timeout_s: float) -> None:
    """Poll one post until it is complete, as a warm-up does.

    Raises:
        EngineError: the library says so, or the time is over.
    """
    deadline = time.monotonic() + timeout_s
    while not engine.poll(post):
        if time.monotonic() > deadline:
            raise EngineError(f"the first write is not complete after {timeout_s:g} s")
        time.sleep(1e-4)
    engine.release(post)
