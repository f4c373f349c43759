"""Overlapped steps give every request what single steps would, and leak neither token nor block.

Most tests run at both depths: the same outcome is the point.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decode.loop
from decode.requests import DecodeRequest
from engine.parallel import lockstep
from engine.parallel.lockstep import GroupLockstep
from runtime.errors import ErrorCode, RequestCancelledError
from runtime.metrics.rows import Readings
from runtime.sampling import FinishReason
from tests.decode.helpers import BLOCK_SIZE
from tests.decode.overlap_bench import (
    MAX_MODEL_LEN,
    OverlapBench,
    any_budget,
    params_of,
    whole_output,
)
from tests.engine.parallel.test_lockstep import thread_groups
from worker.lifecycle import DecodeStatus

BOTH = pytest.mark.parametrize("max_ahead", [0, 1])


@pytest.fixture(autouse=True, scope="module")
def _without_rests() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode.loop, "IDLE_WAIT_S", 0.0)
        patch.setattr(lockstep, "GROUP_IDLE_WAIT_S", 0.0)
        yield


def test_a_step_is_launched_before_the_one_before_it_has_run() -> None:
    bench = OverlapBench(1)
    bench.add([1, 2, 3], params_of(5))
    bench.deliver()
    bench.turn()
    assert len(bench.device.queue) == 1
    bench.turn()
    assert len(bench.device.queue) == 1, "the first has run, the second was launched before"
    assert bench.device.log == ["launch 0"] * 2
    bench.finish()
    assert bench.device.log == ["launch 0"] * 4, "no step for a length that is known"


def test_without_overlap_every_step_is_read_at_once() -> None:
    bench = OverlapBench(0)
    bench.add([1, 2, 3], params_of(5))
    bench.deliver()
    bench.turn()
    assert not bench.device.queue


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 9])
def test_lengths(max_ahead: int, max_tokens: int) -> None:
    bench = OverlapBench(max_ahead)
    request = bench.add([5, 6], params_of(max_tokens))
    bench.finish()
    expected, reason = whole_output([5, 6], params_of(max_tokens), None)
    assert len(expected) == max_tokens
    assert bench.output(request) == expected
    assert bench.reason(request) is (None if max_tokens == 1 else reason)


@BOTH
def test_the_context_length_ends_a_request(max_ahead: int) -> None:
    bench = OverlapBench(max_ahead, num_usable=60)
    prompt = [index % 7 for index in range(MAX_MODEL_LEN - 5)]
    request = bench.add(prompt, params_of(100))
    bench.finish()
    assert bench.output(request) == whole_output(prompt, params_of(100), None)[0]
    assert len(bench.output(request)) == 5
    assert bench.reason(request) is FinishReason.LENGTH


@BOTH
@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_token_at_every_position(max_ahead: int, position: int) -> None:
    prompt = [3, 1]
    free, _ = whole_output(prompt, params_of(12), None)
    params = params_of(12, stops=[free[position]], min_tokens=position)
    expected, reason = whole_output(prompt, params, None)
    bench = OverlapBench(max_ahead)
    stopping, other = bench.add(prompt, params), bench.add([8, 8, 8], params_of(12))
    bench.finish()
    assert (bench.output(stopping), bench.reason(stopping)) == (expected, reason)
    assert expected == free[: len(expected)]
    assert bench.output(other) == whole_output([8, 8, 8], params_of(12), None)[0]


def test_a_request_that_stopped_lingers_until_the_late_step_is_over() -> None:
    prompt = [3, 1]
    free, _ = whole_output(prompt, params_of(12), None)
    bench = OverlapBench(1)
    request = bench.add(prompt, params_of(12, stops=[free[1]]))
    bench.deliver()
    bench.turn()
    bench.turn()  # the token that stops it is read, and another step runs it
    assert request.status is DecodeStatus.FINISHED
    assert bench.bench.scheduler.lingering == [request]
    assert request.request.block_table
    assert not bench.bench.rank.is_empty
    bench.turn()
    assert bench.bench.scheduler.lingering == []
    assert bench.output(request) == free[:2]
    bench.finish()


@BOTH
@pytest.mark.parametrize("num_turns", range(1, 5))
def test_an_abort_in_flight_is_answered_at_once(max_ahead: int, num_turns: int) -> None:
    bench = OverlapBench(max_ahead)
    request, other = bench.add([1], params_of(9)), bench.add([2], params_of(9))
    bench.deliver()
    for _ in range(num_turns):
        bench.turn()
    assert bench.bench.rank.live.abort(request.request_id, RequestCancelledError("gone"))
    num_tokens = len(bench.output(request))
    bench.finish()
    assert bench.reason(request) is FinishReason.ABORT
    assert len(bench.output(request)) <= num_tokens + 1  # what was read and not told yet
    assert bench.output(other) == whole_output([2], params_of(9), None)[0]


@BOTH
def test_a_deadline_in_flight(max_ahead: int) -> None:
    bench = OverlapBench(max_ahead)
    request = bench.add([1], params_of(50))
    bench.deliver()
    bench.turn()
    bench.turn()
    bench.bench.clock.now = request.budget.until
    bench.turn()
    last = bench.deltas[request.request_id][-1]
    assert last.error is not None
    assert last.error.code is ErrorCode.DEADLINE_EXCEEDED
    bench.finish()


@BOTH
def test_logits_that_are_no_numbers_end_one_request(max_ahead: int) -> None:
    bench = OverlapBench(max_ahead)
    broken = bench.add([1, 2, 3, 4, 5], params_of(9), broken_after=3)
    fine = bench.add([2], params_of(9))
    bench.finish()
    assert (bench.output(broken), bench.reason(broken)) == whole_output(
        [1, 2, 3, 4, 5], params_of(9), 3
    )
    assert bench.output(fine) == whole_output([2], params_of(9), None)[0]
    # What may have lost the numbers answers no later prompt.
    assert bench.bench.pool.count_prefix(broken.request.block_hashes) == 0


@BOTH
def test_preemption_takes_nothing_from_a_step_in_flight(max_ahead: int) -> None:
    bench = OverlapBench(max_ahead, num_usable=20)
    prompts = [[index] * 5 for index in range(4)]
    requests = [bench.add(prompt, params_of(12)) for prompt in prompts]
    bench.deliver()
    bench.turn()
    bench.squeeze(20)
    for _ in range(6):
        bench.turn()
    assert bench.bench.scheduler.preempted
    assert bench.bench.scheduler.running
    bench.finish()
    for request, prompt in zip(requests, prompts, strict=True):
        assert bench.output(request) == whole_output(prompt, params_of(12), None)[0]
    assert bench.bench.metric("pd_decode_resumes_total")


def test_a_block_that_comes_free_spares_a_preemption() -> None:
    free, _ = whole_output([3] * 6, params_of(12), None)
    bench = OverlapBench(1)
    stopping = bench.add([3] * 6, params_of(12, stops=[free[2]]))
    growing = bench.add([4] * 6, params_of(12))
    bench.deliver()
    bench.turn()
    bench.squeeze(20)
    bench.turn()
    assert bench.bench.scheduler.must_wait  # for a third block each, and one of them stops
    bench.turn()
    assert stopping.status is DecodeStatus.FINISHED
    assert growing.status is DecodeStatus.RUNNING
    bench.finish()
    assert bench.output(stopping) == free[:3]
    assert bench.output(growing) == whole_output([4] * 6, params_of(12), None)[0]
    assert bench.bench.metric("pd_decode_preemptions_total") == 0


def test_drafts_make_fewer_steps_and_are_counted_as_tokens() -> None:
    expected, _ = whole_output([3, 1], params_of(30), None)
    for num_drafts in (0, 3):
        bench = OverlapBench(1, num_drafts=num_drafts)
        request = bench.add([3, 1], params_of(30))
        bench.finish()
        assert bench.output(request) == expected
        assert len(bench.device.log) == 29 if not num_drafts else len(bench.device.log) < 29
        counted = bench.registry.get_sample_value("pd_decode_generated_tokens_total")
        assert counted == 29


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 30])
def test_tokens_are_steps_and_drafts_that_were_right(max_ahead: int, max_tokens: int) -> None:
    """Of each request in its deltas, and of all in the metrics, whatever ends them."""
    bench = OverlapBench(max_ahead, num_drafts=3, seed=max_tokens)
    stopping = replace(params_of(max_tokens), stop_token_ids=(3,))
    prompts = [[3, 1], [4], [5, 5, 5]]
    requests = [bench.add(prompt, stopping) for prompt in prompts]
    bench.deliver()
    bench.finish()
    num_steps = num_accepted = num_drafts = 0
    for request in requests:
        steps = [delta for delta in bench.deltas[request.request_id] if delta.token_ids]
        for delta in steps:
            assert len(delta.token_ids) - 1 <= delta.num_drafts <= 3
        num_steps += len(steps)
        num_accepted += sum(len(delta.token_ids) - 1 for delta in steps)
        num_drafts += sum(delta.num_drafts for delta in steps)
        num_output = len(bench.output(request))
        assert num_output == 1 + sum(len(delta.token_ids) for delta in steps)
    counted = bench.registry.get_sample_value("pd_decode_generated_tokens_total")
    assert counted == num_steps + num_accepted
    read = Readings(bench.bench.registry.collect())
    assert read("pd_decode_accepted_tokens_total") == num_accepted
    assert read("pd_decode_draft_tokens_total") == num_drafts
    assert read("pd_decode_draft_budget_steps_total", budget="3") == len(bench.device.log)


def test_a_step_without_drafts_knows_where_its_requests_stand() -> None:
    bench = OverlapBench(1, num_drafts=2)
    biased = replace(params_of(9), logit_bias={1: 0.0})
    requests = [bench.add([4], params_of(30)), bench.add([5], biased)]
    bench.finish()
    assert bench.output(requests[0]) == whole_output([4], params_of(30), None)[0]
    assert bench.output(requests[1]) == whole_output([5], biased, None)[0]


def test_blocks_for_drafts_are_given_back_before_anybody_is_preempted() -> None:
    """Two requests hold a block ahead each, and a third grows."""
    bench = OverlapBench(0, num_usable=9, num_drafts=3)
    requests = [bench.add([index] * 5, params_of(6)) for index in range(3)]
    bench.deliver()
    bench.turn()
    bench.squeeze(20)
    bench.finish()
    for index, request in enumerate(requests):
        assert bench.output(request) == whole_output([index] * 5, params_of(6), None)[0]


def test_tokens_are_counted_once() -> None:
    free, _ = whole_output([3, 1], params_of(12), None)
    bench = OverlapBench(1)
    bench.add([3, 1], params_of(12, stops=[free[4]]))
    bench.finish()
    counted = bench.registry.get_sample_value("pd_decode_generated_tokens_total")
    assert counted == len(whole_output([3, 1], params_of(12, stops=[free[4]]), None)[0]) - 1


def test_a_loop_that_leaves_reads_what_is_in_flight() -> None:
    bench = OverlapBench(1)
    request = bench.add([1], params_of(3))
    bench.deliver()
    bench.turn()
    bench.loop.leave()
    bench.loop.start()
    assert bench.loop.ended.result(60) is None
    assert not bench.device.queue
    assert bench.output(request) == whole_output([1], params_of(2), None)[0]


def test_nobody_rests_right_after_a_step_in_flight() -> None:
    """Its tokens may have ended a request whose blocks another one waits for."""
    bench = OverlapBench(1)
    bench.add([1], params_of(2))
    bench.deliver()
    bench.turn()
    assert bench.turn()  # launches nothing, and reads the last token
    assert bench.bench.rank.is_empty
    assert not bench.turn()


class Trace:
    """Random happenings, so many that blocks change hands while steps are in flight."""

    def __init__(self, bench: OverlapBench, random: Random) -> None:
        self.bench, self.random = bench, random
        self.requests: list[tuple[DecodeRequest, int | None]] = []
        self.ended_early: set[str] = set()

    def run(self, num_events: int) -> None:
        """Let happen what happens, then let everything run to its end."""
        events = [self.add, self.turn, self.abort, self.expire, self.squeeze, self.run_device]
        events += [self.claim, self.unclaim]
        for _ in range(num_events):
            self.random.choices(events, weights=[5, 12, 1, 1, 1, 4, 3, 1])[0]()
            self.bench.deliver()
        for request, _ in self.requests:
            if request.status is DecodeStatus.RESERVED:
                self.bench.bench.claim(request)
        self.bench.receive()
        self.bench.finish()
        for request, broken_after in self.requests:
            is_early = request.request_id in self.ended_early
            check_outcome(self.bench, request, broken_after, is_early)

    def add(self, *, claimed: float = 0.7) -> None:
        """A request, which is claimed at once with this probability."""
        random = self.random
        prompt = [random.randrange(3)] * random.randrange(1, 13)
        stops = random.sample(range(10), random.randrange(4))
        broken_after = random.randrange(1, 7) if random.random() < 0.1 else None
        params = params_of(random.randrange(1, 15), stops, random.randrange(3))
        expected, _ = whole_output(prompt, params, broken_after)
        room = BLOCK_SIZE * self.bench.bench.pool.num_usable_blocks - len(prompt) - 1
        so_far = expected[: random.choice([0, min(random.randrange(len(expected)), room)])]
        is_claimed = random.random() < claimed
        request = self.bench.add(
            prompt, params, so_far=so_far, broken_after=broken_after, is_claimed=is_claimed
        )
        self.requests.append((request, broken_after))

    def turn(self) -> None:
        self.bench.turn()

    def claim(self) -> None:
        """Prefill's turn comes, or it asks again."""
        early = (DecodeStatus.RESERVED, DecodeStatus.CLAIMED, DecodeStatus.WAITING_FOR_KV)
        waiting = [request for request, _ in self.requests if request.status in early]
        if waiting:
            self.bench.bench.claim(self.random.choice(waiting))
            self.bench.receive()

    def unclaim(self) -> None:
        """A call is cancelled; one that was the only one to have the ticket ends the request."""
        claimed = [request for request, _ in self.requests if request.claims]
        if claimed:
            request = self.random.choice(claimed)
            is_last = len(request.claims) == 1
            if is_last and request.status is DecodeStatus.WAITING_FOR_KV:
                self.ended_early.add(request.request_id)
            self.bench.bench.rank.unclaim(self.random.choice(request.claims))

    def abort(self) -> None:
        if self.requests:
            request, _ = self.random.choice(self.requests)
            if self.bench.bench.rank.live.abort(request.request_id, RequestCancelledError("gone")):
                self.ended_early.add(request.request_id)

    def expire(self) -> None:
        if self.requests:
            request, _ = self.random.choice(self.requests)
            request.budget = replace(request.budget, until=self.bench.bench.clock.now)
            self.ended_early.add(request.request_id)

    def squeeze(self) -> None:
        self.bench.squeeze(self.random.randrange(1, 8))

    def run_device(self) -> None:
        if self.bench.device.queue:
            self.bench.device.run_next()


@settings(max_examples=150, deadline=None)
@given(
    random=st.randoms(use_true_random=True),
    max_ahead=st.integers(0, 1),
    num_usable=st.integers(4, 14),
    host_blocks=st.sampled_from([0, 3, 100]),
    max_num_seqs=st.integers(1, 5),
    num_drafts=st.integers(0, 3),
    is_chosen=st.booleans(),
)
def test_whatever_happens_everybody_gets_what_is_his(
    *,
    random: Random,
    max_ahead: int,
    num_usable: int,
    host_blocks: int,
    max_num_seqs: int,
    num_drafts: int,
    is_chosen: bool,
) -> None:
    """Also where every step has another number of drafts than the one before."""
    seed = random.randrange(1000)
    bench = OverlapBench(
        max_ahead,
        num_usable=num_usable,
        host_blocks=host_blocks,
        max_num_seqs=max_num_seqs,
        num_drafts=num_drafts,
        seed=seed,
        budget=any_budget(num_drafts, max_num_seqs, seed) if is_chosen else None,
    )
    Trace(bench, random).run(120)


def check_outcome(
    bench: OverlapBench, request: DecodeRequest, broken_after: int | None, ended_early: bool
) -> None:
    inner = request.request
    expected, reason = whole_output(inner.prompt_token_ids, inner.sampling, broken_after)
    output = bench.output(request)
    assert output == expected[: len(output)]
    deltas = bench.deltas[request.request_id]
    if not deltas:
        # Its first token was its last.
        assert len(output) == request.first_index + 1
        return
    error = deltas[-1].error
    if error is not None and error.code is ErrorCode.OUT_OF_BLOCKS:
        return
    if not ended_early:
        assert (output, bench.reason(request)) == (expected, reason)
    assert bench.reason(request) is not None


@BOTH
@pytest.mark.parametrize("num_output", range(12))
def test_a_request_that_goes_on_elsewhere_gives_the_same_tokens(
    max_ahead: int, num_output: int
) -> None:
    """After any number of tokens; `min_tokens` keeps the stop token from ending it at first."""
    prompt = [3, 1, 4]
    free, _ = whole_output(prompt, params_of(12), None)
    for params in (params_of(12), params_of(12, stops=[free[2]], min_tokens=7)):
        expected, reason = whole_output(prompt, params, None)
        if num_output >= len(expected):
            continue
        bench = OverlapBench(max_ahead)
        request = bench.add(prompt, params, so_far=expected[:num_output])
        other = bench.add([8, 8, 8], params_of(12))
        bench.finish()
        assert bench.output(request) == expected
        is_told = len(expected) > num_output + 1
        assert bench.reason(request) is (reason if is_told else None)
        assert bench.output(other) == whole_output([8, 8, 8], params_of(12), None)[0]


@BOTH
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_drafts", [0, 3])
def test_ranks_of_a_group_take_the_same_steps(max_ahead: int, seed: int, max_drafts: int) -> None:
    """With as many drafts each, whatever the numbers of the steps before."""
    groups = thread_groups(2)
    budgets = [any_budget(max_drafts, 4, seed) if max_drafts else None for _ in groups]
    benches = [
        OverlapBench(
            max_ahead,
            num_usable=10,
            lockstep=GroupLockstep(group, 7, rider=budget),
            num_drafts=max_drafts,
            seed=seed,
            budget=budget,
        )
        for group, budget in zip(groups, budgets, strict=True)
    ]

    def drive(rank: int) -> Trace:
        trace = Trace(benches[rank], Random(10 * seed + rank))
        for turn in range(150):
            # Sometimes neither has work, sometimes one, sometimes both.
            if turn < 60 and trace.random.random() < 0.2:
                trace.add(claimed=1.0)
            trace.bench.deliver()
            trace.turn()
        return trace

    with ThreadPoolExecutor(2) as threads:
        traces = list(threads.map(drive, range(2)))
    words = [[entry.split() for entry in bench.device.log] for bench in benches]
    assert len(words[0]) == len(words[1]) > 10
    assert any(kind == "dummy" for log in words for kind, _ in log)
    if max_drafts:
        numbers = [[int(number) for _, number in log] for log in words]
        assert numbers[0] == numbers[1]
        assert set(numbers[0]) == set(range(max_drafts + 1))
    for trace in traces:
        trace.bench.bench.check_empty()
        for request, broken_after in trace.requests:
            check_outcome(trace.bench, request, broken_after, False)
