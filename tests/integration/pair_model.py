"""A prefill worker, decode ranks and their clients in time that is only counted.

The queues, pools and rules are the workers' own (`prefill.scheduler`, `decode.rank`); devices,
transfers and the network are durations. So one sees what the rules alone cost a pair, the same on
every machine, and what a device that stands still for once does to it. Not modelled: the CPU time
of the processes, and steps launched ahead.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from decode.metrics import DecodeMetrics
from decode.offload import HostBlockStore
from decode.rank import DecodeRank
from decode.requests import ClaimUpdate, DecodeRequest, TicketUpdate
from decode.reservations import RankLimits
from decode.scheduler import DecodeScheduler
from decode.tickets import TicketDesk
from engine.memory.block_pool import BlockPool
from engine.request import Request
from engine.sampling.inputs import SampledToken
from kv_transfer.metadata import MetadataRecord
from kv_transfer.ownership import Quarantine
from kv_transfer.receiver import Arrival
from kv_transfer.ticket import PeerEndpoint, SendTicket
from prefill.request import Chunk, Grant, PrefillRequest
from prefill.scheduler import Scheduler
from runtime.budget import Budget, BudgetKind
from runtime.sampling import SamplingParams
from tests.decode.helpers import WRITER, FakeClock, FakeKV, claim_of
from tests.decode.test_tickets import FakeReceiver, FakeSlots

BLOCK_SIZE = 64
_PEER = PeerEndpoint(peer="decode", endpoint=b"", kv_region_bytes=1, metadata_region_bytes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairShape:
    """Sizes as of `bench pair`, and what things take, in seconds."""

    prompt_len: int = 1024
    output_len: int = 64
    batch: int = 32
    num_ranks: int = 2
    in_flight: int = 80
    batch_tokens: int = 8192
    decode_blocks: int = 4096
    prefill_blocks: int = 1024
    prefill_step_s: float = 0.008
    prefill_token_s: float = 6.6e-6
    decode_step_s: float = 0.013
    decode_request_s: float = 3e-5
    transfer_s: float = 0.008
    network_s: float = 0.005
    stall_at: float = float("inf")
    """The first prefill step from this moment on takes `stall_s` longer."""
    stall_s: float = 0.0


class DecodeSide:
    """One rank, with doubles for everything below its rules."""

    def __init__(self, shape: PairShape, clock: FakeClock) -> None:
        self.pool = BlockPool(shape.decode_blocks + 1, BLOCK_SIZE)
        slots = FakeSlots(4 * shape.in_flight)
        self.receiver = FakeReceiver(slots)
        desk = TicketDesk(
            self.pool,
            slots,
            self.receiver,
            Quarantine(clock, timeout_s=30.0, max_blocks=shape.decode_blocks),
            fence_generation=lambda writer: 0,
        )
        most = shape.prompt_len + shape.output_len
        host = HostBlockStore(FakeKV(shape.decode_blocks + 1), 10_000)
        self.scheduler = DecodeScheduler(
            self.pool, host, max_num_seqs=shape.batch, max_model_len=most
        )
        limits = RankLimits(max_model_len=most, transfer_timeout_s=1e6, vocab_size=1000)
        self.rank = DecodeRank(
            self.pool,
            desk,
            self.scheduler,
            limits=limits,
            metrics=DecodeMetrics(CollectorRegistry()),
            clock=clock,
            order=lambda order: None,
        )


class PairModel:
    """Run it with `measure`; every client sends again as soon as it has its answer."""

    def __init__(self, shape: PairShape) -> None:
        self.shape = shape
        self.clock = FakeClock()
        self.began = self.clock.now
        self.sides = [DecodeSide(shape, self.clock) for _ in range(shape.num_ranks)]
        self.prefill = Scheduler(
            BlockPool(shape.prefill_blocks + 1, BLOCK_SIZE),
            max_num_seqs=16,
            max_num_batched_tokens=shape.batch_tokens,
        )
        self.finished: list[float] = []
        self.tokens: list[tuple[float, int]] = []
        self.queue_s: list[float] = []
        """Of each request, from its arrival at prefill to its first chunk."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._serials = itertools.count(1)
        self._prefill_is_busy = False
        self._decode_is_busy = False
        self._has_stalled = False
        self._is_draining = False
        self._reserved: dict[int, tuple[DecodeSide, DecodeRequest]] = {}
        self._tickets: dict[int, TicketUpdate] = {}

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self.clock.now - self.began

    def measure(self, window_s: float) -> float:
        """Requests per second by tokens, from when as many have ended as are in flight."""
        for _ in range(self.shape.in_flight):
            self._send()
        self._run(lambda: len(self.finished) >= self.shape.in_flight)
        began = self.seconds
        self._run(lambda: self.seconds >= began + window_s)
        tokens = sum(count for moment, count in self.tokens if moment > began)
        return tokens / self.shape.output_len / (self.seconds - began)

    def drain(self) -> None:
        """Let everything come to its end, and check that nothing is held."""
        self._is_draining = True
        self._run(lambda: False)
        self.prefill.check_integrity()
        assert self.prefill.num_requests == 0
        for side in self.sides:
            assert side.rank.is_empty
            side.rank.check_integrity()

    def _run(self, is_over: Callable[[], bool]) -> None:
        while self._events and not is_over():
            at, _, action = heapq.heappop(self._events)
            self.clock.now = self.began + at
            action()

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.seconds + delay_s, next(self._order), action))

    def _send(self) -> None:
        serial = next(self._serials)
        side = self.sides[serial % len(self.sides)]
        budget = Budget.start(BudgetKind.REQUEST, float("inf"), self.clock.now)
        decode = DecodeRequest(
            request=self._request(serial),
            serial=serial,
            router_id="router",
            nonce=serial,
            writer=WRITER,
            budget=budget,
        )
        self._reserved[serial] = side, decode

        def arrive() -> None:
            item = PrefillRequest(
                request=self._request(serial),
                nonce=serial,
                budget=budget,
                arrived_at=self.clock.now,
            )
            self.prefill.add(item)
            self._start_prefill()

        def reserve() -> None:
            side.rank.reserve(decode)
            self._after(self.shape.network_s, arrive)

        self._after(self.shape.network_s, reserve)

    def _ask_for_room(self) -> None:
        for item in self.prefill.claim(self.clock.now):
            side, decode = self._reserved[item.nonce]
            claim = claim_of(decode, partial(self._told, item))
            self._after(self.shape.network_s, partial(side.rank.claim, claim))

    def _request(self, serial: int) -> Request:
        return Request(
            request_id=f"request-{serial}",
            prompt_token_ids=[serial] * self.shape.prompt_len,
            sampling=SamplingParams(max_tokens=self.shape.output_len),
        )

    def _told(self, item: PrefillRequest, update: ClaimUpdate) -> None:
        if not isinstance(update, TicketUpdate):
            return
        self._tickets[item.nonce] = update
        ticket = SendTicket(
            request_id=item.request_id,
            nonce=item.nonce,
            epoch=1,
            block_ids=update.block_ids,
            slot=update.metadata_slot,
            timeout_s=1e6,
        )

        def granted() -> None:
            self.prefill.grant(item, Grant(ticket=ticket, peer=_PEER))
            self._start_prefill()

        self._after(self.shape.network_s, granted)

    def _start_prefill(self) -> None:
        chunks = [] if self._prefill_is_busy else self.prefill.schedule()
        self._ask_for_room()
        if not chunks:
            return
        self._prefill_is_busy = True
        for chunk in chunks:
            if chunk.item.started_at == 0.0:
                chunk.item.started_at = self.clock.now
                self.queue_s.append(self.clock.now - chunk.item.arrived_at)
        num_tokens = sum(chunk.scheduled.num_scheduled_tokens for chunk in chunks)
        seconds = self.shape.prefill_step_s + num_tokens * self.shape.prefill_token_s
        if self.seconds >= self.shape.stall_at and not self._has_stalled:
            self._has_stalled = True
            seconds += self.shape.stall_s
        self._after(seconds, lambda: self._end_prefill(chunks))

    def _end_prefill(self, chunks: list[Chunk]) -> None:
        self._prefill_is_busy = False
        for chunk in chunks:
            self.prefill.advance(chunk)
            if chunk.is_last:
                self.prefill.stop(chunk.item)
                self._count(1)
                self._after(self.shape.transfer_s, self._landed(chunk.item))
        self._start_prefill()

    def _landed(self, item: PrefillRequest) -> Callable[[], None]:
        def landed() -> None:
            self.prefill.finish(item)
            side, request = self._reserved[item.nonce]
            update = self._tickets[item.nonce]
            side.receiver.awaited.pop(request.request_id)
            record = MetadataRecord(nonce=update.nonce, epoch=1, first_token=5)
            side.rank.hand_over.arrived(
                Arrival(
                    request_id=request.request_id,
                    nonce=update.nonce,
                    slot=update.metadata_slot,
                    record=record,
                    error=None,
                    waited_s=0.0,
                )
            )
            self._start_decode()
            self._start_prefill()

        return landed

    def _start_decode(self) -> None:
        """The ranks step together, as those of one instance do."""
        if self._decode_is_busy:
            return
        plans = [(side, side.rank.plan_step()) for side in self.sides]
        largest = max(len(plan.requests) for _, plan in plans)
        if not largest:
            return
        self._decode_is_busy = True

        def end() -> None:
            self._decode_is_busy = False
            for side, plan in plans:
                tokens = [(SampledToken(6),)] * len(plan.requests)
                self._count(side.rank.complete_step(plan, tokens))
                for _ in self._ended(side):
                    self.finished.append(self.seconds)
                    if not self._is_draining:
                        self._send()
            self._start_decode()

        seconds = self.shape.decode_step_s + largest * self.shape.decode_request_s
        self._after(seconds, end)

    def _ended(self, side: DecodeSide) -> Iterator[str]:
        for deltas in side.rank.news.take().values():
            yield from (delta.request_id for delta in deltas if delta.finish_reason is not None)

    def _count(self, num_tokens: int) -> None:
        self.tokens.append((self.seconds, num_tokens))
