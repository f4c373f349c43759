"""How a connection between transports begins: a hello and its reply. Little-endian, fixed structs,
no pickle; every length is bounded.

    client -> server   hello: magic, version, fence generation, token[32], sender's name, expected
                       receiver's name
    server -> client   hello reply: status, message
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

_MAGIC = b"TDKV"
_VERSION = 1
_HELLO = struct.Struct("<4sHQ32sHH")
_REPLY = struct.Struct("<BH")
_MAX_NAME_BYTES = 1024


class WireError(ConnectionError):
    """The peer closed the connection, or sent what is not our protocol."""


class Status(enum.IntEnum):
    """The answer to a hello or a post."""

    OK = 0
    STALE = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects, whom it means to reach, and its proof that it was told how."""

    generation: int
    token: bytes
    sender: str
    receiver: str


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill ``view``.

    Raises:
        WireError: the connection ended before.
    """
    got = 0
    while got < len(view):
        num = sock.recv_into(view[got:], 0, socket.MSG_WAITALL)
        if num == 0:
            raise WireError("connection closed")
        got += num


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """The next ``nbytes``."""
    data = bytearray(nbytes)
    receive_into(sock, memoryview(data))
    return bytes(data)


def send_hello(sock: socket.socket, hello: Hello) -> None:
    """Introduce ourselves."""
    sender, receiver = hello.sender.encode(), hello.receiver.encode()
    head = _HELLO.pack(_MAGIC, _VERSION, hello.generation, hello.token, len(sender), len(receiver))
    sock.sendall(head + sender + receiver)


def receive_hello(sock: socket.socket) -> Hello:
    """The introduction of whoever connected."""
    magic, version, generation, token, sender_bytes, receiver_bytes = _HELLO.unpack(
        receive(sock, _HELLO.size)
    )
    if magic != _MAGIC or version != _VERSION:
        raise WireError(f"not a KV transfer peer of version {_VERSION}")
    if max(sender_bytes, receiver_bytes) > _MAX_NAME_BYTES:
        raise WireError("a name that is too long")
    sender = receive(sock, sender_bytes).decode(errors="replace")
    return Hello(generation, token, sender, receive(sock, receiver_bytes).decode(errors="replace"))


def send_reply(sock: socket.socket, status: Status, message: str = "") -> None:
    """Answer a hello."""
    text = message.encode()
    sock.sendall(_REPLY.pack(status, len(text)) + text)


def receive_reply(sock: socket.socket) -> tuple[Status, str]:
    """The answer to our hello."""
    status, nbytes = _REPLY.unpack(receive(sock, _REPLY.size))
    return Status(status), receive(sock, nbytes).decode()
