"""The rank conducts: every request ends in one answer, in whatever state it ends."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from decode.draft_blocks import DraftSteps
from decode.live import WriterOrder
from decode.metrics import DecodeMetrics
from decode.offload import BlockCopier, HostBlockStore
from decode.rank import DecodeRank
from decode.requests import Claim, ClaimUpdate, DecodeRequest, RejectedUpdate, TicketUpdate
from decode.reservations import RankLimits
from decode.scheduler import DecodeScheduler
from decode.tickets import TicketDesk, WriterDemand
from engine.memory.block_pool import BlockPool
from engine.sampling.inputs import SampledToken
from kv_transfer.metadata import NO_DRAFT, MetadataRecord
from kv_transfer.ownership import Quarantine
from kv_transfer.receiver import Arrival
from runtime.errors import (
    ErrorCode,
    InternalError,
    PeerLostError,
    RequestCancelledError,
    TandemError,
    TransferFailedError,
)
from runtime.pb import decode_pb2
from runtime.rpc.wire import identity
from runtime.sampling import FinishReason, PositionLogprobs
from tests.decode.helpers import BLOCK_SIZE, FakeClock, FakeKV, claim_of, make_request
from tests.decode.test_tickets import FakeReceiver, FakeSlots
from worker.lifecycle import DecodeStatus

CANCELLED = RequestCancelledError("the client left")
VOCAB_SIZE = 100_000


class Bench:
    """A rank with fakes around it."""

    def __init__(
        self,
        num_usable: int = 12,
        *,
        max_num_seqs: int = 4,
        kv: BlockCopier[Any] | None = None,
        host_blocks: int = 100,
        caching: bool = False,
        num_drafts: int = 0,
    ) -> None:
        self.clock = FakeClock()
        self.pool = BlockPool(num_usable + 1, BLOCK_SIZE, enable_prefix_caching=caching)
        slots = FakeSlots(8)
        self.receiver = FakeReceiver(slots)
        desk = TicketDesk(
            self.pool,
            slots,
            self.receiver,
            Quarantine(self.clock, timeout_s=30.0, max_blocks=num_usable),
            fence_generation=lambda writer: 0,
        )
        self.host = HostBlockStore(kv or FakeKV(num_usable + 1), host_blocks)
        self.scheduler = DecodeScheduler(
            self.pool,
            self.host,
            max_num_seqs=max_num_seqs,
            max_model_len=200,
            drafts=DraftSteps(num_drafts=num_drafts, takes=lambda params: not params.logit_bias),
        )
        self.orders: list[WriterOrder] = []
        self.registry = CollectorRegistry()
        self.rank = DecodeRank(
            self.pool,
            desk,
            self.scheduler,
            limits=RankLimits(max_model_len=200, transfer_timeout_s=60.0, vocab_size=VOCAB_SIZE),
            metrics=DecodeMetrics(self.registry),
            clock=self.clock,
            order=self.orders.append,
        )
        self.serials = itertools.count()
        self.updates: defaultdict[str, list[ClaimUpdate]] = defaultdict(list)

    def make(
        self, num_prompt: int = 6, max_tokens: int = 16, *, num_output: int = 0
    ) -> DecodeRequest:
        return make_request(
            next(self.serials), num_prompt, max_tokens=max_tokens, num_output=num_output
        )

    def claim(self, request: DecodeRequest) -> Claim:
        """Its writer asks for the ticket; what it is told is kept."""
        claim = claim_of(request, self.updates[request.request_id].append)
        self.rank.claim(claim)
        return claim

    def reserve(
        self, num_prompt: int = 6, max_tokens: int = 16, *, num_output: int = 0
    ) -> DecodeRequest:
        """A request that is claimed as soon as it is reserved."""
        request = self.make(num_prompt, max_tokens, num_output=num_output)
        self.rank.reserve(request)
        self.claim(request)
        return request

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def ticket(self, request: DecodeRequest) -> TicketUpdate:
        update = self.updates[request.request_id][-1]
        assert isinstance(update, TicketUpdate)
        return update

    def arrive(
        self,
        request: DecodeRequest,
        error: TransferFailedError | None = None,
        *,
        first_token: int = 500,
        first_draft: int = NO_DRAFT,
    ) -> None:
        ticket = self.ticket(request)
        self.receiver.awaited.pop(request.request_id, None)
        record = None
        if error is None:
            record = MetadataRecord(
                nonce=ticket.nonce, epoch=1, first_token=first_token, first_draft=first_draft
            )
        self.rank.hand_over.arrived(
            Arrival(
                request_id=request.request_id,
                nonce=ticket.nonce,
                slot=ticket.metadata_slot,
                record=record,
                error=error,
                waited_s=0.5,
            )
        )

    def close(self, request: DecodeRequest, part: int, outcome: decode_pb2.TicketOutcome) -> None:
        assert self.close_all(request, decode_pb2.PartClosure(rank=part, outcome=outcome)) == []

    def close_all(self, request: DecodeRequest, *parts: decode_pb2.PartClosure) -> list[int]:
        """One message about one ticket; the nonces that are not known."""
        closure = decode_pb2.TicketClosure(
            request_id=request.request_id, nonce=request.nonce, parts=parts
        )
        message = decode_pb2.CloseTicketsRequest(
            prefill=identity("prefill-0", 7, 0), closures=[closure]
        )
        return self.rank.hand_over.close_tickets(message)

    def step(self) -> None:
        self.clock.now += 0.1
        plan = self.rank.plan_step()
        self.rank.complete_step(
            plan, [(SampledToken(7, PositionLogprobs(-1.0)),)] * len(plan.requests)
        )

    def bring(self, request: DecodeRequest, status: DecodeStatus) -> None:
        """Move a request to a status by what happens to it in life."""
        self.rank.reserve(request)
        if status is DecodeStatus.RESERVED:
            return
        held = self.pool.allocate(self.pool.num_free_blocks) if status is CLAIMED else []
        self.claim(request)
        self.pool.release(held)
        if status in (CLAIMED, DecodeStatus.WAITING_FOR_KV):
            return
        self.arrive(request)
        if status is not DecodeStatus.WAITING:
            self.step()
        if status is DecodeStatus.PREEMPTED:
            held = self.pool.allocate(self.pool.num_free_blocks)
            while request.status is not DecodeStatus.PREEMPTED:
                self.step()
            self.pool.release(held)

    def last_delta(self) -> tuple[FinishReason | None, ErrorCode | None]:
        deltas = [delta for items in self.rank.news.take().values() for delta in items]
        last = deltas[-1]
        assert sum(delta.finish_reason is not None for delta in deltas) == 1
        return last.finish_reason, None if last.error is None else last.error.code

    def check_empty(self) -> None:
        self.rank.check_integrity()
        assert self.rank.is_empty
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.host.num_blocks == 0
        assert self.receiver.awaited == {}


CLAIMED = DecodeStatus.CLAIMED
LIVE = (
    DecodeStatus.RESERVED,
    CLAIMED,
    DecodeStatus.WAITING_FOR_KV,
    DecodeStatus.WAITING,
    DecodeStatus.RUNNING,
    DecodeStatus.PREEMPTED,
)


@pytest.mark.parametrize("status", LIVE)
def test_abort_in_every_state(status: DecodeStatus) -> None:
    bench = Bench()
    request = bench.make()
    bench.bring(request, status)
    assert request.status is status
    assert bench.rank.live.abort(request.request_id, CANCELLED)
    assert not bench.rank.live.abort(request.request_id, CANCELLED)
    assert bench.last_delta() == (FinishReason.ABORT, ErrorCode.CANCELLED)
    assert bool(bench.orders) == (status is DecodeStatus.WAITING_FOR_KV)
    for order in bench.orders:
        assert order.demand is WriterDemand.REVOKE
        bench.rank.drained(order.nonce)
    bench.check_empty()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (DecodeStatus.RESERVED, "while waiting for prefill-0 to claim KV blocks"),
        (CLAIMED, "while queued for KV blocks"),
        (DecodeStatus.WAITING_FOR_KV, "while waiting for prefill-0 to send the KV"),
        (DecodeStatus.WAITING, "while waiting for a place in the batch"),
        (DecodeStatus.RUNNING, "while decoding, after 2 tokens"),
        (DecodeStatus.PREEMPTED, "while preempted and waiting for KV blocks"),
    ],
)
def test_the_deadline_names_the_wait(status: DecodeStatus, words: str) -> None:
    bench = Bench()
    request = bench.make()
    bench.bring(request, status)
    bench.clock.now = request.budget.until
    bench.rank.plan_step()
    (last,) = [delta for delta in bench.rank.news.take()["router-0"] if delta.error]
    assert last.error is not None
    assert last.error.code is ErrorCode.DEADLINE_EXCEEDED
    assert words in str(last.error)
    assert last.finish_reason is FinishReason.ERROR


def test_growth_of_those_inside_keeps_others_out() -> None:
    bench = Bench(num_usable=8)
    bench.reserve(6, max_tokens=32)  # 2 blocks now, 4 expected on top
    late = bench.reserve(6, max_tokens=2)
    assert isinstance(bench.updates[late.request_id][-1], TicketUpdate)
    last = bench.reserve(6, max_tokens=2)
    assert last.status is CLAIMED
    assert bench.updates[last.request_id] == []


def test_a_small_request_passes_a_large_one_a_few_times_only() -> None:
    bench = Bench(num_usable=8)
    holder = bench.reserve(6, max_tokens=2)
    large = bench.reserve(30, max_tokens=2)
    small = [bench.reserve(1, max_tokens=1) for _ in range(12)]
    for request in small:
        if request.status is not CLAIMED:
            assert bench.rank.live.abort(request.request_id, CANCELLED)
            bench.rank.drained(bench.orders[-1].nonce)
        bench.rank.plan_step()
    let_in = [
        r for r in small if any(isinstance(u, TicketUpdate) for u in bench.updates[r.request_id])
    ]
    assert 0 < len(let_in) == large.num_bypasses < len(small)
    assert bench.rank.live.abort(holder.request_id, CANCELLED)
    bench.rank.drained(bench.orders[-1].nonce)
    bench.rank.plan_step()
    assert large.status is DecodeStatus.WAITING_FOR_KV


def test_sent_by_all_without_an_arrival_is_an_error() -> None:
    bench = Bench()
    request = bench.reserve()
    for part in range(2):
        bench.close(request, part, decode_pb2.TICKET_OUTCOME_SENT)
    bench.step()
    assert request.status is DecodeStatus.WAITING_FOR_KV
    bench.clock.now += 3.0
    bench.step()
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    assert bench.orders == []
    bench.check_empty()


def test_one_failed_part_ends_the_request_and_the_others_are_revoked() -> None:
    bench = Bench()
    request = bench.reserve()
    bench.close(request, 1, decode_pb2.TICKET_OUTCOME_FAILED)
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    # Undrained: nobody but a fence can say that nothing lands any more.
    assert [order.demand for order in bench.orders] == [WriterDemand.FENCE]
    bench.rank.load()
    assert bench.metric("pd_kv_transfer_quarantined_blocks", peer="prefill-0") == 2
    bench.rank.fenced(bench.rank.desk.nonces_of(request.writer))
    bench.rank.load()
    assert bench.metric("pd_kv_transfer_quarantined_blocks", peer="prefill-0") == 0
    failures = {"peer": "prefill-0/1", "cause": "transfer_failed"}
    assert bench.metric("pd_kv_transfer_failures_total", **failures) == 1
    bench.check_empty()


def test_transfers_are_counted_per_peer() -> None:
    bench = Bench()
    request = bench.reserve()
    for rank in (0, 1):
        bench.close(request, rank, decode_pb2.TICKET_OUTCOME_SENT)
    bench.arrive(request)
    assert bench.metric("pd_kv_transfer_arrival_seconds_count", peer="prefill-0") == 1
    for rank in ("0", "1"):
        peer = f"prefill-0/{rank}"
        assert bench.metric("pd_kv_transfer_exposed_seconds_count", peer=peer) == 1
        assert bench.metric("pd_kv_transfer_received_bytes_total", peer=peer) is not None


def test_a_damaged_record_fails_the_request_and_frees_its_blocks() -> None:
    bench = Bench()
    request = bench.reserve()
    bench.arrive(request, TransferFailedError("checksum mismatch"))
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    bench.check_empty()


@pytest.mark.parametrize("first_token", [VOCAB_SIZE, -1, 2**31])
def test_a_first_token_that_the_model_does_not_have_fails_the_request(first_token: int) -> None:
    bench = Bench()
    other, request = bench.reserve(), bench.reserve()
    bench.arrive(request, first_token=first_token)
    assert bench.last_delta() == (FinishReason.ERROR, ErrorCode.TRANSFER_FAILED)
    assert request.status is DecodeStatus.FINISHED
    bench.arrive(other, first_token=VOCAB_SIZE - 1)
    assert other.status is DecodeStatus.WAITING


def test_an_unknown_nonce_is_stale() -> None:
    bench = Bench()
    request = bench.reserve()
    closure = decode_pb2.PartClosure(rank=0, outcome=decode_pb2.TICKET_OUTCOME_FAILED)
    assert bench.close_all(bench.make(), closure) == [102]
    foreign = decode_pb2.PartClosure(rank=2, outcome=decode_pb2.TICKET_OUTCOME_FAILED)
    assert bench.close_all(request, closure, foreign) == [request.nonce]
    assert request.status is DecodeStatus.WAITING_FOR_KV


def test_a_lost_router_takes_its_requests_along_and_nobody_elses() -> None:
    bench = Bench()
    mine, other = bench.reserve(), bench.reserve()
    other.router_id = "router-1"
    for request in (mine, other):
        bench.arrive(request)
    bench.step()
    bench.rank.news.take()
    bench.rank.live.abort_router("router-0")
    assert mine.status is DecodeStatus.FINISHED
    assert other.status is DecodeStatus.RUNNING
    assert set(bench.rank.news.take()) == {"router-0"}


def test_the_last_delta_of_a_finished_request() -> None:
    bench = Bench()
    request = bench.reserve(6, max_tokens=3)
    bench.clock.now += 1.0
    bench.arrive(request)
    bench.step()
    bench.step()
    first, last = bench.rank.news.take()["router-0"]
    assert (first.start_index, last.start_index) == (1, 2)
    assert (first.finish_reason, last.finish_reason) == (None, FinishReason.LENGTH)
    assert first.timings is not None
    assert first.timings.decode_admission_s == pytest.approx(0.1)
    assert last.logprobs == (PositionLogprobs(-1.0),)
    bench.check_empty()


@pytest.mark.parametrize("kind", [InternalError, PeerLostError])
def test_fail_all_answers_every_state(kind: type[TandemError]) -> None:
    bench = Bench(num_usable=12)
    requests = [bench.reserve() for _ in range(3)]
    bench.arrive(requests[0])
    bench.step()
    bench.arrive(requests[1])
    queued, reserved = bench.reserve(40), bench.make()
    bench.rank.reserve(reserved)
    requests += [queued, reserved]
    bench.rank.news.take()
    bench.rank.plan_step()
    in_step = {request.request_id for request in requests if request.request.is_in_step}
    assert len(in_step) == 2
    bench.rank.live.fail_all(lambda one: kind("gone", suspect=one.request.is_in_step))
    deltas = bench.rank.news.take()["router-0"]
    assert {delta.request_id for delta in deltas} == {r.request_id for r in requests}
    rejected = bench.updates[queued.request_id][-1]
    assert isinstance(rejected, RejectedUpdate)
    for error in (rejected.error, *(delta.error for delta in deltas)):
        assert type(error) is kind
        assert error.message == "gone"
        assert error.suspect is (error.request_id in in_step)
    assert len(bench.rank.live) == 0
