"""Tiers in a decode rank: who is let in, who runs, who yields, and that nobody starves."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from decode.admission import AdmissionQueue
from decode.requests import DecodeRequest
from engine.request import num_blocks_for
from runtime.tiers import Standing
from tests.decode.helpers import BLOCK_SIZE, make_request
from tests.decode.test_scheduler import Bench, must
from worker.lifecycle import DecodeStatus

BEST = Standing(tier="max", order=0, share=0.5, tpot_s=0.030)
BASE = Standing(tier="base", order=1, share=0.25)
REST = Standing(tier="rest", order=2)


def cost_of(request: DecodeRequest) -> int:
    return request.request.num_prompt_tokens


def claimed(queue: AdmissionQueue, *requests: tuple[Standing, int]) -> list[DecodeRequest]:
    """Requests by standing and cost, in the order in which they came."""
    found = []
    for serial, (standing, cost) in enumerate(requests):
        request = make_request(serial, cost)
        request.standing = standing
        queue.push(request)
        found.append(request)
    return found


class TierBench(Bench):
    """A scheduler whose requests have standings."""

    def add_of(
        self, standing: Standing, num_prompt: int = 3, max_tokens: int = 50
    ) -> DecodeRequest:
        request = must(self.add(num_prompt, max_tokens=max_tokens))
        self.scheduler.waiting.remove(request)
        request.standing = standing
        self.scheduler.add(request)
        return request


def test_blocks_go_to_the_first_tier_and_by_share_to_others() -> None:
    queue = AdmissionQueue()
    requests = claimed(queue, *[(REST, 2)] * 2, *[(BASE, 2)] * 10, *[(BEST, 2)] * 30)
    picked = [queue.pick(cost_of, 2) for _ in requests]
    orders = [request.standing.order for request in picked if request is not None]
    assert orders[:5] == [0, 0, 0, 0, 1], "a quarter, as soon as four have made it due"
    assert 4 <= orders[:20].count(1) <= 5
    assert orders[-2:] == [2, 2]


def test_a_tier_behind_passes_one_without_a_target_only() -> None:
    queue = AdmissionQueue()
    large, small = claimed(queue, (BEST, 9), (REST, 1))
    assert queue.pick(cost_of, 5) is None
    assert queue.pick(cost_of, 9) is large
    queue = AdmissionQueue(max_bypasses=1)
    large, small, other = claimed(queue, (BASE, 9), (REST, 1), (REST, 1))
    assert queue.pick(cost_of, 5) is small
    assert large.num_bypasses == 1
    assert queue.pick(cost_of, 5) is None
    assert list(queue) == [large, other]


def test_who_is_away_keeps_his_own_tier_out_and_not_those_before() -> None:
    queue = AdmissionQueue()
    best, base, rest = claimed(queue, (BEST, 1), (BASE, 1), (REST, 1))
    away = make_request(9, 3)
    away.standing = BASE
    assert queue.pick(cost_of, 9, [away]) is best
    assert queue.pick(cost_of, 9, [away]) is None
    assert list(queue) == [base, rest]


def test_who_is_away_comes_back_before_others_have_more_than_their_turn() -> None:
    queue = AdmissionQueue()
    claimed(queue, *[(BEST, 1)] * 40)
    away = make_request(99, 4)
    away.standing = BASE
    let_in = 0
    while queue.pick(cost_of, 9, [away]) is not None:
        let_in += 1
    assert let_in == 16, "a quarter of them is what it needs"


def test_the_last_of_the_last_tier_yields_its_blocks() -> None:
    bench = TierBench(4)
    base, best, rest = bench.add_of(BASE), bench.add_of(BEST), bench.add_of(REST)
    bench.step()
    plan = bench.step()
    assert plan.preempted == (rest,)
    while not bench.scheduler.preempted[1:]:
        bench.step()
    assert bench.scheduler.preempted == [base, rest]
    assert best.status is DecodeStatus.RUNNING


def test_a_place_goes_to_the_first_tier_and_is_given_back() -> None:
    bench = TierBench(30, max_num_seqs=2)
    rest = [bench.add_of(REST, max_tokens=8) for _ in range(2)]
    bench.step()
    best = bench.add_of(BEST, max_tokens=4)
    plan = bench.step()
    bench.check()
    assert plan.requests == (best, rest[0])
    assert rest[1].status is DecodeStatus.WAITING
    assert rest[1].is_parked
    assert plan.started == (best,)
    while best.status is not DecodeStatus.FINISHED:
        bench.step()
    plan = bench.step()
    assert set(plan.requests) == set(rest)
    assert plan.started == (), "it had begun before"
    while bench.scheduler.has_work:
        bench.step()
        bench.check()
    assert bench.failed == []
    assert all(len(request.request.output_token_ids) == 8 for request in rest)


def test_blocks_of_the_parked_are_taken_before_those_of_who_runs() -> None:
    bench = TierBench(8, max_num_seqs=2)
    rest = [bench.add_of(REST, num_prompt=7) for _ in range(2)]
    bench.step()
    best = [bench.add_of(BEST, num_prompt=3) for _ in range(2)]
    assert set(bench.step().requests) == set(best)
    while not bench.scheduler.preempted:
        bench.step()
        bench.check()
    assert bench.scheduler.preempted[-1] is rest[1]
    assert all(request.status is DecodeStatus.RUNNING for request in best)


def test_steps_are_kept_as_short_as_the_first_tier_was_promised() -> None:
    bench = TierBench(200, max_num_seqs=40)
    for size in (1, 40):
        bench.scheduler.steps.observe(size, 0.010 + 0.001 * size)
    rest = [bench.add_of(REST) for _ in range(30)]
    assert len(bench.step().requests) == 30
    best = bench.add_of(BEST, max_tokens=6)
    assert len(bench.step().requests) == 20, "of 30 ms"
    assert best.status is DecodeStatus.RUNNING
    assert sum(request.is_parked for request in rest) == 11
    while best.status is not DecodeStatus.FINISHED:
        assert len(bench.step().requests) <= 20
        bench.check()
    assert len(bench.step().requests) == 30


def test_a_token_that_was_launched_before_parking_is_booked() -> None:
    bench = TierBench(30, max_num_seqs=1)
    rest = bench.add_of(REST)
    first = bench.scheduler.schedule()
    best = bench.add_of(BEST)
    second = bench.scheduler.schedule()
    assert (first.requests, second.requests) == ((rest,), (best,))
    bench.write(rest, 3)
    assert bench.scheduler.land(rest)
    assert bench.scheduler.append_token(rest, 7) is None
    assert rest.request.output_token_ids[-1] == 7
    bench.scheduler.finish(best)
    assert bench.scheduler.schedule().requests == (rest,)


STANDINGS = (BEST, BASE, REST)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([0, 1, 2]), st.integers(1, 9), st.integers(2, 12)),
        st.just((-1, 0, 0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(8, 20), st.integers(2, 5))
def test_anything_that_comes_ends_and_no_step_is_idle(
    events: Sequence[tuple[int, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    bench = TierBench(num_blocks, max_num_seqs=max_num_seqs)
    for size in (1, 5):
        bench.scheduler.steps.observe(size, 0.020 + 0.004 * size)
    num_idle = 0

    def step() -> None:
        nonlocal num_idle
        had_work = bench.scheduler.has_work
        plan = bench.step()
        bench.check()
        num_idle = num_idle + 1 if had_work and not plan.requests else 0
        assert num_idle < 2, "somebody waits, and nobody runs"

    for order, num_prompt, max_tokens in events:
        if order < 0 or not bench.pool.can_allocate(num_blocks_for(num_prompt + 1, BLOCK_SIZE)):
            step()
        else:
            bench.add_of(STANDINGS[order], num_prompt, max_tokens)
    for _ in range(2000):
        if bench.scheduler.has_work:
            step()
    assert not bench.scheduler.has_work
    assert bench.failed == []
    assert bench.pool.num_free_blocks == num_blocks
