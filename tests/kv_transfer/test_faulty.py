"""The fault harness itself: each kind does what it says, and the hand-over survives it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kv_transfer.ticket import SendOutcome
from kv_transfer.transport import RegionWrite, Transport
from kv_transfer.transports import create_transport
from kv_transfer.transports.faulty import FaultyTransport, PlannedPost, inject_faults
from kv_transfer.transports.faulty_posts import first_half
from runtime.errors import PeerLostError, TransferFailedError
from runtime.faults import Fault, FaultKind, parse_faults
from tests.kv_transfer.helpers import HOST, DecodeSide, PrefillSide, record_of
from tests.waiting import wait_until

MakePrefill = Callable[..., PrefillSide]


class At:
    """One fault at one post; counts the posts."""

    def __init__(self, kind: FaultKind, delay_s: float = 0.0, index: int = 0) -> None:
        self.fault = Fault(kind, delay_s)
        self.index = index
        self.posts: list[PlannedPost] = []

    def __call__(self, post: PlannedPost) -> Fault | None:
        self.posts.append(post)
        return self.fault if post.index == self.index else None

    def wrap(self, inner: Transport) -> Transport:
        return FaultyTransport(inner, self)


def hand_over(decode: DecodeSide, prefill: PrefillSide, blocks: list[int], nonce: int = 7) -> None:
    ticket = decode.reserve(f"r{nonce}", blocks, nonce=nonce)
    prefill.send(ticket, decode.peer(), blocks)


@pytest.mark.parametrize(
    ("kind", "delay_s", "index"),
    [
        (FaultKind.DELAY, 0.05, 0),
        (FaultKind.STALL, 0.05, 0),
        (FaultKind.REORDER, 0.05, 0),
        (FaultKind.DUPLICATE, 0.0, 0),
        (FaultKind.DUPLICATE, 0.0, 2),  # the flag, announced twice
        (FaultKind.MUTE, 0.0, 2),  # the flag, never announced
    ],
)
def test_what_only_disturbs_is_survived(
    decode: DecodeSide, make_prefill: MakePrefill, kind: FaultKind, delay_s: float, index: int
) -> None:
    at = At(kind, delay_s, index)
    prefill = make_prefill(wrap=at.wrap)
    ticket = decode.reserve("r", [1, 2])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: len(at.posts) == 1)
    prefill.sender.push(ticket.nonce, [2], 1)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    arrival = decode.arrival()
    assert arrival.error is None
    assert prefill.report().outcome is SendOutcome.SENT
    assert decode.pool.block(1) == prefill.pool.block(1)
    assert decode.pool.block(2) == prefill.pool.block(2)
    assert len(at.posts) > index
    time.sleep(0.05)
    assert decode.arrivals.empty()


def test_a_stalled_end_is_told_late_and_a_cancel_waits_for_it(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    at = At(FaultKind.STALL, 1.0)
    prefill = make_prefill(wrap=at.wrap)
    ticket = decode.reserve("r", [1])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: decode.pool.block(1) == prefill.pool.block(1))
    prefill.sender.abandon(ticket.nonce)
    time.sleep(0.1)
    assert prefill.reports.empty()  # landed, but nobody may know yet: not drained
    report = prefill.report()
    assert report.outcome is SendOutcome.ABANDONED
    assert report.drained


def test_reordered_posts_overtake(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    at = At(FaultKind.REORDER, 600.0)
    prefill = make_prefill(wrap=at.wrap)
    ticket = decode.reserve("r", [1, 2])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: len(at.posts) == 1)
    assert decode.pool.is_zero()
    prefill.sender.push(ticket.nonce, [2], 1)
    wait_until(lambda: decode.pool.block(1) == prefill.pool.block(1))  # not 600 s
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    assert decode.arrival().error is None


def test_half_a_post_fails_the_ticket(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill(wrap=At(FaultKind.PARTIAL).wrap)
    hand_over(decode, prefill, [1, 9])
    report = prefill.report()
    assert isinstance(report.error, TransferFailedError)
    assert not report.drained
    assert decode.pool.block(1) == prefill.pool.block(1)
    assert decode.pool.block(9) != prefill.pool.block(9)
    assert decode.arrivals.empty()
    hand_over(decode, prefill, [9], nonce=8)  # the connection lives
    assert prefill.report().outcome is SendOutcome.SENT


def test_a_lost_connection_fails_its_tickets_and_the_next_uses_another(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill(wrap=At(FaultKind.DISCONNECT).wrap)
    hand_over(decode, prefill, [1])
    report = prefill.report()
    assert isinstance(report.error, PeerLostError)
    assert not report.drained
    hand_over(decode, prefill, [2], nonce=8)
    assert prefill.report().outcome is SendOutcome.SENT


def test_what_lands_late_is_forgotten_afterwards(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    at = At(FaultKind.LATE, 0.1)
    prefill = make_prefill(wrap=at.wrap)
    before = prefill.transport.registered_bytes
    hand_over(decode, prefill, [1])
    prefill.report()
    assert prefill.transport.registered_bytes > before
    wait_until(lambda: prefill.transport.registered_bytes == before)
    assert decode.pool.block(1) == prefill.pool.block(1)


def test_half_of_the_bytes() -> None:
    writes = [RegionWrite("kv", 100, 0, 10), RegionWrite("kv", 200, 50, 10)]
    assert first_half(writes) == writes[:1]
    assert first_half(writes[:1]) == [RegionWrite("kv", 100, 0, 5)]
    assert first_half([RegionWrite("kv", 0, 0, 1)]) == []


def test_only_the_named_instance_is_wrapped() -> None:
    plan = parse_faults("fail=1,on=prefill-1")
    transports = [
        create_transport("loopback", local_name=f"prefill-{i}@00/0", host=HOST) for i in (0, 1)
    ]
    wrapped = [inject_faults(transport, plan) for transport in transports]
    try:
        assert wrapped[0] is transports[0]
        assert isinstance(wrapped[1], FaultyTransport)
        assert inject_faults(transports[0], parse_faults("")) is transports[0]
    finally:
        for transport in wrapped:
            transport.close()


def test_a_seeded_storm_never_delivers_wrong_bytes(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """Every kind at once; each ticket is SENT with its bytes, or FAILED and its writer fenced."""
    plan = parse_faults(
        "delay=0.1@0.01,reorder=0.1@0.01,stall=0.1@0.01,fail=0.05,partial=0.05,duplicate=0.1,"
        "mute=0.05,late=0.05@0.05,disconnect=0.05,seed=5"
    )
    prefill = make_prefill(wrap=lambda inner: inject_faults(inner, plan))
    outcomes = []
    for nonce in range(1, 61):
        blocks = [nonce % 32, (nonce * 7 + 3) % 32]
        if blocks[0] == blocks[1]:
            blocks.pop()
        ticket = decode.reserve(f"r{nonce}", blocks, nonce=nonce)
        prefill.send(ticket, decode.peer(), blocks)
        report = prefill.report()
        outcomes.append(report.outcome)
        if report.outcome is SendOutcome.SENT:
            assert decode.arrival().error is None
            for block in blocks:
                assert decode.pool.block(block) == prefill.pool.block(block)
        else:
            decode.receiver.forget(ticket.request_id)
            decode.transport.fence(prefill.name)
            for block in blocks:  # now they are free: whatever is written next stays
                start = block * decode.pool.layout.block_bytes
                decode.pool.memory[start : start + 8] = b"next one"
            time.sleep(0.06)
            assert [decode.pool.block(block)[:8] for block in blocks] == [b"next one"] * len(blocks)
        decode.slots.free(ticket.slot)
    assert outcomes.count(SendOutcome.SENT) > 20
    assert outcomes.count(SendOutcome.FAILED) > 5
