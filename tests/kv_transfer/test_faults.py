"""Hand-overs over a transport that drops, fails, delays, delivers late: never a wrong byte."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace

from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import SendOutcome, SendTicket
from kv_transfer.transport import Transport
from kv_transfer.transports.faulty import FaultyTransport, PlannedPost
from kv_transfer.transports.loopback.endpoint import LoopbackEndpoint
from runtime.errors import (
    PeerLostError,
    StaleTicketError,
    TransferFailedError,
)
from runtime.faults import Fault, FaultKind
from tests.kv_transfer.helpers import SLOT_LAYOUT, DecodeSide, PrefillSide, record_of
from tests.waiting import wait_until

MakePrefill = Callable[..., PrefillSide]
LATE_S = 2.0


class Faults:
    """Injects ``fault`` into the post with index ``at``; counts all posts."""

    def __init__(self, fault: Fault, at: int = 0) -> None:
        self.fault = fault
        self.at = at
        self.posts: list[PlannedPost] = []

    def __call__(self, post: PlannedPost) -> Fault | None:
        self.posts.append(post)
        return self.fault if post.index == self.at else None

    def wrap(self, inner: Transport) -> Transport:
        return FaultyTransport(inner, self)


def test_a_failed_post_fails_the_ticket_and_is_never_repeated(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    faults = Faults(Fault(FaultKind.FAIL))
    prefill = make_prefill(wrap=faults.wrap)
    prefill.send(decode.reserve("r", [1, 2, 3]), decode.peer(), [1, 2, 3])
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert isinstance(report.error, TransferFailedError)
    assert not report.drained  # only DONE is proof that nothing is on its way
    time.sleep(0.05)
    assert len(faults.posts) == 1
    assert decode.pool.is_zero()
    assert decode.arrivals.empty()


def test_the_flag_is_not_posted_before_all_data_is_done(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    faults = Faults(Fault(FaultKind.DELAY, 1.0))
    prefill = make_prefill(wrap=faults.wrap)
    ticket = decode.reserve("r", [1, 2])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)  # this one is held back
    wait_until(lambda: len(faults.posts) == 1)
    prefill.sender.push(ticket.nonce, [2], 1)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    wait_until(lambda: decode.pool.block(2) == prefill.pool.block(2))
    assert decode.receiver.num_expected == 1
    assert [post.notify for post in faults.posts] == [None] * len(faults.posts)
    decode.arrival()
    assert decode.pool.block(1) == prefill.pool.block(1)
    assert faults.posts[-1].notify is not None


def test_a_post_that_hangs_is_cut_off_after_transfer_and_drain_time(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    faults = Faults(Fault(FaultKind.DROP))
    prefill = make_prefill(wrap=faults.wrap, options=LaneOptions(drain_timeout_s=0.1))
    prefill.send(decode.reserve("r", [1], timeout_s=1.0), decode.peer(), [1])
    report = prefill.report()
    assert isinstance(report.error, TransferFailedError)
    assert "1 posts in flight" in str(report.error)
    assert not report.drained
    prefill.send(decode.reserve("next", [2], nonce=8), decode.peer(), [2])
    assert prefill.report().outcome is SendOutcome.SENT  # over a new connection


def test_a_cancelled_post_that_hangs_fails_undrained(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    faults = Faults(Fault(FaultKind.DROP))
    prefill = make_prefill(wrap=faults.wrap, options=LaneOptions(drain_timeout_s=0.1))
    ticket = decode.reserve("r", [1], timeout_s=3.0)
    prefill.send(ticket, decode.peer(), [1])
    wait_until(lambda: len(faults.posts) == 1)
    prefill.sender.abandon(ticket.nonce)
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert isinstance(report.error, PeerLostError)
    assert not report.drained


def slot_of(decode: DecodeSide, ticket: SendTicket) -> bytes:
    """What is in the ticket's slot now."""
    return ctypes.string_at(decode.slots.address(ticket.slot), SLOT_LAYOUT.slot_bytes)


def late(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    """A ticket fails while its bytes are still on their way."""
    faults = Faults(Fault(FaultKind.LATE, LATE_S))
    prefill = make_prefill(wrap=faults.wrap)
    prefill.send(decode.reserve("r", [1]), decode.peer(), [1])
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert not report.drained
    assert decode.pool.is_zero()


def test_a_late_write_lands_without_a_fence(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    """Why the quarantine exists: the next test proves nothing unless this one passes."""
    late(decode, make_prefill)
    wait_until(lambda: any(decode.pool.block(1)))


def test_a_late_write_never_lands_after_a_fence(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    late(decode, make_prefill)
    decode.transport.fence("prefill-0@00000000000000f1/0")
    time.sleep(LATE_S + 0.5)
    assert decode.pool.is_zero()


def test_a_restarted_peer_at_the_same_address_is_stale(make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    old, new = DecodeSide(epoch=1), DecodeSide(epoch=2)
    try:
        ticket, peer = old.reserve("r", [1]), old.peer()
        address = LoopbackEndpoint.decode(new.peer().endpoint)
        endpoint = LoopbackEndpoint.decode(peer.endpoint)
        endpoint = replace(endpoint, host=address.host, port=address.port)
        prefill.send(ticket, replace(peer, endpoint=endpoint.encode()), [1])
        report = prefill.report()
        assert isinstance(report.error, StaleTicketError)
        assert "another process answers" in str(report.error)
        assert new.pool.is_zero()
    finally:
        old.close()
        new.close()


def test_a_stream_of_requests_with_random_delays_is_all_there(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    def delay(post: PlannedPost) -> Fault | None:
        return Fault(FaultKind.DELAY, 0.001 * (post.index * 7 % 5)) if post.index % 3 else None

    prefill = make_prefill(wrap=lambda inner: FaultyTransport(inner, delay))
    for round_ in range(10):
        for i in range(8):
            nonce = round_ * 8 + i + 1
            blocks = list(range(i * 4, i * 4 + 4))
            prefill.send(decode.reserve(f"r{nonce}", blocks, nonce=nonce), decode.peer(), blocks)
        for _ in range(8):
            arrival = decode.arrival()
            assert arrival.error is None
            decode.slots.free(arrival.slot)
            assert prefill.report().outcome is SendOutcome.SENT
    assert decode.pool.memory[:] == prefill.pool.memory[:]
    decode.slots.check_integrity()
    assert decode.slots.num_free == decode.slots.num_slots


def test_a_late_record_in_a_reused_slot_is_never_a_first_token(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """The slot is given away without a fence, against the rules: the guard in it still holds."""
    faults = Faults(Fault(FaultKind.LATE, LATE_S))
    prefill = make_prefill(wrap=faults.wrap)
    old = decode.reserve("old", [1], nonce=5)
    prefill.sender.open(old, decode.peer())
    prefill.sender.finish(old.nonce, record_of(old, first_token=13))  # the record is the only post
    assert prefill.report().outcome is SendOutcome.FAILED
    decode.receiver.forget("old")
    decode.slots.free(old.slot)
    new = decode.reserve("new", [1], nonce=6)
    assert new.slot == old.slot
    before = slot_of(decode, new)
    prefill.sender.open(new, decode.peer())
    prefill.sender.push(new.nonce, [1], 0)
    wait_until(lambda: decode.pool.block(1) == prefill.pool.block(1))
    wait_until(lambda: slot_of(decode, new) != before)  # now the old record is in the slot
    assert decode.arrivals.empty()
    prefill.sender.finish(new.nonce, record_of(new, first_token=42))
    arrival = decode.arrival()
    assert arrival.record is not None
    assert (arrival.record.nonce, arrival.record.first_token) == (6, 42)


def test_a_record_that_is_overwritten_late_is_an_error_and_not_a_token(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """The other order: the old record lands on the new one, before the new flag."""
    faults = Faults(Fault(FaultKind.LATE, LATE_S))
    prefill = make_prefill(wrap=faults.wrap)
    old = decode.reserve("old", [1], nonce=5)
    prefill.sender.open(old, decode.peer())
    prefill.sender.finish(old.nonce, record_of(old, first_token=13))
    assert prefill.report().outcome is SendOutcome.FAILED
    decode.receiver.forget("old")
    decode.slots.free(old.slot)
    other = make_prefill(part=1, num_parts=2)
    first = make_prefill(num_parts=2, pool=prefill.pool, epoch=0xF2)
    new = decode.reserve("new", [1], nonce=6, num_parts=2)
    first.send(new, decode.peer(first.name), [1])
    assert first.report().outcome is SendOutcome.SENT  # its record is there
    before = slot_of(decode, new)
    wait_until(lambda: slot_of(decode, new) != before)  # the old one is on top of it
    other.send(new, decode.peer(), [1])
    arrival = decode.arrival()
    assert arrival.record is None
    assert isinstance(arrival.error, StaleTicketError)
