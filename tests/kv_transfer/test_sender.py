"""KVSender with KVReceiver: whole hand-overs, parts, chunks, cancels, deadlines, bad tickets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer.sender import KVSender
from kv_transfer.sender_commands import LaneOptions
from kv_transfer.ticket import PeerEndpoint, SendOutcome, SendReport, SendTicket
from kv_transfer.transport import TransferHandle, TransferState, Transport
from kv_transfer.transports.faulty import FaultyTransport, PlannedPost
from runtime.errors import (
    DrainingError,
    InternalError,
    PeerLostError,
    StaleTicketError,
    TransferFailedError,
)
from runtime.faults import Fault, FaultKind
from tests.kv_transfer.helpers import (
    LAYOUT,
    SLOT_LAYOUT,
    DecodeSide,
    Pool,
    PrefillSide,
    random_ids,
    record_of,
)
from tests.waiting import wait_until

MakePrefill = Callable[..., PrefillSide]
FLAG_BYTES = SLOT_LAYOUT.flag_bytes


def assert_landed(
    prefill: PrefillSide, decode: DecodeSide, src: list[int], dst: tuple[int, ...]
) -> None:
    for src_id, dst_id in zip(src, dst, strict=True):
        assert decode.pool.block(dst_id) == prefill.pool.block(src_id)


def test_a_whole_hand_over(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    src, dst = random_ids(10, 32, seed=1), random_ids(10, 32, seed=2)
    ticket = decode.reserve("r", dst)
    prefill.send(ticket, decode.peer(), src)
    arrival = decode.arrival()
    assert arrival.record == record_of(ticket)
    assert_landed(prefill, decode, src, ticket.block_ids)
    report = prefill.report()
    assert (report.request_id, report.nonce, report.peer) == ("r", ticket.nonce, decode.name)
    assert report.outcome is SendOutcome.SENT
    assert report.error is None
    assert report.drained
    record_bytes = SLOT_LAYOUT.flags_offset
    assert report.num_bytes == 10 * LAYOUT.block_bytes + record_bytes + FLAG_BYTES
    assert report.num_posts >= 2
    assert report.first_post_at is not None
    assert report.last_done_at is not None
    assert report.opened_at <= report.first_post_at <= report.last_done_at
    assert 0 < report.wire_s <= report.last_done_at - report.first_post_at
    assert prefill.sender.num_open == 0
    assert prefill.sender.bytes_in_flight == 0


def test_untouched_blocks_stay_untouched(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [3, 20])
    prefill.send(ticket, decode.peer(), [1, 2])
    prefill.report()
    for block_id in set(range(32)) - {3, 20}:
        assert not any(decode.pool.block(block_id))


@pytest.mark.parametrize("num_parts", [2, 3, 8])
def test_all_parts_share_the_blocks(
    decode: DecodeSide, make_prefill: MakePrefill, num_parts: int
) -> None:
    pool = Pool(32)
    pool.fill_random()
    parts = [make_prefill(part=p, num_parts=num_parts, pool=pool) for p in range(num_parts)]
    src, dst = random_ids(13, 32, seed=3), random_ids(13, 32, seed=4)
    ticket = decode.reserve("r", dst, num_parts=num_parts)
    for part in parts[1:]:
        part.send(ticket, decode.peer(), src)
    reports = [part.report() for part in parts[1:]]
    assert decode.arrivals.empty()  # part 0 is still missing
    parts[0].send(ticket, decode.peer(), src)
    assert decode.arrival().record == record_of(ticket)
    assert_landed(parts[0], decode, src, ticket.block_ids)
    reports.append(parts[0].report())
    extra = num_parts * FLAG_BYTES + SLOT_LAYOUT.flags_offset
    assert sum(r.num_bytes for r in reports) == 13 * LAYOUT.block_bytes + extra


def test_chunks_and_layer_groups(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    src, dst = random_ids(9, 32, seed=5), random_ids(9, 32, seed=6)
    ticket = decode.reserve("r", dst)
    prefill.sender.open(ticket, decode.peer())
    for start in (0, 4, 8):
        for layers in ((0, 2), (2, 3)):
            prefill.sender.push(ticket.nonce, src[start : start + 4], start, layers=layers)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    decode.arrival()
    assert_landed(prefill, decode, src, ticket.block_ids)


def test_single_block_pushes_spread_over_the_parts(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    pool = Pool(32)
    parts = [make_prefill(part=p, num_parts=4, pool=pool) for p in range(4)]
    ticket = decode.reserve("r", range(8), num_parts=4)
    for part in parts:
        part.sender.open(ticket, decode.peer())
        for index in range(8):
            part.sender.push(ticket.nonce, [index], index)
        part.sender.finish(ticket.nonce, record_of(ticket) if part.part == 0 else None)
    reports = [part.report() for part in parts]
    assert [r.num_bytes for r in reports[1:]] == [2 * LAYOUT.block_bytes + FLAG_BYTES] * 3


def test_a_full_prefix_hit_sends_only_the_slot(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    assert decode.arrival().record == record_of(ticket)
    assert prefill.report().num_bytes == SLOT_LAYOUT.flags_offset + FLAG_BYTES


def test_nothing_is_posted_before_it_is_ready(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    computed = threading.Event()
    ticket = decode.reserve("r", [1])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [0], 0, ready=computed.is_set)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    time.sleep(0.1)
    assert decode.pool.is_zero()
    assert prefill.reports.empty()
    computed.set()
    assert prefill.report().outcome is SendOutcome.SENT
    assert_landed(prefill, decode, [0], (1,))


def test_waiting_requests_share_posts(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    posts: list[PlannedPost] = []
    prefill = make_prefill(wrap=lambda inner: FaultyTransport(inner, _record_in(posts)))
    peer = decode.peer()
    computed = threading.Event()
    tickets = [decode.reserve(f"r{i}", [i], nonce=i + 1) for i in range(8)]
    for index, ticket in enumerate(tickets):
        prefill.sender.open(ticket, peer)
        prefill.sender.push(ticket.nonce, [index], 0, ready=computed.is_set)
        prefill.sender.finish(ticket.nonce, record_of(ticket))
    time.sleep(0.05)  # all of them wait for the same event now
    computed.set()
    assert {prefill.report().outcome for _ in tickets} == {SendOutcome.SENT}
    # Alone, each would take two: data with record, then the flag.
    assert len(posts) < len(tickets)
    for index in range(8):
        assert_landed(prefill, decode, [index], (index,))


def _record_in(posts: list[PlannedPost]) -> Callable[[PlannedPost], Fault | None]:
    def record(post: PlannedPost) -> Fault | None:
        posts.append(post)
        return None

    return record


def test_bytes_in_flight_are_bounded(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    posts: list[PlannedPost] = []
    most = 0

    def watch(post: PlannedPost) -> Fault | None:
        nonlocal most
        most = max(most, prefill.sender.bytes_in_flight + sum(w.nbytes for w in post.writes))
        posts.append(post)
        return Fault(FaultKind.DELAY, 0.002)

    prefill = make_prefill(
        wrap=lambda inner: FaultyTransport(inner, watch),
        options=LaneOptions(
            max_bytes_in_flight=3 * LAYOUT.block_bytes, max_post_bytes=2 * LAYOUT.block_bytes
        ),
    )
    ticket = decode.reserve("r", range(32))
    prefill.send(ticket, decode.peer(), list(range(32)))
    assert prefill.report().outcome is SendOutcome.SENT
    assert LAYOUT.block_bytes < most <= 3 * LAYOUT.block_bytes
    assert len(posts) >= 16
    assert_landed(prefill, decode, list(range(32)), ticket.block_ids)


def test_abandon_drains_and_sends_no_flag(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    hold = Fault(FaultKind.DELAY, 0.1)
    prefill = make_prefill(wrap=lambda inner: FaultyTransport(inner, lambda post: hold))
    ticket = decode.reserve("r", [1, 2])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: prefill.sender.bytes_in_flight > 0)
    prefill.sender.push(ticket.nonce, [2], 1, ready=lambda: False)
    prefill.sender.abandon(ticket.nonce)
    report = prefill.report()
    assert (report.outcome, report.drained) == (SendOutcome.ABANDONED, True)
    assert report.num_bytes == LAYOUT.block_bytes  # what was in flight has landed before
    assert_landed(prefill, decode, [1], (1,))
    assert decode.arrivals.empty()
    prefill.sender.abandon(ticket.nonce)
    assert prefill.sender.num_ignored == 1


def test_calls_after_the_report_are_ignored(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [1])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.abandon(ticket.nonce)
    assert prefill.report().outcome is SendOutcome.ABANDONED
    prefill.sender.push(ticket.nonce, [1], 0)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    assert prefill.sender.num_ignored == 2
    with pytest.raises(ValueError, match="part 0 alone"):
        prefill.sender.finish(ticket.nonce, None)


def test_one_ticket_is_not_opened_twice(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [1])
    prefill.sender.open(ticket, decode.peer())
    with pytest.raises(ValueError, match="is open already"):
        prefill.sender.open(ticket, decode.peer())


def test_a_request_is_tried_again_while_its_first_ticket_is_open(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    first = decode.reserve("r", [1], nonce=1)
    prefill.sender.open(first, decode.peer())
    assert decode.receiver.forget("r")
    prefill.send(decode.reserve("r", [2], nonce=2), decode.peer(), [2])
    report = prefill.report()
    assert (report.request_id, report.nonce, report.outcome) == ("r", 2, SendOutcome.SENT)
    prefill.sender.abandon(first.nonce)
    report = prefill.report()
    assert (report.nonce, report.outcome) == (1, SendOutcome.ABANDONED)


def failed(prefill: PrefillSide, ticket: SendTicket, peer: PeerEndpoint) -> SendReport:
    prefill.send(ticket, peer, [0])
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert report.error is not None
    assert report.error.request_id == ticket.request_id
    return report


def test_no_time_runs_while_the_prompt_is_computed(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [1, 2], timeout_s=1.0)
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    time.sleep(1.5)
    prefill.sender.push(ticket.nonce, [2], 1)
    time.sleep(1.5)
    assert prefill.reports.empty()
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    assert prefill.report().outcome is SendOutcome.SENT


def test_a_transfer_that_takes_too_long_names_the_limit_and_the_wait(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [1], timeout_s=0.1)
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0, ready=lambda: False)
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert report.drained
    assert isinstance(report.error, TransferFailedError)
    assert "0.1 s for the KV transfer (kv_transfer.transfer_timeout_s)" in str(report.error)
    assert f"{decode.name}: it waited for 1 pushes that are computed" in str(report.error)


def test_a_peer_whose_posts_stand_still_fails_its_tickets_before_they_finish(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """One ticket has a post that never ends, the other only waits for its engine."""

    def drop_data(post: PlannedPost) -> Fault | None:
        return Fault(FaultKind.DROP) if post.index == 0 else None

    prefill = make_prefill(
        wrap=lambda inner: FaultyTransport(inner, drop_data),
        options=LaneOptions(drain_timeout_s=0.1),
    )
    idle, stuck = (decode.reserve(f"r{n}", [n], nonce=n, timeout_s=0.3) for n in (1, 2))
    prefill.sender.open(idle, decode.peer())
    prefill.sender.open(stuck, decode.peer())
    prefill.sender.push(stuck.nonce, [2], 0)
    reports = {report.nonce: report for report in (prefill.report(), prefill.report())}
    assert {report.outcome for report in reports.values()} == {SendOutcome.FAILED}
    assert all(isinstance(report.error, TransferFailedError) for report in reports.values())
    assert reports[idle.nonce].drained
    assert not reports[stuck.nonce].drained


def test_a_peer_whose_posts_go_on_slowly_is_left_alone(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """All of it takes longer than the limit, which runs from each post that ends."""
    slow = Fault(FaultKind.DELAY, 0.5)
    prefill = make_prefill(
        wrap=lambda inner: FaultyTransport(inner, lambda post: slow if post.index < 6 else None),
        options=LaneOptions(max_bytes_in_flight=LAYOUT.block_bytes),
    )
    ticket = decode.reserve("r", range(6), timeout_s=2.0)
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, list(range(0, 12, 2)), 0)
    wait_until(lambda: decode.pool.block(5) == prefill.pool.block(10))
    prefill.sender.finish(ticket.nonce, record_of(ticket))
    assert prefill.report().outcome is SendOutcome.SENT


def test_an_abandoned_ticket_drains_in_the_time_of_a_transfer(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """Not in the short time after an error: its slow posts share a connection with others."""
    hold = Fault(FaultKind.DELAY, 0.5)
    prefill = make_prefill(
        wrap=lambda inner: FaultyTransport(inner, lambda post: hold),
        options=LaneOptions(drain_timeout_s=0.05),
    )
    ticket = decode.reserve("r", [1])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: prefill.sender.bytes_in_flight > 0)
    prefill.sender.abandon(ticket.nonce)
    report = prefill.report()
    assert (report.outcome, report.drained) == (SendOutcome.ABANDONED, True)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_ids": (32,)}, TransferFailedError, "32 blocks"),
        ({"slot": 8}, TransferFailedError, "8 slots"),
    ],
)
def test_a_ticket_beyond_the_peers_memory_is_refused(
    decode: DecodeSide,
    make_prefill: MakePrefill,
    change: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    prefill = make_prefill()
    ticket = replace(decode.reserve("r", [1]), **change)  # type: ignore[arg-type]
    report = failed(prefill, ticket, decode.peer())
    assert isinstance(report.error, error)
    assert message in str(report.error)
    assert report.num_posts == 0
    assert report.drained


def test_a_push_beyond_the_ticket_fails_it(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    for index, (blocks, first) in enumerate((([0, 1], 0), ([0], 1), ([99], 0))):
        ticket = decode.reserve(f"r{index}", [1], nonce=index + 1)
        prefill.sender.open(ticket, decode.peer())
        prefill.sender.push(ticket.nonce, blocks, first)
        assert isinstance(prefill.report().error, InternalError)
    assert decode.pool.is_zero()


def test_a_failing_ready_fails_its_request_only(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    ticket, other = decode.reserve("r", [1]), decode.reserve("other", [2], nonce=8)
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0, ready=lambda: bool(1 // 0))
    prefill.send(other, decode.peer(), [2])
    reports = {report.request_id: report for report in (prefill.report(), prefill.report())}
    assert isinstance(reports["r"].error, InternalError)
    assert "ZeroDivisionError" in str(reports["r"].error)
    assert reports["other"].outcome is SendOutcome.SENT


def test_a_ticket_of_before_a_fence_is_stale_with_a_newer_endpoint(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    ticket = decode.reserve("r", [1])
    decode.transport.fence(prefill.name)
    report = failed(prefill, ticket, decode.peer())
    assert isinstance(report.error, StaleTicketError)
    assert report.num_posts == 0


def test_an_endpoint_of_before_a_fence_is_stale(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    prefill = make_prefill()
    old_peer = decode.peer()
    prefill.send(decode.reserve("first", [1], nonce=1), old_peer, [1])
    assert prefill.report().outcome is SendOutcome.SENT
    decode.transport.fence(prefill.name)
    report = failed(prefill, decode.reserve("second", [2], nonce=2), old_peer)
    assert isinstance(report.error, (StaleTicketError, PeerLostError))
    prefill.send(decode.reserve("third", [3], nonce=3), decode.peer(), [3])
    assert prefill.report().outcome is SendOutcome.SENT
    assert not any(decode.pool.block(2))


def test_a_lost_peer_fails_idle_tickets_too(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    """The engine still computes, nothing is in flight: the loss must be heard all the same."""
    prefill = make_prefill()
    ticket = decode.reserve("r", [1, 2])
    prefill.sender.open(ticket, decode.peer())
    prefill.sender.push(ticket.nonce, [1], 0)
    wait_until(lambda: not decode.pool.is_zero() and prefill.sender.bytes_in_flight == 0)
    decode.transport.close()
    report = prefill.report(5.0)
    assert report.outcome is SendOutcome.FAILED
    assert isinstance(report.error, PeerLostError)


def test_an_idle_lost_connection_is_replaced(decode: DecodeSide, make_prefill: MakePrefill) -> None:
    prefill = make_prefill()
    prefill.send(decode.reserve("a", [1], nonce=1), decode.peer(), [1])
    assert prefill.report().outcome is SendOutcome.SENT
    decode.transport.deregister("kv")
    decode.transport.register(decode.pool.region())
    prefill.send(decode.reserve("b", [2], nonce=2), decode.peer(), [2])
    assert prefill.report().outcome is SendOutcome.SENT


def test_an_unregistered_source_fails_the_ticket(decode: DecodeSide) -> None:
    prefill = PrefillSide()
    try:
        prefill.transport.deregister("kv")
        report = failed(prefill, decode.reserve("r", [1]), decode.peer())
        assert isinstance(report.error, InternalError)
    finally:
        prefill.close()


def test_close_reports_every_ticket(decode: DecodeSide) -> None:
    prefill = PrefillSide()
    for index in range(5):
        prefill.sender.open(decode.reserve(f"r{index}", [index], nonce=index + 1), decode.peer())
    prefill.close()
    reports = [prefill.report() for _ in range(5)]
    assert {r.outcome for r in reports} == {SendOutcome.ABANDONED}
    with pytest.raises(DrainingError):
        prefill.sender.open(decode.reserve("late", [9], nonce=9), decode.peer())
    prefill.close()


def test_the_engine_is_not_held_up_by_a_peer_that_does_not_answer(
    decode: DecodeSide, make_prefill: MakePrefill
) -> None:
    """Two peers on one lane; connecting to the first takes its time, the second is served."""
    connecting, release = threading.Event(), threading.Event()

    def slow_connect(inner: Transport) -> Transport:
        connect = inner.connect

        def connect_slowly(peer: str, endpoint: bytes) -> object:
            if peer == "slow":
                connecting.set()
                release.wait(60)
            return connect(peer, endpoint)

        inner.connect = connect_slowly  # type: ignore[method-assign, assignment]
        return inner

    prefill = make_prefill(wrap=slow_connect, num_threads=1)
    slow = replace(decode.peer(), peer="slow")
    prefill.send(decode.reserve("slow", [1], nonce=1), slow, [1])
    assert connecting.wait(60)
    prefill.send(decode.reserve("quick", [2], nonce=2), decode.peer(), [2])
    assert prefill.report().request_id == "quick"
    release.set()
    assert prefill.report().outcome is SendOutcome.FAILED


def test_a_lane_survives_an_error_of_its_transport(
    decode: DecodeSide, make_prefill: MakePrefill, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [RuntimeError("broken library")]

    def break_poll(inner: Transport) -> Transport:
        poll = inner.poll

        def poll_or_fail(handle: TransferHandle) -> TransferState:
            if failures:
                raise failures.pop()
            return poll(handle)

        inner.poll = poll_or_fail  # type: ignore[method-assign]
        return inner

    prefill = make_prefill(wrap=break_poll)
    report = failed(prefill, decode.reserve("r", [1]), decode.peer())
    assert isinstance(report.error, InternalError)
    assert "broken library" in str(report.error)
    assert not report.drained
    assert "fails all its tickets" in caplog.text
    prefill.send(decode.reserve("next", [2], nonce=8), decode.peer(), [2])
    assert prefill.report().outcome is SendOutcome.SENT


def test_a_post_that_its_transport_loses_track_of_ends_with_its_connection(
    decode: DecodeSide, make_prefill: MakePrefill, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the source blocks are held for as long as the process lives."""

    def lose_track(inner: Transport) -> Transport:
        inner.poll = lambda handle: TransferState.PENDING  # type: ignore[method-assign]
        return inner

    prefill = make_prefill(wrap=lose_track, options=LaneOptions(drain_timeout_s=0.05))
    prefill.send(decode.reserve("r", [1]), decode.peer(), [1])
    wait_until(lambda: prefill.sender.bytes_in_flight > 0)
    decode.close()  # as a killed process does
    report = prefill.report()
    assert report.outcome is SendOutcome.FAILED
    assert isinstance(report.error, PeerLostError)
    assert not report.drained
    assert "has outlived its connection" in caplog.text


def test_arguments_of_the_sender() -> None:
    prefill = PrefillSide()
    try:
        for wrong in ({"part": 1}, {"num_parts": 99}, {"num_threads": 0}):
            with pytest.raises(ValueError, match=r"part|num_threads"):
                KVSender(
                    prefill.transport,
                    LAYOUT,
                    SLOT_LAYOUT,
                    kv_region=prefill.pool.region(),
                    on_closed=lambda report: None,
                    **wrong,  # type: ignore[arg-type]
                )
    finally:
        prefill.close()
