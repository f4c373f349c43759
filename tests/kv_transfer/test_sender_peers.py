"""Several peers of one lane: what one does not take holds up none of the others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import SendOutcome
from kv_transfer.transport import PeerHandle, Transport
from kv_transfer.transports.faulty import FaultyTransport, PlannedPost
from runtime.errors import PeerLostError, TransferFailedError
from runtime.faults import Fault, FaultKind
from tests.kv_transfer.helpers import LAYOUT, DecodeSide, Pool, PrefillSide
from tests.kv_transfer.processes import Child, DecodeOptions, peer_of, reserve_at, run_decode
from tests.waiting import wait_until

MakePrefill = Callable[..., PrefillSide]
STUCK_EPOCH = 0xD2
BIG = replace(LAYOUT, block_size=4096)  # 768 KiB a block


@pytest.fixture
def stuck(_no_thread_left: None) -> Iterator[DecodeSide]:
    """A decode rank that never gets what is sent to it."""
    side = DecodeSide(epoch=STUCK_EPOCH)
    yield side
    side.close()


def drops_for(stuck: DecodeSide) -> Callable[[Transport], Transport]:
    def choose(post: PlannedPost) -> Fault | None:
        return Fault(FaultKind.DROP) if post.peer == stuck.name else None

    return lambda inner: FaultyTransport(inner, choose)


def test_a_peer_that_takes_nothing_leaves_the_others_their_bytes_in_flight(
    decode: DecodeSide, stuck: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill(
        wrap=drops_for(stuck),
        num_threads=1,
        options=LaneOptions(max_bytes_in_flight=2 * LAYOUT.block_bytes, drain_timeout_s=0.1),
    )
    waiting = stuck.reserve("stuck", range(8), nonce=99)
    prefill.send(waiting, stuck.peer(), list(range(0, 16, 2)))
    wait_until(lambda: prefill.sender.bytes_in_flight == 2 * LAYOUT.block_bytes)
    for nonce in range(1, 6):
        prefill.send(decode.reserve(f"r{nonce}", [nonce], nonce=nonce), decode.peer(), [nonce])
        report = prefill.report()
        assert (report.nonce, report.outcome) == (nonce, SendOutcome.SENT)
    assert prefill.sender.num_open == 1
    prefill.sender.close()  # after the drain time it is cut off
    assert prefill.report().nonce == waiting.nonce


def test_a_peer_that_takes_nothing_leaves_the_others_their_staging_slots(
    decode: DecodeSide, stuck: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill(
        wrap=drops_for(stuck),
        num_threads=1,
        options=LaneOptions(num_staging_slots=6, max_staging_slots_per_peer=4, drain_timeout_s=0.1),
    )
    for nonce in range(90, 98):
        prefill.send(stuck.reserve(f"stuck-{nonce}", [], nonce=nonce), stuck.peer(), [])
    wait_until(lambda: prefill.sender.bytes_in_flight > 0)
    for nonce in range(1, 6):
        prefill.send(decode.reserve(f"r{nonce}", [nonce], nonce=nonce), decode.peer(), [nonce])
    reports = [prefill.report() for _ in range(5)]
    assert {report.outcome for report in reports} == {SendOutcome.SENT}
    assert prefill.sender.num_open == 8


class Computed:
    """Two pushes that become ready in one turn of the lane: when both are there."""

    def __init__(self) -> None:
        self._is_second_there = False
        self._is_ready = False

    def first(self) -> bool:
        self._is_ready = self._is_second_there
        return self._is_ready

    def second(self) -> bool:
        self._is_second_there = True
        return self._is_ready


def test_peers_take_turns(decode: DecodeSide, stuck: DecodeSide, make_prefill: MakePrefill) -> None:
    """Two peers whose pushes become ready at once are sent to alternately, not one after the
    other.
    """
    order: list[str] = []

    def note(post: PlannedPost) -> Fault | None:
        order.append(post.peer)
        return None

    prefill = make_prefill(
        wrap=lambda inner: FaultyTransport(inner, note),
        num_threads=1,
        options=LaneOptions(max_post_bytes=LAYOUT.block_bytes),
    )
    for side, nonce in ((decode, 1), (stuck, 2)):  # connects
        prefill.send(side.reserve("connects", [9], nonce=nonce), side.peer(), [1])
        assert prefill.report().outcome is SendOutcome.SENT
    order.clear()
    computed = Computed()
    for side, nonce in ((decode, 3), (stuck, 4)):
        ticket = side.reserve("r", range(8), nonce=nonce)
        prefill.sender.open(ticket, side.peer())
        ready = computed.first if side is decode else computed.second
        prefill.sender.push(nonce, range(0, 16, 2), 0, ready=ready)
    wait_until(lambda: len(order) == 16)
    assert {decode.name, stuck.name} == set(order[:2]) == set(order[2:4]) == set(order[4:6])


def test_closing_a_connection_does_not_hold_up_the_lane(
    decode: DecodeSide, stuck: DecodeSide, make_prefill: MakePrefill
) -> None:
    """A library may take seconds to let go of a peer that does not answer."""
    closing, release = threading.Event(), threading.Event()

    def slow_disconnect(inner: Transport) -> Transport:
        transport = drops_for(stuck)(inner)
        disconnect = transport.disconnect

        def disconnect_slowly(peer: PeerHandle) -> None:
            if peer.peer == stuck.name:
                closing.set()
                release.wait(60)
            disconnect(peer)

        transport.disconnect = disconnect_slowly  # type: ignore[method-assign]
        return transport

    prefill = make_prefill(
        wrap=slow_disconnect, num_threads=1, options=LaneOptions(drain_timeout_s=0.05)
    )
    prefill.send(stuck.reserve("stuck", [1], nonce=99, timeout_s=1.0), stuck.peer(), [1])
    assert closing.wait(60)
    prefill.send(decode.reserve("r", [2], nonce=1), decode.peer(), [2])
    assert prefill.report().nonce == 1
    assert prefill.sender.num_open == 1  # its source is still being read
    release.set()
    report = prefill.report()
    assert (report.nonce, report.drained) == (99, False)
    assert isinstance(report.error, TransferFailedError | PeerLostError)


def test_a_stopped_process_does_not_hold_up_the_other_peers_of_its_lane(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """SIGSTOP: its sockets take what fits in their buffers, then nothing."""
    child = Child(run_decode, DecodeOptions(BIG, 32, epoch=STUCK_EPOCH))
    big_decode = DecodeSide(num_blocks=32, layout=BIG)
    try:
        prefill = make_prefill(
            pool=Pool(32, BIG),
            num_threads=1,
            options=LaneOptions(max_bytes_in_flight=16 * BIG.block_bytes, drain_timeout_s=0.1),
        )
        prefill.send(reserve_at(child, "connects", [1], 98), peer_of(child), [1])
        assert prefill.report().outcome is SendOutcome.SENT
        peer, ticket = peer_of(child), reserve_at(child, "stuck", range(32), 99)
        assert child.process.pid is not None
        os.kill(child.process.pid, signal.SIGSTOP)
        prefill.send(ticket, peer, list(range(32)))
        wait_until(lambda: prefill.sender.bytes_in_flight > 0)
        for nonce in range(1, 4):
            blocks = list(range(32))
            ticket = big_decode.reserve(f"r{nonce}", blocks, nonce=nonce)
            prefill.send(ticket, big_decode.peer(), blocks)
            report = prefill.report()
            assert (report.nonce, report.outcome) == (nonce, SendOutcome.SENT)
        assert prefill.sender.num_open == 1
    finally:
        child.end()
        big_decode.close()
