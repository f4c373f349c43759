"""Chunked prefill keeps its budgets, starves nobody and loses no block, whatever happens when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from prefill.request import PrefillRequest
from prefill.scheduler import CLAIM_PATIENCE_S, Scheduler
from runtime.errors import InternalError, OutOfBlocksError
from runtime.sampling import SamplingParams
from tests.prefill.fakes import BLOCK_SIZE, make_grant, make_item
from worker.lifecycle import PrefillStatus


def make_scheduler(
    num_blocks: int = 33, *, max_num_seqs: int = 4, max_num_batched_tokens: int = 8
) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


Span = tuple[int, int, int]


def claim(scheduler: Scheduler, now: float = 0.0) -> list[int]:
    """The nonces that decode is to be asked for."""
    return [item.nonce for item in scheduler.claim(now)]


def grant(scheduler: Scheduler, *nonces: int) -> None:
    """Decode has room for these, or for all."""
    for nonce in nonces or list(scheduler.claiming):
        scheduler.grant(scheduler.claiming[nonce], make_grant(nonce))


def run_step(scheduler: Scheduler) -> list[Span]:
    """Have decode give what it is asked for, compute a step; (nonce, start, end) of its chunks."""
    scheduler.claim(0.0)
    grant(scheduler)
    return compute(scheduler)


def compute(scheduler: Scheduler) -> list[Span]:
    """Compute a step of what has a ticket."""
    chunks = scheduler.schedule()
    spans = [(item.item.nonce, item.scheduled.start, item.scheduled.end) for item in chunks]
    for chunk in chunks:
        scheduler.advance(chunk)
        if chunk.item.request.num_uncomputed_tokens == 0:
            scheduler.stop(chunk.item)
    return spans


def test_a_long_prompt_is_cut_into_chunks_and_short_ones_do_not_wait_for_its_end() -> None:
    scheduler = make_scheduler()
    for nonce, num_tokens in ((1, 18), (2, 3), (3, 20)):
        scheduler.add(make_item(nonce, num_tokens))
    assert run_step(scheduler) == [(1, 0, 5), (2, 0, 3)]
    assert run_step(scheduler) == [(1, 5, 13)]
    assert run_step(scheduler) == [(1, 13, 18), (3, 0, 3)]
    assert [item.status for item in scheduler.sending.values()] == [PrefillStatus.SENDING] * 2


def test_no_step_has_more_than_max_num_seqs() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=100)
    for nonce in (1, 2, 3):
        scheduler.add(make_item(nonce))
    assert claim(scheduler) == [1, 2]
    grant(scheduler)
    assert len(scheduler.schedule()) == 2
    assert claim(scheduler) == [3]


def test_no_more_than_two_steps_of_tokens_are_claimed_ahead() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    for nonce in range(1, 9):
        scheduler.add(make_item(nonce, 6))
    assert claim(scheduler) == [1, 2, 3]
    assert claim(scheduler) == []
    grant(scheduler, 1, 2)
    assert claim(scheduler) == [], "they have a ticket and have not begun"
    assert compute(scheduler) == [(1, 0, 6), (2, 0, 2)]
    assert claim(scheduler) == [4], "two more steps: the rest of 2, and 3, and 4"
    assert scheduler.waiting[0].request.block_table == []


def test_short_prompts_are_claimed_past_long_ones_whose_turn_is_far() -> None:
    scheduler = make_scheduler(num_blocks=200)
    for nonce, num_tokens in ((1, 100), (2, 100), (3, 100), (4, 3), (5, 3)):
        scheduler.add(make_item(nonce, num_tokens))
    assert run_step(scheduler) == [(1, 0, 4), (4, 0, 3), (5, 0, 1)]
    assert [item.nonce for item in scheduler.waiting] == [2, 3]
    assert run_step(scheduler) == [(1, 4, 10), (5, 1, 3)]


def test_who_has_waited_before_is_queued_by_its_whole_wait() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=1, max_num_batched_tokens=8)
    for nonce, arrived_at, waited_s in (
        (1, 10.0, 0.0),
        (2, 11.0, 0.0),
        (3, 12.0, 1.5),
        (4, 13.0, 9.0),
    ):
        item = make_item(nonce, 8)
        item.arrived_at, item.waited_s = arrived_at, waited_s
        scheduler.add(item)
    assert [item.nonce for item in scheduler.waiting] == [4, 1, 3, 2]
    assert [span[0] for _ in range(4) for span in run_step(scheduler)] == [4, 1, 3, 2]


def test_a_long_prompt_whose_prefix_is_cached_is_a_short_one() -> None:
    scheduler = make_scheduler(num_blocks=200)
    prefix = list(range(40))
    scheduler.add(make_item(1, 42, prefix=prefix))
    while scheduler.num_tokens_waiting:
        run_step(scheduler)
    scheduler.add(make_item(2, 100))
    scheduler.add(make_item(3, 42, prefix=prefix))
    assert run_step(scheduler) == [(2, 0, 6), (3, 40, 42)]


def test_what_waits_for_room_in_decode_is_passed_and_keeps_its_place() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_batched_tokens=8)
    for nonce in (1, 2, 3, 4):
        scheduler.add(make_item(nonce, 8))
    assert claim(scheduler) == [1]
    assert claim(scheduler, CLAIM_PATIENCE_S / 2) == []
    assert claim(scheduler, CLAIM_PATIENCE_S) == [2]
    grant(scheduler, 2)
    assert compute(scheduler) == [(2, 0, 8)]
    assert claim(scheduler, CLAIM_PATIENCE_S) == [3]
    grant(scheduler, 3)
    grant(scheduler, 1)
    assert compute(scheduler) == [(1, 0, 8)], "the oldest comes first once it has room"
    assert compute(scheduler) == [(3, 0, 8)]


def test_claims_that_wait_cannot_take_all_blocks() -> None:
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=2)
    for nonce in range(1, 20):
        scheduler.add(make_item(nonce, 4))
    claimed: list[int] = []
    for turn in range(10):
        claimed += claim(scheduler, turn * CLAIM_PATIENCE_S)
    assert claimed == [1, 2, 3, 4]
    scheduler.drop(scheduler.claiming[2])
    assert claim(scheduler, 100.0) == [5]


def test_a_claim_that_is_given_up_gives_its_blocks_back() -> None:
    scheduler = make_scheduler()
    item = make_item(1, 10)
    scheduler.add(item)
    claim(scheduler)
    assert len(item.request.block_table) == 3
    scheduler.drop(item)
    assert item.status is PrefillStatus.FINISHED
    scheduler.check_integrity()


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_item(1, 3 * BLOCK_SIZE))
    with pytest.raises(OutOfBlocksError, match=r"needs 4 KV blocks and the worker has 3"):
        scheduler.add(make_item(2, 3 * BLOCK_SIZE + 1))
    assert scheduler.num_requests == 1


def test_the_head_waits_for_blocks_and_nobody_overtakes_it() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=100)
    first, large, small = make_item(1, 12), make_item(2, 16), make_item(3, 4)
    for item in (first, large, small):
        scheduler.add(item)
    assert run_step(scheduler) == [(1, 0, 12)]
    assert claim(scheduler) == []
    assert run_step(scheduler) == []  # the sending request still holds its blocks
    scheduler.finish(first)
    assert run_step(scheduler) == [(2, 0, 16), (3, 0, 4)]


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    prefix = list(range(10))
    first, second = make_item(1, 12, prefix=prefix), make_item(2, 15, prefix=prefix)
    scheduler.add(first)
    run_step(scheduler)
    scheduler.add(second)
    assert run_step(scheduler) == [(2, 8, 15)]
    assert second.request.num_cached_tokens == 8
    assert second.request.block_table[:2] == first.request.block_table[:2]
    scheduler.finish(first)
    scheduler.finish(second)
    scheduler.check_integrity()


def test_requests_that_came_together_compute_the_prefix_that_they_share_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    prefix = list(range(8))
    items = [make_item(nonce, 12, prefix=prefix) for nonce in (1, 2)]
    for item in items:
        scheduler.add(item)
    assert claim(scheduler) == [1, 2]
    grant(scheduler)
    assert compute(scheduler) == [(1, 0, 12)]
    assert compute(scheduler) == [(2, 8, 12)]
    assert items[1].request.num_cached_tokens == 8
    assert items[1].request.block_table[:2] == items[0].request.block_table[:2]
    for item in items:
        scheduler.finish(item)
    scheduler.check_integrity()


@pytest.mark.parametrize(("salt", "num_cached"), [("alice\0", 8), ("bob\0", 0), ("", 0)])
@pytest.mark.parametrize("together", [False, True])
def test_a_prefix_is_shared_by_requests_of_one_salt_only(
    salt: str, num_cached: int, together: bool
) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=12)
    prefix = list(range(10))
    first, second = make_item(1, 12, prefix=prefix), make_item(2, 15, prefix=prefix)
    first.request.cache_salt, second.request.cache_salt = "alice\0", salt
    scheduler.add(first)
    if not together:
        run_step(scheduler)
    scheduler.add(second)
    while 2 not in scheduler.sending:
        assert run_step(scheduler)
    assert second.request.num_cached_tokens == num_cached
    shared = set(first.request.block_table) & set(second.request.block_table)
    assert bool(shared) == bool(num_cached)


def test_a_prompt_that_is_cached_as_a_whole_still_computes_its_last_block() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    prefix = list(range(8))
    for nonce in (1, 2):
        scheduler.add(make_item(nonce, 8, prefix=prefix))
        run_step(scheduler)
    assert scheduler.sending[2].request.num_cached_tokens == 4


def test_prompt_logprobs_are_computed_for_cached_positions_too() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=100)
    prefix = list(range(12))
    scheduler.add(make_item(1, 12, prefix=prefix))
    run_step(scheduler)
    wanted = SamplingParams(num_prompt_logprobs=0)
    scheduler.add(make_item(2, 12, prefix=prefix, sampling=wanted))
    assert run_step(scheduler) == [(2, 0, 12)]


def test_blocks_that_nobody_answers_for_are_noticed() -> None:
    scheduler = make_scheduler()
    scheduler.check_integrity()
    scheduler.pool.allocate(2)
    with pytest.raises(InternalError, match="2 KV blocks are held and no request is left"):
        scheduler.check_integrity()


def end_somehow(scheduler: Scheduler, item: PrefillRequest) -> None:
    if item.status in (PrefillStatus.WAITING, PrefillStatus.CLAIMING):
        scheduler.drop(item)
    elif item.status is PrefillStatus.RUNNING:
        scheduler.stop(item)
    elif item.status is PrefillStatus.SENDING:
        scheduler.finish(item)


arrivals = st.tuples(st.just("add"), st.integers(1, 60), st.integers(0, 3), st.booleans())
happenings = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("grant"), st.integers(0, 30)),
        st.tuples(st.just("step")),
        st.tuples(st.just("wait")),
        st.tuples(st.just("drain")),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(happenings, st.integers(2, 20), st.integers(1, 4), st.integers(1, 24))
def test_anything_at_any_time_ends_with_every_request_over_and_every_block_back(
    events: list[tuple[object, ...]], num_blocks: int, max_num_seqs: int, max_tokens: int
) -> None:
    scheduler = make_scheduler(
        num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens
    )
    items: list[PrefillRequest] = []
    now = 0.0

    def step() -> None:
        spans = compute(scheduler)
        assert sum(end - start for _, start, end in spans) <= max_tokens
        assert len({nonce for nonce, _, _ in spans}) == len(spans) <= max_num_seqs
        assert spans or not scheduler.running
        for nonce, start, end in spans:
            assert start < end == items[nonce - 1].request.num_computed_tokens
        for item in (*scheduler.running, *scheduler.claiming.values()):
            assert len(item.request.block_table) == item.num_context_blocks(BLOCK_SIZE)
        assert [item.place for item in scheduler.running] == sorted(
            item.place for item in scheduler.running
        )
        scheduler.claim(now)
        assert len(scheduler.claiming) <= 2 * max_num_seqs
        assert not any(item.request.block_table for item in scheduler.waiting)
        scheduler.pool.check_integrity()

    for event in events:
        match event:
            case ("add", int(num_tokens), int(family), bool(wants_logprobs)):
                prefix = [family] * min(num_tokens // 2, 12)
                sampling = SamplingParams(num_prompt_logprobs=0 if wants_logprobs else -1)
                item = make_item(len(items) + 1, num_tokens, prefix=prefix, sampling=sampling)
                if item.num_context_blocks(BLOCK_SIZE) <= num_blocks - 1:
                    scheduler.add(item)
                    items.append(item)
            case ("end", int(index)) if items:
                end_somehow(scheduler, items[index % len(items)])
            case ("grant", int(index)) if scheduler.claiming:
                nonces = list(scheduler.claiming)
                grant(scheduler, nonces[index % len(nonces)])
            case ("step",):
                step()
            case ("wait",):
                now += CLAIM_PATIENCE_S
            case ("drain",):
                for item in list(scheduler.sending.values()):
                    scheduler.finish(item)
    for _ in range(sum(item.request.num_context_tokens for item in items) + len(items) + 1):
        step()
        grant(scheduler)
        for item in list(scheduler.sending.values()):
            scheduler.finish(item)
    assert all(item.status is PrefillStatus.FINISHED for item in items)
    assert scheduler.num_tokens_waiting == 0
    scheduler.check_integrity()
