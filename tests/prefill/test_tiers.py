"""Tiers in prefill: who is claimed and computed first, and that nobody with a share starves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.block_pool import BlockPool
from prefill.request import PrefillRequest
from prefill.scheduler import Scheduler
from prefill.service import make_item as item_of_call
from prefill.validation import RunLimits
from runtime.budget import Budget, BudgetKind
from runtime.pb import common_pb2, prefill_pb2
from runtime.rpc.wire import standing_to_proto
from runtime.sampling import SamplingParams
from runtime.tiers import Standing, TierTokens, tokens_ahead
from tests.prefill.fakes import BLOCK_SIZE, make_grant, make_item
from tests.prefill.test_scheduler import claim, compute, grant, run_step

BEST = Standing(tier="max", order=0, share=0.5)
BASE = Standing(tier="base", order=1, share=0.25)
REST = Standing(tier="rest", order=2)


def make_scheduler(num_blocks: int = 2000, *, seqs: int = 4, tokens: int = 8) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    return Scheduler(pool, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def add(
    scheduler: Scheduler, nonce: int, standing: Standing, num_tokens: int = 8
) -> PrefillRequest:
    item = make_item(nonce, num_tokens)
    item.standing = standing
    scheduler.add(item)
    return item


def test_the_queue_is_in_order_of_tiers_then_priorities_then_age() -> None:
    scheduler = make_scheduler()
    late = Standing(tier="max", order=0, share=0.5, priority=1)
    for nonce, standing in ((1, REST), (2, BASE), (3, late), (4, BEST), (5, BASE), (6, BEST)):
        add(scheduler, nonce, standing)
    assert [item.nonce for item in scheduler.waiting] == [4, 6, 3, 2, 5, 1]


def test_a_step_is_the_first_tiers_but_for_the_shares_of_others() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, REST, 40)
    add(scheduler, 2, BASE, 40)
    assert run_step(scheduler) == [(2, 0, 8)]
    add(scheduler, 3, BEST, 12)
    assert run_step(scheduler) == [(3, 0, 6), (2, 8, 10)]
    assert run_step(scheduler) == [(3, 6, 12), (2, 10, 12)]
    assert run_step(scheduler) == [(2, 12, 20)]


def test_claims_of_those_behind_do_not_stand_in_the_way() -> None:
    scheduler = make_scheduler(seqs=2)
    for nonce in range(1, 9):
        add(scheduler, nonce, REST, 4)
    assert claim(scheduler) == [1, 2]
    add(scheduler, 9, BEST, 4)
    assert claim(scheduler) == [9]


def test_a_share_is_claimed_though_those_before_fill_every_step() -> None:
    scheduler = make_scheduler(seqs=4, tokens=400)
    for nonce in range(1, 20):
        add(scheduler, nonce, BEST, 4)
    add(scheduler, 20, REST, 4)
    add(scheduler, 21, BASE, 4)
    add(scheduler, 22, BASE, 4)
    assert claim(scheduler) == [1, 2, 3, 4, 21]
    grant(scheduler)
    assert [nonce for nonce, _, _ in compute(scheduler)] == [1, 2, 3, 21]


def test_the_queue_behind_a_long_one_of_the_first_tier_is_seen() -> None:
    scheduler = make_scheduler(seqs=1, tokens=400)
    for nonce in range(1, 200):
        add(scheduler, nonce, BEST, 4)
    add(scheduler, 200, BASE, 4)
    assert 200 in claim(scheduler)


def test_a_long_chunk_behind_waits_for_a_first_token_that_is_due() -> None:
    scheduler = make_scheduler(seqs=4, tokens=800)
    for size in (100, 800):
        scheduler.steps.observe(size, size * 0.001)  # 1 ms a token
    add(scheduler, 1, REST, 2000)
    due = Standing(tier="max", order=0, share=0.5, ttft_s=0.3)
    add(scheduler, 2, due, 100)
    scheduler.claim(1000.0)
    grant(scheduler)
    spans = {chunk.item.nonce: chunk.scheduled.end for chunk in scheduler.schedule(1000.0)}
    assert spans[2] == 100
    assert spans[1] == pytest.approx(200, abs=1)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_call_says_where_its_request_stands(is_told: bool) -> None:
    standing = Standing(tier="max", order=3, priority=-2, share=0.5, ttft_s=1.5, tpot_s=0.03)
    request = prefill_pb2.RunRequest(
        request_id="r",
        context_token_ids=[1, 2, 3],
        standing=standing_to_proto(standing) if is_told else None,
    )
    limits = RunLimits(
        identity=common_pb2.WorkerIdentity(instance="prefill-0", epoch=1),
        block_size=BLOCK_SIZE,
        max_model_len=64,
        vocab_size=100,
        max_top_logprobs=1,
    )
    budget = Budget.start(BudgetKind.REQUEST, 10.0, 5.0)
    item = item_of_call(request, SamplingParams(max_tokens=4), budget, 5.0, limits)
    assert item.standing == (standing if is_told else Standing())
    assert item.due_at == (6.5 if is_told else float("inf"))


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(1, 60)), min_size=1, max_size=25
)


@settings(max_examples=100, deadline=None)
@given(ARRIVALS, st.integers(3, 6), st.integers(4, 40))
def test_all_end_each_tier_has_its_share_and_no_step_is_idle(
    arrivals: list[tuple[int, int, int]], seqs: int, tokens: int
) -> None:
    scheduler = make_scheduler(seqs=seqs, tokens=tokens)
    shares = (0.5, 0.25, 0.0)
    items = {
        nonce: add(
            scheduler, nonce, Standing(order=order, priority=priority, share=shares[order]), size
        )
        for nonce, (order, priority, size) in enumerate(arrivals, start=1)
    }
    for _ in range(2 + sum(size for _, _, size in arrivals)):
        if not scheduler.num_tokens_waiting:
            break
        scheduler.claim(0.0)
        for nonce in list(scheduler.claiming):
            scheduler.grant(scheduler.claiming[nonce], make_grant(nonce))
        spans = compute(scheduler)
        assert spans, "somebody waits, and nobody is computed"
        tiers = {items[nonce].standing.order for nonce, _, _ in spans}
        assert {item.standing.order for item in scheduler.running if item.standing.share} <= tiers
    assert scheduler.num_tokens_waiting == 0
    for item in list(scheduler.sending.values()):
        scheduler.finish(item)
    scheduler.check_integrity()


def test_says_what_waits_by_tier() -> None:
    scheduler = make_scheduler()
    assert scheduler.tokens_by_tier() == ()
    add(scheduler, 1, REST, 40)
    add(scheduler, 2, BASE, 30)
    add(scheduler, 3, BASE, 10)
    assert scheduler.tokens_by_tier() == (TierTokens(1, 0.25, 40), TierTokens(2, 0.0, 40))
    assert run_step(scheduler) == [(2, 0, 4), (3, 0, 4)]
    assert scheduler.tokens_by_tier() == (TierTokens(1, 0.25, 32), TierTokens(2, 0.0, 40))
    assert scheduler.num_tokens_waiting == 72


def test_a_tier_is_computed_after_as_many_tokens_as_were_said() -> None:
    scheduler = make_scheduler(tokens=8)
    for nonce, standing in ((1, REST), (2, BASE), (3, BASE)):
        add(scheduler, nonce, standing, 200)
    best = add(scheduler, 4, BEST, 96)
    said = tokens_ahead(scheduler.tokens_by_tier(), BEST.order)
    num_tokens = 0
    while best.request.num_uncomputed_tokens:
        num_tokens += sum(end - start for _, start, end in run_step(scheduler))
    assert said == pytest.approx(96 / 0.75)
    assert num_tokens == pytest.approx(said, abs=8)
