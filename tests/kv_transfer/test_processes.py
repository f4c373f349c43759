"""Hand-overs between real processes, some of which are killed or stopped in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.receiver import Arrival
from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import SendOutcome, SendReport
from runtime.errors import PeerLostError, TransferFailedError
from tests.kv_transfer.helpers import TIMEOUT_S, DecodeSide, Pool, PrefillSide, random_ids
from tests.kv_transfer.processes import (
    Child,
    DecodeOptions,
    digest,
    peer_of,
    reserve_at,
    run_decode,
    run_prefill,
)
from tests.waiting import wait_until

# One block of the real model: 61 layers of 64 tokens.
BIG = KVLayout(dtype=KVDtype.BFLOAT16, block_size=64, num_layers=61, head_width=576)
NUM_BLOCKS = 72
StartChild = Callable[..., Child]
MakePrefill = Callable[..., PrefillSide]


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    children: list[Child] = []

    def start(*args: object) -> Child:
        children.append(Child(*args))  # type: ignore[arg-type]
        return children[-1]

    yield start
    for child in children:
        child.end()


def big_pool() -> Pool:
    pool = Pool(NUM_BLOCKS, BIG)
    for block_id in range(NUM_BLOCKS):  # each block differs, without 320 MB of random numbers
        start = block_id * BIG.block_bytes
        pool.memory[start : start + BIG.block_bytes] = os.urandom(4096) * (BIG.block_bytes // 4096)
    return pool


def pid_of(child: Child) -> int:
    assert child.process.pid is not None
    return child.process.pid


@pytest.mark.slow
def test_prompts_of_4096_tokens_between_two_processes(
    start_child: StartChild, make_prefill: MakePrefill, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 blocks of 4.5 MB each. The bound is a smoke alarm, the printed figure is the fact."""
    decode = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS))
    prefill = make_prefill(pool=big_pool())
    peer = peer_of(decode)
    rates = []
    for nonce in range(1, 4):
        src, dst = (random_ids(64, NUM_BLOCKS, seed=nonce + s) for s in (0, 100))
        ticket = reserve_at(decode, f"r{nonce}", dst, nonce)
        start = time.monotonic()
        prefill.send(ticket, peer, src)
        report = prefill.report()
        rates.append(report.num_bytes / (time.monotonic() - start) / 1e9)
        assert report.outcome is SendOutcome.SENT
        arrival = decode.call("arrival")
        assert isinstance(arrival, Arrival)
        assert arrival.error is None
        if nonce in (1, 3):
            assert decode.call("digest", dst) == digest(prefill.pool, src)
    with capsys.disabled():
        print(f"\nloopback, GB/s per prompt: {', '.join(f'{rate:.2f}' for rate in rates)}")
    assert max(rates) > 0.05


def test_a_killed_receiver_fails_the_ticket_at_once(
    start_child: StartChild, make_prefill: MakePrefill
) -> None:
    decode = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS))
    prefill = make_prefill(pool=Pool(NUM_BLOCKS, BIG))
    peer = peer_of(decode)
    prefill.send(reserve_at(decode, "r", range(64), 1), peer, list(range(64)))
    idle = reserve_at(decode, "idle", [70], 2)
    prefill.sender.open(idle, peer)
    wait_until(lambda: prefill.sender.bytes_in_flight > 0)
    os.kill(pid_of(decode), signal.SIGKILL)
    killed_at = time.monotonic()
    reports = [prefill.report() for _ in range(2)]
    assert time.monotonic() - killed_at < TIMEOUT_S / 3  # a transfer may take TIMEOUT_S
    for report in reports:
        assert report.outcome is SendOutcome.FAILED
        assert isinstance(report.error, PeerLostError)
    assert prefill.sender.bytes_in_flight == 0


def test_a_stopped_receiver_costs_the_time_of_a_transfer_and_no_more(
    start_child: StartChild, make_prefill: MakePrefill
) -> None:
    """SIGSTOP: the sockets stay open and nothing moves, as with a hung host."""
    decode = start_child(run_decode, DecodeOptions(BIG, NUM_BLOCKS))
    prefill = make_prefill(pool=Pool(NUM_BLOCKS, BIG), options=LaneOptions(drain_timeout_s=0.3))
    peer = peer_of(decode)
    prefill.send(reserve_at(decode, "connects", [70], 2), peer, [70])
    assert prefill.report().outcome is SendOutcome.SENT
    ticket = replace(reserve_at(decode, "r", range(64), 1), timeout_s=0.5)
    os.kill(pid_of(decode), signal.SIGSTOP)
    prefill.sender.open(ticket, peer)
    prefill.sender.push(ticket.nonce, list(range(64)), 0)
    start = time.monotonic()
    report = prefill.report()
    assert time.monotonic() - start < TIMEOUT_S / 3
    assert isinstance(report.error, TransferFailedError | PeerLostError)
    assert report.outcome is SendOutcome.FAILED


def test_a_killed_sender_leaves_the_receiver_whole(start_child: StartChild) -> None:
    decode = DecodeSide(num_blocks=NUM_BLOCKS, layout=BIG)
    try:
        first = start_child(run_prefill, BIG, NUM_BLOCKS)
        ticket = decode.reserve("r", range(1, 65))
        writer = first.call("send", ticket, decode.peer(), list(range(64)))
        wait_until(lambda: any(decode.pool.block(3)[:1]))
        os.kill(pid_of(first), signal.SIGKILL)
        assert isinstance(writer, str)
        start = time.monotonic()
        decode.transport.fence(writer)
        assert time.monotonic() - start < TIMEOUT_S / 3
        landed = digest(decode.pool, range(NUM_BLOCKS))
        decode.receiver.forget("r")
        decode.slots.free(ticket.slot)

        second = start_child(run_prefill, BIG, NUM_BLOCKS)
        again = decode.reserve("again", [70, 71], nonce=9)
        second.call("send", again, decode.peer(), [0, 1])
        assert decode.arrival().request_id == "again"
        report = second.call("report")
        assert isinstance(report, SendReport)
        assert report.outcome is SendOutcome.SENT
        assert digest(decode.pool, range(70)) == landed[:70]
    finally:
        decode.close()
