"""How a connection between transports begins: a hello and its reply. Little-endian, fixed structs,
no pickle; every length is bounded.

    client -> server   hello: magic, wire number, fence generation, token[32], sender's name,
                       expected receiver's name
    server -> client   hello reply: status, message
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
from dataclasses import dataclass

from kv_transfer.transports.sockets import ByteSocket
from runtime.pb import common_pb2
from runtime.rpc.wire import why_refused
from runtime.version import WIRE

_MAGIC = b"TDKV"
_HELLO = struct.Struct("<4sHQ32sHH")
_REPLY = struct.Struct("<BH")
MAX_NAME_BYTES = 512
MAX_MESSAGE_BYTES = 1 << 12


class WireError(ConnectionError):
    """The peer closed the connection, or sent what is not our protocol."""


class OtherWireError(WireError):
    """The peer speaks another wire number, which the message names."""


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


def receive_into(sock: ByteSocket, view: memoryview) -> None:
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


def receive(sock: ByteSocket, nbytes: int) -> bytes:
    """The next ``nbytes``."""
    data = bytearray(nbytes)
    receive_into(sock, memoryview(data))
    return bytes(data)


def send_hello(sock: ByteSocket, hello: Hello) -> None:
    """Introduce ourselves."""
    sender, receiver = hello.sender.encode(), hello.receiver.encode()
    head = _HELLO.pack(_MAGIC, WIRE, hello.generation, hello.token, len(sender), len(receiver))
    sock.sendall(head + sender + receiver)


class HelloReader:
    """The introduction of whoever connected, from a socket that does not block; takes no byte of
    what follows it.
    """

    def __init__(self) -> None:
        self._data = bytearray()

    def read(self, sock: socket.socket) -> Hello:
        """Call it again whenever there is something to read.

        Raises:
            BlockingIOError: more has to come.
            OtherWireError: the peer is to be told so.
            WireError: it is no hello, or the connection ended before.
        """
        while num_missing := self._size(sock) - len(self._data):
            piece = sock.recv(num_missing)
            if not piece:
                raise WireError("connection closed")
            self._data += piece
            if not _MAGIC.startswith(self._data[: len(_MAGIC)]):
                raise WireError("not a KV transfer peer")
        _, _, generation, token, sender_bytes, _ = _HELLO.unpack_from(self._data)
        names = self._data[_HELLO.size :]
        sender, receiver = names[:sender_bytes], names[sender_bytes:]
        return Hello(
            generation, token, sender.decode(errors="replace"), receiver.decode(errors="replace")
        )

    def _size(self, sock: socket.socket) -> int:
        """Of the whole hello, as far as is known."""
        if len(self._data) < _HELLO.size:
            return _HELLO.size
        _, wire, _, _, sender_bytes, receiver_bytes = _HELLO.unpack_from(self._data)
        if reason := why_refused("a KV transfer peer", common_pb2.Wire(number=wire)):
            # What stays unread would have the kernel drop our answer with the connection.
            with contextlib.suppress(OSError):
                sock.recv(MAX_MESSAGE_BYTES)
            raise OtherWireError(reason)
        if max(sender_bytes, receiver_bytes) > MAX_NAME_BYTES:
            raise WireError("a name that is too long")
        return int(_HELLO.size + sender_bytes + receiver_bytes)


def send_reply(sock: ByteSocket, status: Status, message: str = "") -> None:
    """Answer a hello."""
    text = message.encode()[:MAX_MESSAGE_BYTES]
    sock.sendall(_REPLY.pack(status, len(text)) + text)


def receive_reply(sock: ByteSocket) -> tuple[Status, str]:
    """The answer to our hello."""
    status, nbytes = _REPLY.unpack(receive(sock, _REPLY.size))
    return Status(status), receive_message(sock, nbytes)


def receive_message(sock: ByteSocket, nbytes: int) -> str:
    """A text of ``nbytes``.

    Raises:
        WireError: it is too long, or the connection ended before.
    """
    if nbytes > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {nbytes} bytes")
    return receive(sock, nbytes).decode(errors="replace")
