"""Flags that ranks raise for one another, on the host: who has come to a meeting, one by one.

A collective says when all have come. Beside it every rank sends a byte to every other, so that each
sees, on its own clock, for whom it waited. The bytes have sockets of their own: of the library's
receives only those from a named source notice that it died, and those cannot be watched together.

One thread uses them. A rank may be one meeting ahead of another, never two: bytes need no numbers,
but carry one, so that a mistake is seen.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import torch

from engine.parallel.groups import RankGroup
from runtime.errors import PeerLostError

TIMEOUT_S: Final = 60.0
_HELLO: Final = struct.Struct("!qI")
_FIELDS: Final = 18
"""Of what a rank tells of itself: how long its address is, a port, and 16 bytes of address."""


class RankFlags(Protocol):
    """One meeting at a time: `send`, then `receive`."""

    def send(self) -> None:
        """Tell all others that we have come."""
        ...

    def receive(self, arrived: Callable[[int], None]) -> None:
        """Return when all others have come; `arrived` is called with each as it is seen.

        Raises:
            PeerLostError: one is gone, or did not come in time.
        """
        ...

    def close(self) -> None:
        """Let the others go."""
        ...


class SocketFlags:
    """Over a connection to every other rank."""

    def __init__(
        self, sockets: Mapping[int, socket.socket], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Own `sockets`, which are connected, by rank."""
        self.sockets = dict(sockets)
        self._rank_of = {each.fileno(): rank for rank, each in sockets.items()}
        self._timeout_s = timeout_s
        self._number = 0

    def send(self) -> None:
        """See `RankFlags`."""
        self._number = (self._number + 1) % 256
        flag = bytes([self._number])
        for rank, each in self.sockets.items():
            try:
                each.sendall(flag)
            except OSError as error:
                raise _lost(rank, error.strerror or str(error)) from error

    def receive(self, arrived: Callable[[int], None]) -> None:
        """See `RankFlags`."""
        poll = select.poll()
        for descriptor in self._rank_of:
            poll.register(descriptor, select.POLLIN)
        missing = set(self.sockets)
        end = time.monotonic() + self._timeout_s
        while missing:
            ready = poll.poll(max(0.0, 1000.0 * (end - time.monotonic())))
            if not ready:
                text = f"another rank was lost: {sorted(missing)} did not come to a meeting in time"
                raise PeerLostError(text)
            for descriptor, _ in ready:
                rank = self._rank_of[descriptor]
                self._take(rank)
                poll.unregister(descriptor)
                missing.discard(rank)
                arrived(rank)

    def close(self) -> None:
        """See `RankFlags`."""
        for each in self.sockets.values():
            each.close()

    def _take(self, rank: int) -> None:
        try:
            flag = self.sockets[rank].recv(1)
        except OSError as error:
            raise _lost(rank, error.strerror or str(error)) from error
        if not flag:
            raise _lost(rank, "it closed its connection")
        if flag[0] != self._number:
            problem = f"rank {rank} is at meeting {flag[0]}, and we are at {self._number}"
            raise PeerLostError(f"{problem} (both modulo 256): they are out of step")


def open_rank_flags(
    group: RankGroup,
    epoch: int,
    rendezvous: str,
    *,
    timeout_s: float = TIMEOUT_S,
    through: Callable[[int, str, int], tuple[str, int]] = lambda rank, host, port: (host, port),
) -> SocketFlags:
    """Connect the ranks of a group to one another; all ranks call.

    Args:
        group: whose collectives work on host memory.
        epoch: of this life of the instance: who does not know it is none of its ranks.
        rendezvous: "host:port" where they met; they listen on the interface that leads there.
        timeout_s: for every connection and meeting.
        through: gives host and port by which a rank is reached, from where it listens.

    Raises:
        PeerLostError: one is not reached.
    """
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_listen(rendezvous, group.size))
        listener.settimeout(timeout_s)
        places = _tell_places(group, listener)
        sockets: dict[int, socket.socket] = {}
        undo.callback(_close_all, sockets)
        try:
            for rank in range(group.rank):
                reached = socket.create_connection(through(rank, *places[rank]), timeout_s)
                sockets[rank] = reached
                reached.sendall(_HELLO.pack(epoch, group.rank))
            while len(sockets) < group.size - 1:
                _accept(listener, epoch, sockets, group)
        except OSError as error:
            raise PeerLostError(
                f"another rank was lost as they connected for flags: {error}"
            ) from error
        for each in sockets.values():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(timeout_s)
        flags = SocketFlags(dict(sockets), timeout_s=timeout_s)
        sockets.clear()  # they are its own now
        return flags


def _lost(rank: int, why: str) -> PeerLostError:
    return PeerLostError(f"another rank was lost in a meeting: rank {rank}: {why}")


def _close_all(sockets: Mapping[int, socket.socket]) -> None:
    for each in sockets.values():
        each.close()


def _listen(rendezvous: str, size: int) -> socket.socket:
    host, _, port = rendezvous.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
    family, _, _, _, target = found[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # nothing is sent: it asks which interface leads there
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=family, backlog=size)


def _tell_places(group: RankGroup, listener: socket.socket) -> Sequence[tuple[str, int]]:
    """Return where each rank listens."""
    host, port = listener.getsockname()[:2]
    packed = socket.inet_pton(listener.family, host)
    row = torch.zeros(1, _FIELDS, dtype=torch.int64)
    row[0, 0], row[0, 1] = len(packed), port
    row[0, 2 : 2 + len(packed)] = torch.tensor(list(packed))
    places = []
    for length, its_port, *address in group.all_gather(row).tolist():
        family = socket.AF_INET if length == 4 else socket.AF_INET6
        places.append((socket.inet_ntop(family, bytes(address[:length])), its_port))
    return places


def _accept(
    listener: socket.socket, epoch: int, sockets: dict[int, socket.socket], group: RankGroup
) -> None:
    """Take the next connection, if it is of a rank that is awaited."""
    accepted, _ = listener.accept()
    accepted.settimeout(listener.gettimeout())
    hello = b""
    while len(hello) < _HELLO.size:
        part = accepted.recv(_HELLO.size - len(hello))
        if not part:
            break
        hello += part
    if len(hello) == _HELLO.size:
        its_epoch, rank = _HELLO.unpack(hello)
        if its_epoch == epoch and group.rank < rank < group.size and rank not in sockets:
            sockets[rank] = accepted
            return
    accepted.close()
