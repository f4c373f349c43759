"""One end of a connection that carries calls: `call_stream` has one, `call_server` the other. TLS,
where there is some, is beneath it.

    caller -> worker   greeting; once it was accepted, messages: a ``CallBatch`` each
    worker -> caller   messages: an ``AnswerBatch`` each, the first one accepts or refuses
    both               a ping every few seconds, a message of no bytes: a peer of which nothing
                       comes for several of them is lost, even where no packet says so

A message is its length and its bytes; every length is bounded. The greeting is a message, too: what
it is, the caller's wire number and the cluster's secret. Until it was accepted nothing else is
read, and nothing longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol, cast

from runtime.net.sockets import tune
from runtime.version import WIRE

MAX_GREETING_BYTES = 8 * 2**10
PING_S = 5.0
MAX_SILENT_PINGS = 2
"""So many of our own in a row may go out with nothing coming in."""

_LENGTH_BYTES = 4
_PING = bytes(_LENGTH_BYTES)
_MAGIC = b"tandem wire "


def greeting(secret: str) -> bytes:
    """The first message of who calls."""
    return b"%s%d\n%s" % (_MAGIC, WIRE, secret.encode())


def read_greeting(message: bytes) -> tuple[int, bytes] | None:
    """The wire number and the secret that a greeting shows; None: it is none."""
    number, newline, secret = message.removeprefix(_MAGIC).partition(b"\n")
    is_greeting = message.startswith(_MAGIC) and newline and number.isdigit()
    return (int(number), secret) if is_greeting and len(number) < 10 else None


class ConnectionOwner(Protocol):
    """Whom a connection serves; called on its event loop."""

    def opened(self, connection: CallConnection) -> None:
        """It stands; called once, first."""

    def take(self, message: bytes) -> None:
        """The next one of the peer."""

    def writable(self) -> None:
        """The connection takes messages, after a time in which it did not."""

    def lost(self, reason: str) -> None:
        """It is over; called once, last."""


class CallConnection(asyncio.Protocol):
    """Messages of bytes, both ways."""

    def __init__(self, owner: ConnectionOwner, max_bytes: int) -> None:
        """``max_bytes``: of a message of the peer; a longer one ends the connection."""
        self.is_writable = False
        """Whether the peer keeps up; what is sent all the same is kept in memory."""
        self._owner = owner
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self._num_silent = 0
        self._partial = bytearray()
        """The beginning of a message."""
        self._num_needed = _LENGTH_BYTES
        """Bytes of it from which on there is something to be made of them."""
        self._reason = ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The peer's, as ``SSLSocket.getpeercert`` tells it; None without one."""
        return None if self._transport is None else self._transport.get_extra_info("peercert")

    def send(self, message: bytes) -> None:
        """Write ``message`` as soon as the peer takes it; nowhere, once it is over."""
        if self._transport is not None and not self._reason:
            self._transport.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def hand_over(self, owner: ConnectionOwner, max_bytes: int) -> None:
        """It is ``owner``'s from now on, whose messages may have ``max_bytes``."""
        self._owner = owner
        self._max_bytes = max_bytes

    def pause_reading(self) -> None:
        """Leave in the socket what comes, until ``resume_reading``."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_reading():
            self._transport.resume_reading()

    def end(self, reason: str) -> None:
        """Close it behind what was sent; nothing more is read."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close it at once."""
        self._reason = self._reason or reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP stands, and TLS."""
        tune(transport.get_extra_info("socket"))
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio
        self.is_writable = True
        self._ping_later()
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        """Cut what came into messages."""
        self._num_silent = 0
        if self._partial:
            self._partial += data
            if len(self._partial) < self._num_needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, self._num_needed = 0, _LENGTH_BYTES
        while not self._reason:
            begin = at + _LENGTH_BYTES
            if len(data) < begin:
                break
            length = int.from_bytes(data[at:begin], "little")
            if length > self._max_bytes:
                self.abort(f"a message of {length} bytes is longer than {self._max_bytes}")
                return
            if len(data) < begin + length:
                self._num_needed = _LENGTH_BYTES + length
                break
            at = begin + length
            if length:
                self._owner.take(data[begin:at])
        self._partial += data[at:]

    def pause_writing(self) -> None:
        """The peer does not keep up."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """It does again."""
        self.is_writable = True
        self._owner.writable()

    def connection_lost(self, error: Exception | None) -> None:
        """The end, whoever made it."""
        self.is_writable = False
        self._transport = None
        if self._pinging is not None:
            self._pinging.cancel()
        self._owner.lost(self._reason or (str(error) if error else "the peer closed it"))

    def _ping_later(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _ping(self) -> None:
        # Counted, not timed: a loop that stood still for long has not read what came meanwhile.
        if self._num_silent >= MAX_SILENT_PINGS:
            self.abort(f"nothing came from the peer for {self._num_silent * PING_S:.0f} s")
            return
        self._num_silent += 1
        if self._transport is not None:
            self._transport.write(_PING)
        self._ping_later()
