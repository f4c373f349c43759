"""A cable of bad quality between two interfaces: frames are late, or lost, or few.

``python -m tests.hosts.cable ONE OTHER --delay S --loss SHARE`` carries frames both ways until it
is killed. What ``tc netem`` does, for kernels that have none.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import select
import socket
import time
from dataclasses import dataclass, field

_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_PACKET_OUTGOING = 4
_MAX_FRAME = 2**17


@dataclass(slots=True)
class Wire:
    """One direction."""

    delay_s: float
    loss: float
    rate: float
    """Bytes a second; 0: any."""
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    _frames: collections.deque[tuple[float, bytes]] = field(default_factory=collections.deque)
    _free_at: float = 0.0

    def put(self, frame: bytes, now: float) -> None:
        """A frame enters."""
        if self.draw.random() < self.loss:
            return
        self._free_at = max(self._free_at, now) + (len(frame) / self.rate if self.rate else 0.0)
        self._frames.append((self._free_at + self.delay_s, frame))

    def take(self, now: float) -> list[bytes]:
        """The frames that leave."""
        taken = []
        while self._frames and self._frames[0][0] <= now:
            taken.append(self._frames.popleft()[1])
        return taken

    @property
    def next_at(self) -> float:
        """When the next one leaves."""
        return self._frames[0][0] if self._frames else float("inf")


def _open(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    # Large frames that no card has cut yet, and sums that none has computed, pass as they are.
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**24)
    end.bind((interface, 0))
    end.setblocking(False)
    return end


def carry(one: socket.socket, other: socket.socket, wires: tuple[Wire, Wire]) -> None:
    """Carry frames for ever."""
    ways = {one: (wires[0], other), other: (wires[1], one)}
    while True:
        now = time.monotonic()
        for wire, target in ways.values():
            for frame in wire.take(now):
                with contextlib.suppress(OSError):  # full, or down: lost as on any cable
                    target.send(frame)
        wait_s = min(0.5, max(0.0, min(wire.next_at for wire in wires) - time.monotonic()))
        for source in select.select([one, other], [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError, OSError):
                while True:
                    frame, address = source.recvfrom(_MAX_FRAME)
                    if address[2] != _PACKET_OUTGOING:
                        ways[source][0].put(frame, time.monotonic())


def main() -> None:
    """Read the command line and carry."""
    parser = argparse.ArgumentParser()
    parser.add_argument("interfaces", nargs=2)
    for name in ("--delay", "--loss", "--rate"):
        parser.add_argument(name, type=float, default=0.0)
    given = parser.parse_args()
    wires = tuple(Wire(given.delay, given.loss, given.rate) for _ in range(2))
    carry(_open(given.interfaces[0]), _open(given.interfaces[1]), (wires[0], wires[1]))


if __name__ == "__main__":
    main()
