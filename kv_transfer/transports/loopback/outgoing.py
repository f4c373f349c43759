"""A connection that we opened: one thread sends posts, one reads their acks.

The end of a connection has one owner, the ack thread. Whoever notices trouble shuts the socket
down; that ends both threads' calls; the ack thread then joins the send thread and fails what is
pending. So a FAILED post is never still being read from the source memory.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.transport import PeerHandle
from kv_transfer.transports.hello import Status
from kv_transfer.transports.loopback.endpoint import RemoteRegion
from kv_transfer.transports.loopback.wire import PostHeader, encode_post, receive_ack, send_buffers
from kv_transfer.transports.post_table import PostTable
from kv_transfer.transports.sockets import ByteSocket
from runtime.errors import PeerLostError, TransferFailedError


@dataclass(frozen=True, slots=True)
class OutgoingPost:
    """A post with the memory that it sends."""

    header: PostHeader
    payload: list[memoryview]


class OutgoingConnection:
    """Posts to one peer over one socket, acknowledged in order. Thread-safe."""

    def __init__(
        self,
        sock: ByteSocket,
        handle: PeerHandle,
        posts: PostTable,
        *,
        regions: dict[str, RemoteRegion],
        on_event: Callable[[], None],
    ) -> None:
        self.handle = handle
        self.regions = regions
        """The peer's, by label."""
        self._sock = sock
        self._posts = posts
        self._on_event = on_event
        self._condition = threading.Condition()
        self._queue: deque[OutgoingPost] = deque()
        self._pending: set[int] = set()
        self._is_closing = False
        self._is_over = False
        self._reason = "closed by the peer"
        name = f"kv-loopback-{handle.peer}"
        self._sender = threading.Thread(target=self._send_posts, name=f"{name}-send", daemon=True)
        self._reader = threading.Thread(target=self._read_acks, name=f"{name}-acks", daemon=True)
        self._sender.start()
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether posts can still be sent."""
        return not self._is_closing

    def post(self, post: OutgoingPost) -> None:
        """Enqueue; on a dead connection the post FAILED already when this returns."""
        with self._condition:
            if not self._is_over:
                # While the connection is closing, the ack thread will fail it with the rest.
                self._pending.add(post.header.post_id)
                self._queue.append(post)
                self._condition.notify()
                return
        self._posts.settle(post.header.post_id, self._lost())

    def close(self) -> None:
        """Fail what is pending and join both threads. Idempotent; not from a listener."""
        self._shut_down("closed by us")
        self._reader.join()

    def _shut_down(self, reason: str) -> None:
        with self._condition:
            if self._is_closing:
                return
            self._is_closing = True
            self._reason = reason
            self._condition.notify()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the peer was first

    def _send_posts(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._queue or self._is_closing)
                    if self._is_closing:
                        return
                    post = self._queue.popleft()
                send_buffers(self._sock, [encode_post(post.header), *post.payload])
        except OSError as error:
            self._shut_down(str(error))

    def _read_acks(self) -> None:
        try:
            while True:
                post_id, status, message = receive_ack(self._sock)
                with self._condition:
                    self._pending.discard(post_id)
                refused = status is not Status.OK
                text = f"{self.handle.peer} refused a write: {message}"
                self._posts.settle(post_id, TransferFailedError(text) if refused else None)
                self._on_event()
        except (OSError, ValueError) as error:
            self._shut_down(str(error))
        self._sender.join()
        self._sock.close()
        with self._condition:
            self._is_over = True
            pending, self._pending = self._pending, set()
            self._queue.clear()
        for post_id in pending:
            self._posts.settle(post_id, self._lost())
        self._on_event()

    def _lost(self) -> PeerLostError:
        return PeerLostError(f"connection to {self.handle.peer} is lost: {self._reason}")
