"""The bytes on a loopback connection. Little-endian, fixed structs, no pickle; every length is
bounded.

    client -> server   hello (``transports.hello``), then posts
    server -> client   hello reply, then one ack a post

    post     id, number of writes, bytes of the notification, then the write table, the
    notification, the payload
             (the writes' bytes one after the other, read straight into the registered memory)
    ack      id, status, message; sent when the payload is in memory and the notification is queued
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.transports.hello import (
    MAX_MESSAGE_BYTES,
    Status,
    WireError,
    receive,
    receive_message,
)
from kv_transfer.transports.sockets import ByteSocket

_POST = struct.Struct("<QII")
_WRITE = struct.Struct("<16sQQ")
_ACK = struct.Struct("<QBH")
_IOV_MAX = 1024
MAX_WRITES = 1 << 14
MAX_NOTIFY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """Where the next ``nbytes`` of the payload go: the region's key and the offset in it."""

    key: bytes
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PostHeader:
    """One post, before its payload."""

    post_id: int
    writes: Sequence[WriteHeader]
    notify: bytes | None


def send_buffers(sock: ByteSocket, buffers: Sequence[memoryview | bytes]) -> None:
    """Send all ``buffers`` in order, without copying them in Python."""
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    index = 0
    while index < len(views):
        sent = sock.sendmsg(views[index : index + _IOV_MAX])
        while index < len(views) and sent >= len(views[index]):
            sent -= len(views[index])
            index += 1
        if sent:
            views[index] = views[index][sent:]


def check_post(num_writes: int, notify: bytes | None) -> None:
    """Refuse here what the peer would end the connection for.

    Raises:
        ValueError: too many writes, or too long a notification.
    """
    if num_writes > MAX_WRITES:
        raise ValueError(f"a post of {num_writes} writes: at most {MAX_WRITES}")
    if notify is not None and len(notify) >= MAX_NOTIFY_BYTES:
        raise ValueError(f"a notification of {len(notify)} bytes: less than {MAX_NOTIFY_BYTES}")


def encode_post(post: PostHeader) -> bytes:
    """All of a post but its payload."""
    notify_bytes = 0 if post.notify is None else len(post.notify) + 1
    table = b"".join(_WRITE.pack(w.key, w.offset, w.nbytes) for w in post.writes)
    head = _POST.pack(post.post_id, len(post.writes), notify_bytes)
    return head + table + (b"" if post.notify is None else b"\1" + post.notify)


def receive_post(sock: ByteSocket) -> PostHeader:
    """The next post; its payload is left in the socket."""
    post_id, num_writes, notify_bytes = _POST.unpack(receive(sock, _POST.size))
    if num_writes > MAX_WRITES or notify_bytes > MAX_NOTIFY_BYTES:
        raise WireError(f"post of {num_writes} writes and {notify_bytes} bytes of notification")
    table = receive(sock, num_writes * _WRITE.size)
    notify = receive(sock, notify_bytes)[1:] if notify_bytes else None
    writes = [WriteHeader(*fields) for fields in _WRITE.iter_unpack(table)]
    return PostHeader(post_id, writes, notify)


def send_ack(sock: ByteSocket, post_id: int, status: Status, message: str = "") -> None:
    """Answer a post."""
    text = message.encode()[:MAX_MESSAGE_BYTES]
    sock.sendall(_ACK.pack(post_id, status, len(text)) + text)


def receive_ack(sock: ByteSocket) -> tuple[int, Status, str]:
    """The next answer: post id, status, message."""
    post_id, status, nbytes = _ACK.unpack(receive(sock, _ACK.size))
    return post_id, Status(status), receive_message(sock, nbytes)
