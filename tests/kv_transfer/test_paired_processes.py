"""Hand-overs over real libraries between processes, some of which are killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.receiver import Arrival
from kv_transfer.ticket import SendOutcome
from kv_transfer.transports import TransportOptions
from runtime.errors import PeerLostError, TransferFailedError
from tests.kv_transfer.helpers import DecodeSide, Pool, PrefillSide, random_ids
from tests.kv_transfer.libraries import library
from tests.kv_transfer.processes import (
    Child,
    DecodeOptions,
    digest,
    peer_of,
    reserve_at,
    run_decode,
    run_prefill,
)
from tests.kv_transfer.test_processes import BIG, NUM_BLOCKS, big_pool, pid_of, start_child
from tests.waiting import wait_until

__all__ = ["library", "start_child"]

StartChild = Callable[..., Child]
PATTERN = 0xEE


@pytest.fixture
def decode_here(library: str, _no_thread_left: None) -> Iterator[DecodeSide]:
    side = DecodeSide(
        num_blocks=NUM_BLOCKS,
        layout=BIG,
        transport=library,
        options=TransportOptions(fence_timeout_s=2.5),
    )
    side.pool.memory[:] = bytes(len(side.pool.memory))  # touch the pages now
    yield side
    side.close()


@pytest.mark.slow
def test_random_blocks_between_two_processes(library: str, start_child: StartChild) -> None:
    decode = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS, transport=library))
    prefill = PrefillSide(pool=big_pool(), transport=library)
    try:
        peer = peer_of(decode)
        for nonce in (1, 2):
            src, dst = (random_ids(64, NUM_BLOCKS, seed=nonce + s) for s in (0, 100))
            prefill.send(reserve_at(decode, f"r{nonce}", dst, nonce), peer, src)
            report = prefill.report()
            assert report.outcome is SendOutcome.SENT, report.error
            arrival = decode.call("arrival")
            assert isinstance(arrival, Arrival)
            assert arrival.error is None
            assert decode.call("digest", dst) == digest(prefill.pool, src)
    finally:
        prefill.close()


def test_a_killed_receiver_fails_the_tickets_and_its_next_life_is_served(
    library: str, start_child: StartChild
) -> None:
    first = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS, transport=library))
    prefill = PrefillSide(pool=Pool(NUM_BLOCKS, BIG), transport=library)
    try:
        peer = peer_of(first)
        prefill.send(reserve_at(first, "warm", [70], 3), peer, [70])
        assert prefill.report().outcome is SendOutcome.SENT
        idle = reserve_at(first, "idle", [71], 2)
        prefill.sender.open(idle, peer)
        os.kill(pid_of(first), signal.SIGKILL)
        report = prefill.report()
        assert report.outcome is SendOutcome.FAILED
        assert isinstance(report.error, PeerLostError)

        second = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS, 0xD2, transport=library))
        again = reserve_at(second, "again", [1, 2], 4)
        prefill.send(again, peer_of(second), [3, 4])
        report = prefill.report()
        assert report.outcome is SendOutcome.SENT, report.error
    finally:
        prefill.close()


def test_nothing_lands_after_the_fence_of_a_killed_sender(
    library: str, start_child: StartChild, decode_here: DecodeSide
) -> None:
    child = start_child(run_prefill, BIG, NUM_BLOCKS, library)
    ticket = decode_here.reserve("r", range(1, 65))
    writer = child.call("send", ticket, decode_here.peer(), list(range(64)))
    assert isinstance(writer, str)
    wait_until(lambda: any(decode_here.pool.block(3)[:1]))
    os.kill(pid_of(child), signal.SIGKILL)
    decode_here.transport.fence(writer)
    assert_nothing_lands(decode_here)


def test_a_write_that_a_stopped_sender_delays_never_lands_after_its_fence(
    library: str, start_child: StartChild, decode_here: DecodeSide
) -> None:
    """SIGSTOP in the middle of a prompt, fence, SIGCONT: the rest must not arrive.

    Where memory of the host is written directly, the fence cannot hold against a process that is
    alive and silent: it says so, the blocks stay in quarantine, and it holds once the writer wakes.
    """
    child = start_child(run_prefill, BIG, NUM_BLOCKS, library)
    ticket = decode_here.reserve("r", range(1, 65))
    writer = child.call("send", ticket, decode_here.peer(), list(range(64)))
    assert isinstance(writer, str)
    wait_until(lambda: any(decode_here.pool.block(3)[:1]))
    os.kill(pid_of(child), signal.SIGSTOP)
    if library == "nixl":
        with pytest.raises(TransferFailedError, match="does not confirm its fence"):
            decode_here.transport.fence(writer)
        os.kill(pid_of(child), signal.SIGCONT)
        wait_until(lambda: fence_holds(decode_here, writer))
    else:
        decode_here.transport.fence(writer)
        decode_here.pool.memory[:] = bytes([PATTERN]) * len(decode_here.pool.memory)
        os.kill(pid_of(child), signal.SIGCONT)
    assert_nothing_lands(decode_here)


def fence_holds(decode: DecodeSide, writer: str) -> bool:
    try:
        decode.transport.fence(writer)
    except TransferFailedError:
        return False
    return True


def assert_nothing_lands(decode: DecodeSide) -> None:
    decode.pool.memory[:] = bytes([PATTERN]) * len(decode.pool.memory)
    time.sleep(0.5)
    for block_id in range(NUM_BLOCKS):
        assert decode.pool.block(block_id).count(PATTERN) == BIG.block_bytes
