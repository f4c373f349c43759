"""Ranks see who comes to a meeting, one by one, and notice who never will."""

import socket
import threading
from collections.abc import Callable

import pytest

from engine.parallel.rank_flags import SocketFlags, open_rank_flags
from runtime.errors import PeerLostError
from tests.engine.parallel.processes import free_ports
from tests.engine.parallel.thread_ranks import Meetings, run_ranks, thread_groups


def with_flags(num_ranks: int, body: Callable[[int, SocketFlags], object]) -> list[object]:
    port = free_ports(1)

    def run(rank: int, meetings: Meetings) -> object:
        group = thread_groups(rank, meetings).ep_group
        flags = open_rank_flags(group, 99, f"127.0.0.1:{port}", timeout_s=20.0)
        try:
            return body(rank, flags)
        finally:
            flags.close()

    return run_ranks(num_ranks, run)


def test_flags_are_seen_in_the_order_in_which_they_come() -> None:
    may_send = [threading.Event() for _ in range(4)]
    may_send[3].set()  # then 2, 1: each when rank 0 has seen the one before
    seen: list[int] = []

    def body(rank: int, flags: SocketFlags) -> None:
        def arrived(source: int) -> None:
            if rank == 0:
                seen.append(source)
                may_send[source - 1].set()

        if rank == 0:
            flags.send()
        else:
            may_send[rank].wait(20.0)
            flags.send()
        flags.receive(arrived)

    with_flags(4, body)
    assert seen == [3, 2, 1]


def test_ranks_meet_many_times_and_one_may_be_a_meeting_ahead() -> None:
    def body(rank: int, flags: SocketFlags) -> int:
        count = 0
        for _ in range(600):  # numbers of meetings go round
            arrived: list[int] = []
            flags.send()
            flags.receive(arrived.append)
            count += sorted(arrived) == [other for other in range(3) if other != rank]
        return count

    assert with_flags(3, body) == [600] * 3


def test_a_rank_that_is_gone_is_noticed_at_once() -> None:
    def body(rank: int, flags: SocketFlags) -> str:
        if rank == 2:
            return ""
        flags.send()
        with pytest.raises(PeerLostError, match="lost in a meeting: rank 2") as caught:
            flags.receive(lambda source: None)
        return str(caught.value)

    assert all(with_flags(3, body)[:2])


def test_a_rank_that_never_comes_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    flags = SocketFlags({1: ours}, timeout_s=0.05)
    flags.send()
    with pytest.raises(PeerLostError, match=r"\[1\] did not come"):
        flags.receive(lambda source: None)
    flags.close()
    theirs.close()


def test_ranks_that_are_out_of_step_are_told_so() -> None:
    ours, theirs = socket.socketpair()
    flags = SocketFlags({1: ours}, timeout_s=5.0)
    flags.send()
    theirs.sendall(bytes([7]))
    with pytest.raises(PeerLostError, match="out of step"):
        flags.receive(lambda source: None)
    flags.close()
    theirs.close()


def test_a_stranger_does_not_take_the_place_of_a_rank() -> None:
    port = free_ports(1)
    knocking: list[socket.socket] = []

    def run(rank: int, meetings: Meetings) -> int:
        group = thread_groups(rank, meetings).ep_group

        def through(peer: int, host: str, at: int) -> tuple[str, int]:
            stranger = socket.create_connection((host, at))
            stranger.sendall(b"\0" * 12)
            knocking.append(stranger)
            return host, at

        flags = open_rank_flags(group, 99, f"127.0.0.1:{port}", timeout_s=20.0, through=through)
        arrived: list[int] = []
        flags.send()
        flags.receive(arrived.append)
        flags.close()
        return arrived[0]

    assert run_ranks(2, run) == [1, 0]
    for stranger in knocking:
        stranger.close()
