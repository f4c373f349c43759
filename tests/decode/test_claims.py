"""Claims: who gets a ticket, once or again, who never does, and what a cancelled one gives back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode.requests import Claim, DecodeRequest, RejectedUpdate, TicketUpdate
from decode.tickets import WriterDemand
from runtime.errors import (
    DrainingError,
    ErrorCode,
    InternalError,
    RequestCancelledError,
    StaleTicketError,
    TandemError,
)
from runtime.pb import decode_pb2
from runtime.sampling import FinishReason
from tests.decode.helpers import WRITER, claim_of
from tests.decode.test_rank import Bench
from worker.lifecycle import DecodeStatus

CANCELLED = RequestCancelledError("the client left")
DRAINING = DrainingError("decode-0 is draining: choose another")


def reserve(bench: Bench, num_prompt: int = 6) -> DecodeRequest:
    request = bench.make(num_prompt)
    bench.rank.reserve(request)
    return request


def test_a_reservation_holds_no_block_until_it_is_claimed() -> None:
    bench = Bench()
    request = reserve(bench)
    bench.clock.now += 500.0  # long in prefill's queue: no transfer time runs there
    bench.step()
    assert request.status is DecodeStatus.RESERVED
    assert bench.pool.num_free_blocks == bench.pool.num_usable_blocks
    bench.claim(request)
    assert request.status is DecodeStatus.WAITING_FOR_KV
    assert request.timings.decode_reserve_s == 0.0, "from the claim, not from Reserve"
    assert bench.ticket(request).timeout_s == 60.0


def test_the_same_writer_gets_the_same_ticket_again() -> None:
    bench = Bench()
    request = bench.reserve()
    bench.clock.now += 50.0
    bench.claim(request)
    first, again = bench.updates[request.request_id]
    assert first == again
    bench.clock.now += 50.0
    bench.step()
    assert request.status is DecodeStatus.WAITING_FOR_KV, "its time began with the last answer"


def test_two_calls_that_wait_are_both_answered() -> None:
    bench = Bench(num_usable=3)
    holder, request = bench.reserve(9), bench.reserve(9)
    first = bench.claim(request)
    bench.rank.unclaim(first)
    assert request.status is DecodeStatus.CLAIMED, "the other call still waits"
    bench.claim(request)
    assert bench.rank.live.abort(holder.request_id, CANCELLED)
    bench.rank.drained(holder.nonce)
    bench.step()
    assert len(bench.updates[request.request_id]) == 2


def test_a_used_ticket_is_never_given_again() -> None:
    """A replayed call would write into blocks that are another's by then."""
    bench = Bench()
    request = bench.reserve(max_tokens=2)
    bench.arrive(request)
    for _ in range(2):  # while it runs, and after its end
        with pytest.raises(StaleTicketError, match="used"):
            bench.claim(request)
        bench.step()
    assert request.status is DecodeStatus.FINISHED
    bench.check_empty()


@pytest.mark.parametrize(
    "change",
    [{"nonce": 5}, {"writer_key": replace(WRITER, epoch=8).key}, {"num_ranks": 1}],
    ids=lambda change: next(iter(change)),
)
def test_nobody_else_gets_the_ticket(change: dict[str, int | str]) -> None:
    bench = Bench()
    request = reserve(bench)
    claim = claim_of(request)
    values = {"nonce": claim.nonce, "writer_key": claim.writer_key, "num_ranks": claim.num_ranks}
    stranger = Claim(**{**values, **change}, tell=lambda _: None)  # type: ignore[arg-type]
    for _ in range(2):  # also once the right one has it
        with pytest.raises(StaleTicketError):
            bench.rank.claim(stranger)
        bench.claim(request)
    assert len(request.claims) == 2


def test_a_ticket_whose_writer_was_shut_out_is_not_told_again() -> None:
    bench = Bench()
    request = bench.reserve()
    bench.rank.fenced(bench.rank.desk.nonces_of(WRITER))
    with pytest.raises(StaleTicketError):
        bench.claim(request)
    assert bench.rank.renew([request.nonce], WRITER.key) == [request.nonce]


def test_a_claim_that_is_cancelled_in_the_queue_can_be_made_again() -> None:
    bench = Bench(num_usable=3)
    holder = bench.reserve(9)
    request = reserve(bench, 9)
    claim = bench.claim(request)
    assert request.status is DecodeStatus.CLAIMED
    bench.rank.unclaim(claim)
    assert request.status is DecodeStatus.RESERVED
    assert bench.rank.live.abort(holder.request_id, CANCELLED)
    bench.rank.drained(holder.nonce)
    bench.step()
    assert bench.pool.num_free_blocks == 3
    bench.claim(request)
    assert request.status is DecodeStatus.WAITING_FOR_KV


def test_a_claim_that_is_cancelled_as_it_is_answered_ends_the_request() -> None:
    """Whether the writer saw the ticket is not known: its blocks come back by revoking it."""
    bench = Bench()
    request = reserve(bench)
    claim = bench.claim(request)
    bench.rank.unclaim(claim)
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    assert [order.demand for order in bench.orders] == [WriterDemand.REVOKE]
    bench.rank.drained(request.nonce)
    bench.rank.unclaim(claim)
    bench.check_empty()


def test_a_cancelled_repetition_leaves_the_ticket_to_the_first() -> None:
    bench = Bench()
    request = bench.reserve()
    bench.rank.unclaim(bench.claim(request))
    assert request.status is DecodeStatus.WAITING_FOR_KV


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_claim_is_told_what_its_request_ended_with(is_waiting: bool) -> None:
    bench = Bench(num_usable=3)
    bench.reserve(9)
    request = bench.reserve(9) if is_waiting else reserve(bench, 9)
    assert bench.rank.live.abort(request.request_id, CANCELLED)
    assert bench.last_delta() == (FinishReason.ABORT, ErrorCode.CANCELLED)
    if is_waiting:
        (told,) = bench.updates[request.request_id]
        assert isinstance(told, RejectedUpdate)
        assert told.error.code is ErrorCode.CANCELLED
    bench.claim(request)
    told = bench.updates[request.request_id][-1]
    assert isinstance(told, RejectedUpdate)
    assert "the client left" in str(told.error)


def test_renewed_tickets_outlive_their_time_and_others_do_not() -> None:
    bench = Bench(num_usable=20)
    kept, left, queued = bench.reserve(), bench.reserve(), reserve(bench)
    nonces = [kept.nonce, queued.nonce, 999]
    for _ in range(5):
        bench.clock.now += 40.0
        assert bench.rank.renew(nonces, WRITER.key) == [999]
        bench.step()
    assert kept.status is DecodeStatus.WAITING_FOR_KV
    assert left.status is DecodeStatus.FINISHED
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    assert bench.rank.renew([left.nonce], WRITER.key) == [left.nonce]
    stranger = replace(WRITER, epoch=8).key
    assert bench.rank.renew([kept.nonce], stranger) == [kept.nonce]
    bench.arrive(kept)
    assert bench.rank.renew([kept.nonce], WRITER.key) == [kept.nonce], "nothing is to come"


def test_one_message_closes_all_parts_of_several_tickets() -> None:
    bench = Bench()
    first, second = bench.reserve(), bench.reserve()
    closures = [
        decode_pb2.TicketClosure(
            request_id=request.request_id,
            nonce=request.nonce,
            parts=[
                decode_pb2.PartClosure(rank=rank, outcome=decode_pb2.TICKET_OUTCOME_ABANDONED)
                for rank in (0, 1)
            ],
        )
        for request in (first, second)
    ]
    closures.append(decode_pb2.TicketClosure(nonce=999))
    message = decode_pb2.CloseTicketsRequest(closures=closures)
    message.prefill.instance, message.prefill.epoch = WRITER.instance, WRITER.epoch
    assert bench.rank.hand_over.close_tickets(message) == [999]
    # All parts were booked before the first ended its request: nobody has to be revoked.
    assert bench.orders == []
    assert bench.pool.num_free_blocks == bench.pool.num_usable_blocks
    assert bench.rank.hand_over.close_tickets(message) == [999], "a repetition is no error"


def test_an_outcome_that_is_not_known_is_a_failure() -> None:
    """From a newer prefill worker: it ends one request and no loop."""
    bench = Bench()
    request = bench.reserve()
    part = decode_pb2.PartClosure(rank=0, outcome=77, drained=True)  # type: ignore[arg-type]
    part.error.code, part.error.message = 78, "what is this?"  # type: ignore[assignment]
    assert bench.close_all(request, part) == []
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.INTERNAL)
    bench.claim(request)  # raises nothing: an InternalError of another process breaks no book here
    told = bench.updates[request.request_id][-1]
    assert isinstance(told, RejectedUpdate)
    assert told.error.message == "what is this?"


def test_timings_that_come_after_the_kv_reach_the_last_delta() -> None:
    bench = Bench()
    request = bench.reserve(max_tokens=2)
    bench.arrive(request)
    part = decode_pb2.PartClosure(rank=1, outcome=decode_pb2.TICKET_OUTCOME_SENT)
    part.timings.kv_exposed_s = 0.25
    assert bench.close_all(request, part) == []
    bench.step()
    (last,) = bench.rank.news.take()["router-0"]
    assert last.timings is not None
    assert last.timings.kv_exposed_s == 0.25


def test_a_receiver_that_asserts_fails_one_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    other = bench.reserve()

    def refuse(request_id: str, nonce: int, num_parts: int) -> int:
        raise ValueError("num_parts = 65: must be in [1, 64]")

    with monkeypatch.context() as patch:
        patch.setattr(bench.receiver, "expect", refuse)
        request = bench.reserve()
    (told,) = bench.updates[request.request_id]
    assert isinstance(told, RejectedUpdate)
    assert "num_parts = 65" in str(told.error)
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.INTERNAL)
    assert isinstance(bench.updates[bench.reserve().request_id][0], TicketUpdate)
    assert other.status is DecodeStatus.WAITING_FOR_KV
    bench.rank.check_integrity()


def test_a_command_that_fails_before_it_changes_anything_ends_no_loop() -> None:
    bench = Bench()
    request = reserve(bench)
    with pytest.raises(TandemError, match=r"Reserve: AssertionError: request-0") as caught:
        bench.rank.reserve(request)
    # An InternalError would end the loop, and with it every request of the group.
    assert not isinstance(caught.value, InternalError)
    assert caught.value.code is ErrorCode.INTERNAL
    bench.claim(request)
    bench.rank.check_integrity()


def test_draining_gives_back_at_once_what_holds_nothing() -> None:
    bench = Bench(num_usable=12)
    running = bench.reserve(6, max_tokens=10)
    bench.arrive(running)
    bench.step()
    receiving, queued, reserved = bench.reserve(6, 2), bench.reserve(40), reserve(bench)
    bench.rank.news.take()
    bench.rank.start_drain(5.0, DRAINING)
    late = reserve(bench)
    given_back = {
        delta.request_id
        for delta in bench.rank.news.take()["router-0"]
        if delta.error is not None and delta.error.code is ErrorCode.DRAINING
    }
    assert given_back == {item.request_id for item in (queued, reserved, late)}
    for _ in range(2):
        bench.step()
    assert running.status is DecodeStatus.RUNNING
    assert receiving.status is DecodeStatus.WAITING_FOR_KV
    bench.clock.now += 5.0
    bench.step()
    last = [delta for delta in bench.rank.news.take()["router-0"] if delta.error is not None]
    assert {delta.request_id for delta in last} == {running.request_id, receiving.request_id}
    assert all(delta.error.code is ErrorCode.DRAINING for delta in last if delta.error)
    bench.rank.drained(receiving.nonce)
    bench.check_empty()


@pytest.mark.parametrize(("later_s", "is_over"), [(1.0, True), (50.0, False), (0.0, True)])
def test_the_shortest_deadline_of_several_drains_counts(later_s: float, is_over: bool) -> None:
    bench = Bench()
    request = bench.reserve()
    bench.rank.start_drain(10.0, DRAINING)
    bench.step()
    bench.rank.start_drain(later_s, DRAINING)
    bench.clock.now += 1.0
    bench.step()
    assert (request.status is DecodeStatus.FINISHED) == is_over
    bench.clock.now += 10.0
    bench.step()
    assert request.status is DecodeStatus.FINISHED


def test_every_report_has_a_number_of_its_own() -> None:
    bench = Bench()
    first, second = bench.rank.load(), bench.rank.load()
    assert 0 < first.sequence < second.sequence
