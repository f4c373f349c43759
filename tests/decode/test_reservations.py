"""Room is kept for the growth of those inside, rank by rank, and no more than that."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.admission import GrowthEstimator
from decode.requests import ClaimUpdate, DecodeRequest, TicketUpdate
from decode.reservations import RankLimits, Reservations
from decode.tickets import TicketDesk
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from kv_transfer.ownership import Quarantine
from tests.decode.helpers import BLOCK_SIZE, FakeClock, claim_of, make_request
from tests.decode.test_tickets import FakeReceiver, FakeSlots
from worker.lifecycle import DecodeStatus

MAX_MODEL_LEN = 60
SIZES = st.tuples(st.integers(1, 30), st.integers(1, 40))


class Bench:
    """The reservation desk of one rank, and who was let in."""

    def __init__(self, num_usable: int, share: float = 0.5, num_slots: int = 30) -> None:
        clock = FakeClock()
        self.pool = BlockPool(num_usable + 1, BLOCK_SIZE)
        self.slots = FakeSlots(num_slots)
        self.growth = GrowthEstimator(BLOCK_SIZE, MAX_MODEL_LEN, initial_share=share)
        self.desk = TicketDesk(
            self.pool,
            self.slots,
            FakeReceiver(self.slots),
            Quarantine(clock, timeout_s=30.0, max_blocks=num_usable),
            fence_generation=lambda writer: 0,
        )
        limits = RankLimits(max_model_len=MAX_MODEL_LEN, transfer_timeout_s=60.0, vocab_size=1000)
        self.clock = clock
        self.reservations = Reservations(self.pool, self.desk, self.growth, limits, clock)
        self.queued: list[DecodeRequest] = []
        self.inside: list[DecodeRequest] = []

    def claim(self, request: DecodeRequest) -> list[ClaimUpdate]:
        """Reserve and claim; what the claim will be told."""
        updates: list[ClaimUpdate] = []
        self.reservations.add(request)
        self.reservations.claim(claim_of(request, updates.append))
        self.queued.append(request)
        return updates

    def admit(self, *, away: Sequence[DecodeRequest] = ()) -> int:
        """How many were let in."""
        assert self.reservations.admit(self.inside, away=away) == []
        entered = [r for r in self.queued if r.status is DecodeStatus.WAITING_FOR_KV]
        self.queued = [r for r in self.queued if r not in entered]
        self.inside += entered
        return len(entered)

    @property
    def headroom(self) -> int:
        """Blocks that those inside are expected to grow by."""
        return sum(self.growth.expected_blocks(request.request) for request in self.inside)


@settings(deadline=None)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=20),
    num_usable=st.integers(8, 60),
    share=st.floats(0, 1),
)
def test_who_enters_leaves_room_for_the_growth_of_all(
    sizes: list[tuple[int, int]], num_usable: int, share: float
) -> None:
    bench = Bench(num_usable, share)
    for serial, (num_prompt, max_tokens) in enumerate(sizes):
        request = make_request(serial, num_prompt, max_tokens=max_tokens)
        bench.claim(request)
        num_entered = bench.admit()
        if num_entered and len(bench.inside) > 1:
            assert bench.pool.num_free_blocks >= bench.headroom
        for waiting in bench.queued[:1]:  # nobody idles the pool: the head really does not fit
            cost = bench.desk.num_blocks_to_take(waiting)
            budget = bench.pool.num_free_blocks - bench.headroom
            alone = not bench.inside
            grown = 0 if alone else bench.growth.expected_blocks(waiting.request)
            assert cost + grown > budget


@settings(deadline=None)
@given(size=SIZES, num_usable=st.integers(8, 12), share=st.floats(0, 1))
def test_a_request_that_fits_enters_an_empty_rank(
    size: tuple[int, int], num_usable: int, share: float
) -> None:
    """Whatever its growth: with nobody else in, the pool is its own."""
    bench = Bench(num_usable, share)
    request = make_request(0, size[0], max_tokens=size[1])
    bench.claim(request)
    fits = num_blocks_for(size[0] + 1, BLOCK_SIZE) <= num_usable
    assert bench.admit() == fits


def test_the_ranks_decide_each_for_itself() -> None:
    full, empty = Bench(8, share=1.0), Bench(8, share=1.0)
    for bench, count in ((full, 2), (empty, 1)):
        for serial in range(count):
            bench.claim(make_request(serial, 6, max_tokens=20))
        bench.admit()
    assert [len(bench.inside) for bench in (full, empty)] == [1, 1]
    assert [len(bench.queued) for bench in (full, empty)] == [1, 0]


def test_nobody_enters_while_a_preempted_request_waits_or_without_a_slot() -> None:
    bench = Bench(30, num_slots=1)
    updates = [bench.claim(make_request(serial, 3, max_tokens=2)) for serial in range(2)]
    assert bench.admit(away=[make_request(9, 3)]) == 0
    assert bench.admit() == 1
    assert bench.admit() == 0
    assert [len(told) for told in updates] == [1, 0]
    assert isinstance(updates[0][0], TicketUpdate)


def test_who_reserved_first_is_first_whenever_it_is_claimed() -> None:
    bench = Bench(3)
    first, second = make_request(0, 10), make_request(1, 10)
    bench.reservations.add(first)
    bench.claim(second)
    bench.reservations.claim(claim_of(first))
    bench.queued.append(first)
    assert bench.admit() == 1
    assert bench.inside == [first]
    assert second.status is DecodeStatus.CLAIMED


def test_a_reservation_that_nobody_claims_holds_no_block_and_keeps_nobody_out() -> None:
    bench = Bench(3)
    idle = make_request(0, 10)
    bench.reservations.add(idle)
    bench.claim(make_request(1, 10))
    assert bench.admit() == 1
    assert idle.status is DecodeStatus.RESERVED
    assert (bench.reservations.num_reserved, bench.reservations.num_claimed) == (1, 0)


def test_a_queue_that_waits_hashes_no_context_again() -> None:
    bench = Bench(8)
    request = make_request(0, 30)
    request.request.update_block_hashes(BLOCK_SIZE)
    hashes = request.request.block_hashes
    request.request.prompt_token_ids = []  # whoever hashed it now would find other tokens
    bench.claim(request)
    held = bench.pool.allocate(4)
    assert bench.admit() == 0
    bench.pool.release(held)
    bench.reservations.wake()
    assert bench.admit() == 1
    assert request.request.block_hashes is hashes
    assert len(hashes) == 7
