"""Chunked prefill keeps its budgets, starves nobody and loses no block, whatever happens when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from prefill.request import PrefillRequest
from prefill.scheduler import Scheduler
from runtime.errors import InternalError, OutOfBlocksError
from runtime.lifecycle import PrefillStatus
from runtime.sampling import SamplingParams
from tests.prefill.fakes import BLOCK_SIZE, make_item


def make_scheduler(
    num_blocks: int = 33, *, max_num_seqs: int = 4, max_num_batched_tokens: int = 8
) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


Span = tuple[int, int, int]


def run_step(scheduler: Scheduler) -> list[Span]:
    """Compute a step; return (nonce, start, end) of its chunks."""
    chunks = scheduler.schedule()
    spans = [(item.item.nonce, item.scheduled.start, item.scheduled.end) for item in chunks]
    for chunk in chunks:
        scheduler.advance(chunk)
        if chunk.item.request.num_uncomputed_tokens == 0:
            scheduler.stop(chunk.item)
    return spans


def test_a_long_prompt_is_cut_into_chunks_and_the_next_one_fills_up() -> None:
    scheduler = make_scheduler()
    for nonce, num_tokens in ((1, 18), (2, 3), (3, 20)):
        scheduler.add(make_item(nonce, num_tokens))
    assert run_step(scheduler) == [(1, 0, 8)]
    assert run_step(scheduler) == [(1, 8, 16)]
    assert run_step(scheduler) == [(1, 16, 18), (2, 0, 3), (3, 0, 3)]
    assert [item.status for item in scheduler.sending.values()] == [PrefillStatus.SENDING] * 2


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=100)
    for nonce in (1, 2, 3):
        scheduler.add(make_item(nonce))
    assert len(scheduler.schedule()) == 2
    assert len(scheduler.waiting) == 1


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
    if item.status is PrefillStatus.WAITING:
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
        st.tuples(st.just("step")),
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

    def step() -> None:
        spans = run_step(scheduler)
        assert sum(end - start for _, start, end in spans) <= max_tokens
        assert len({nonce for nonce, _, _ in spans}) == len(spans) <= max_num_seqs
        assert spans or not scheduler.running
        for nonce, start, end in spans:
            assert start < end == items[nonce - 1].request.num_computed_tokens
        for item in scheduler.running:
            assert len(item.request.block_table) == item.num_prompt_blocks(BLOCK_SIZE)
        scheduler.pool.check_integrity()

    for event in events:
        match event:
            case ("add", int(num_tokens), int(family), bool(wants_logprobs)):
                prefix = [family] * min(num_tokens // 2, 12)
                sampling = SamplingParams(num_prompt_logprobs=0 if wants_logprobs else -1)
                item = make_item(len(items) + 1, num_tokens, prefix=prefix, sampling=sampling)
                if item.num_prompt_blocks(BLOCK_SIZE) <= num_blocks - 1:
                    scheduler.add(item)
                    items.append(item)
            case ("end", int(index)) if items:
                end_somehow(scheduler, items[index % len(items)])
            case ("step",):
                step()
            case ("drain",):
                for item in list(scheduler.sending.values()):
                    scheduler.finish(item)
    for _ in range(sum(item.request.num_prompt_tokens for item in items) + 1):
        step()
        for item in list(scheduler.sending.values()):
            scheduler.finish(item)
    assert all(item.status is PrefillStatus.FINISHED for item in items)
    assert scheduler.num_tokens_waiting == 0
    scheduler.check_integrity()
