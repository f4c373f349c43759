"""What a worker and the processes of its guard say by their sockets: JSON, and bytes behind it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

_LENGTHS: Final = struct.Struct("<II")


def send(end: socket.socket, content: Mapping[str, Any], raw: bytes = b"") -> None:
    """Send a message: what JSON has, and bytes."""
    text = json.dumps(content).encode()
    end.sendall(b"".join((_LENGTHS.pack(len(text), len(raw)), text, raw)))


class Messages:
    """What comes by a socket, message by message."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._read = bytearray()

    def next(self) -> tuple[dict[str, Any], bytes]:
        """Wait for a message for as long as the socket's timeout; what came of it is kept.

        Raises:
            EOFError: the other end is closed.
            TimeoutError, BlockingIOError: it is not there.
        """
        while (end := self._ends_at()) is None:
            try:
                piece = self._end.recv(1 << 18)
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError
            self._read += piece
        num_text, num_raw = _LENGTHS.unpack_from(self._read)
        content = bytes(self._read[_LENGTHS.size : end])
        del self._read[:end]
        assert len(content) == num_text + num_raw
        return json.loads(content[:num_text]), content[num_text:]

    def _ends_at(self) -> int | None:
        if len(self._read) < _LENGTHS.size:
            return None
        end = _LENGTHS.size + sum(_LENGTHS.unpack_from(self._read))
        return end if len(self._read) >= end else None
