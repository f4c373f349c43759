"""Continuous batching: growth, preemption of the youngest, resume first, and lonely failures."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decode.offload import HostBlockStore
from decode.requests import DecodeRequest
from decode.scheduler import DecodeScheduler, StepPlan
from engine.memory.block_pool import BlockPool
from engine.request import num_blocks_for
from runtime.sampling import FinishReason
from tests.decode.helpers import BLOCK_SIZE, FakeKV, SlowKV, make_request
from worker.lifecycle import DecodeStatus


class Bench:
    """A scheduler with a pool whose blocks hold the tokens of the positions written to them."""

    def __init__(
        self,
        num_usable: int,
        *,
        host_blocks: int = 100,
        max_num_seqs: int = 8,
        caching: bool = True,
        kv: FakeKV | None = None,
    ) -> None:
        self.pool = BlockPool(num_usable + 1, BLOCK_SIZE, enable_prefix_caching=caching)
        self.kv = kv or FakeKV(num_usable + 1)
        self.host = HostBlockStore(self.kv, host_blocks)
        self.scheduler = DecodeScheduler(
            self.pool, self.host, max_num_seqs=max_num_seqs, max_model_len=1000
        )
        self.max_num_seqs = max_num_seqs
        self.serial = 0
        self.failed: list[DecodeRequest] = []

    def add(self, num_prompt: int, max_tokens: int = 16) -> DecodeRequest | None:
        """A request whose KV has just arrived, or None where its blocks are not free."""
        num_blocks = num_blocks_for(num_prompt + 1, BLOCK_SIZE)
        if not self.pool.can_allocate(num_blocks):
            return None
        request = make_request(self.serial, num_prompt, max_tokens=max_tokens)
        self.serial += 1
        inner = request.request
        inner.block_table = self.pool.allocate(num_blocks)
        inner.num_computed_tokens = num_prompt
        for position in range(num_prompt):
            self.write(request, position)
        inner.output_token_ids.append(self.next_token(request))
        for status in (
            DecodeStatus.CLAIMED,
            DecodeStatus.WAITING_FOR_KV,
            DecodeStatus.WAITING,
        ):
            request.move_to(status)
        self.scheduler.add(request)
        return request

    def write(self, request: DecodeRequest, position: int) -> None:
        """Put the token at `position` into its block, as a model would its KV."""
        block_id = request.request.block_table[position // BLOCK_SIZE]
        content = self.kv.blocks[block_id] if position % BLOCK_SIZE else ()
        assert isinstance(content, tuple)
        token = request.request.token_ids(position, position + 1)
        self.kv.blocks[block_id] = (*content[: position % BLOCK_SIZE], *token)

    @staticmethod
    def next_token(request: DecodeRequest) -> int:
        return request.serial * 1000 + 500 + request.request.num_output_tokens

    def context(self, request: DecodeRequest) -> list[int]:
        """What attention would read back for the computed tokens."""
        inner = request.request
        num_blocks = num_blocks_for(inner.num_computed_tokens, BLOCK_SIZE)
        found: list[int] = []
        for block_id in inner.block_table[:num_blocks]:
            content = self.kv.blocks[block_id]
            assert isinstance(content, tuple)
            found += content
        return found[: inner.num_computed_tokens]

    def step(self) -> StepPlan:
        """One step of a model whose attention checks what it reads."""
        plan = self.scheduler.schedule()
        self.failed += plan.failed
        for request, share in zip(plan.requests, plan.scheduled, strict=True):
            assert share.samples
            assert self.context(request) == share.request.token_ids(0, share.start)
            self.write(request, share.start)
        for request in plan.requests:
            assert self.scheduler.land(request)
            if self.scheduler.append_token(request, self.next_token(request)) is not None:
                self.scheduler.finish(request)
        return plan

    def check(self) -> None:
        self.pool.check_integrity()
        self.host.check_integrity()
        self.scheduler.check_integrity()
        assert len(self.scheduler.running) <= self.max_num_seqs
        held = sum(len(item.request.block_table) for item in self.scheduler.requests)
        assert held == self.pool.num_usable_blocks - self.pool.num_free_blocks
        offloaded = sum(
            num_blocks_for(item.request.num_computed_tokens, BLOCK_SIZE)
            for item in (*self.scheduler.offloading, *self.scheduler.preempted)
        )
        assert offloaded == self.host.num_blocks


def must(request: DecodeRequest | None) -> DecodeRequest:
    assert request is not None
    return request


def test_a_request_runs_to_its_length() -> None:
    bench = Bench(10)
    request = must(bench.add(5, max_tokens=6))
    for _ in range(5):
        assert bench.step().requests == (request,)
    assert request.status is DecodeStatus.FINISHED
    assert request.request.output_token_ids == [500, 501, 502, 503, 504, 505]
    assert bench.pool.num_free_blocks == 10
    assert not bench.scheduler.has_work


def test_stop_and_length_are_told_apart() -> None:
    bench = Bench(10)
    request = must(bench.add(3, max_tokens=3))
    bench.scheduler.schedule()
    assert bench.scheduler.land(request)
    assert bench.scheduler.append_token(request, 1) is None
    bench.scheduler.schedule()
    assert bench.scheduler.land(request)
    assert bench.scheduler.append_token(request, 2) is FinishReason.LENGTH


def test_max_num_seqs_bounds_a_step_and_the_rest_waits() -> None:
    bench = Bench(20, max_num_seqs=2)
    requests = [must(bench.add(2)) for _ in range(3)]
    assert bench.step().requests == tuple(requests[:2])
    assert requests[2].status is DecodeStatus.WAITING


def test_the_youngest_yields_and_returns_before_a_waiting_one_starts() -> None:
    bench = Bench(4, max_num_seqs=2)
    old, young = must(bench.add(6, max_tokens=7)), must(bench.add(6, max_tokens=7))
    plans = [bench.step() for _ in range(3)]
    assert plans[2].preempted == (young,)
    assert young.status is DecodeStatus.PREEMPTED
    late = must(bench.add(1, max_tokens=4))
    resumed_at = started_at = -1
    for index in range(30):
        plan = bench.step()
        bench.check()
        if young in plan.resumed:
            resumed_at = index
        if late in plan.started:
            started_at = index
    assert 0 <= resumed_at <= started_at
    assert all(item.status is DecodeStatus.FINISHED for item in (old, young, late))
    assert not bench.failed


def test_blocks_are_held_until_their_copy_is_done_and_who_waits_for_them_sits_out() -> None:
    kv = SlowKV(5)
    bench = Bench(4, max_num_seqs=2, kv=kv)
    old, young = must(bench.add(6, max_tokens=7)), must(bench.add(6, max_tokens=7))
    while young.status is DecodeStatus.RUNNING or young.status is DecodeStatus.WAITING:
        bench.step()
    assert young.status is DecodeStatus.OFFLOADING
    held = list(young.request.block_table)
    for _ in range(3):
        assert bench.step().requests == ()
        assert young.request.block_table == held
        bench.check()
    kv.complete()
    assert bench.step().requests == (old,)
    assert young.status is DecodeStatus.PREEMPTED
    for _ in range(30):
        bench.step()
        kv.complete()
    assert old.status is young.status is DecodeStatus.FINISHED
    assert not bench.failed


def test_a_request_that_ends_while_it_is_copied_gives_everything_back() -> None:
    kv = SlowKV(5)
    bench = Bench(4, max_num_seqs=2, kv=kv)
    old, young = must(bench.add(6)), must(bench.add(6))
    while young.status is not DecodeStatus.OFFLOADING:
        bench.step()
    bench.scheduler.finish(young)
    bench.check()
    assert bench.host.num_blocks == 0
    bench.scheduler.finish(old)
    assert bench.pool.num_free_blocks == 4


def test_alone_and_out_of_blocks_fails_alone() -> None:
    bench = Bench(2)
    request = must(bench.add(6, max_tokens=50))
    for _ in range(20):
        bench.step()
    assert bench.failed == [request]
    assert bench.pool.num_free_blocks == 2


def test_others_hold_the_pool_so_the_only_running_one_yields_to_the_host() -> None:
    bench = Bench(4)
    request = must(bench.add(6, max_tokens=10))
    received = bench.pool.allocate(2)  # blocks of requests whose KV is still coming
    while request.status is not DecodeStatus.PREEMPTED:
        bench.step()
    assert not bench.failed
    bench.pool.release(received)
    assert bench.step().resumed == (request,)


def test_without_host_memory_the_youngest_fails_and_the_oldest_goes_on() -> None:
    bench = Bench(4, host_blocks=1)
    old, young = must(bench.add(6, max_tokens=7)), must(bench.add(6, max_tokens=7))
    for _ in range(12):
        bench.step()
        bench.check()
    assert bench.failed == [young]
    assert old.request.num_output_tokens == 7


def test_finish_gives_back_everything_in_every_status() -> None:
    bench = Bench(4, max_num_seqs=2)
    old, young = must(bench.add(6)), must(bench.add(6))
    while young.status is not DecodeStatus.PREEMPTED:
        bench.step()
    late = must(bench.add(1))
    for request in (young, late, old):
        bench.scheduler.finish(request)
        bench.check()
    assert bench.pool.num_free_blocks == 4
    assert bench.host.num_blocks == 0


def test_output_blocks_become_findable() -> None:
    bench = Bench(6)
    request = must(bench.add(3, max_tokens=9))
    for _ in range(4):
        bench.step()
    hashes = request.request.update_block_hashes(BLOCK_SIZE)
    assert bench.pool.count_prefix(hashes) == 1  # block 0 was filled by prompt and output


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, aborts, steps and copies: blocks are conserved, tokens stay in order."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = SlowKV(10)
        self.bench = Bench(9, host_blocks=7, max_num_seqs=3, kv=self.kv)
        self.all: list[DecodeRequest] = []

    @rule(num_prompt=st.integers(1, 14), max_tokens=st.integers(2, 24))
    def arrive(self, num_prompt: int, max_tokens: int) -> None:
        request = self.bench.add(num_prompt, max_tokens)
        if request is not None:
            self.all.append(request)

    @rule()
    def step(self) -> None:
        self.bench.step()

    @rule()
    def copies_are_done(self) -> None:
        self.kv.complete()

    @precondition(lambda self: self.bench.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.bench.scheduler.requests)))
        self.bench.scheduler.finish(request)

    @invariant()
    def books_agree(self) -> None:
        self.bench.check()

    @invariant()
    def tokens_are_in_order(self) -> None:
        for request in self.all:
            first = request.serial * 1000 + 500
            tokens = request.request.output_token_ids
            assert tokens == list(range(first, first + len(tokens)))

    def teardown(self) -> None:
        for _ in range(400):
            if not self.bench.scheduler.has_work:
                break
            self.bench.step()
            self.kv.complete()
        assert not self.bench.scheduler.has_work, "somebody starves"
        assert self.bench.pool.num_free_blocks == 9
        assert self.bench.host.num_blocks == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(2, 20)), min_size=1, max_size=8),
    num_usable=st.integers(9, 14),
    max_num_seqs=st.integers(1, 4),
)
def test_nobody_fails_who_fits_alone_while_host_memory_lasts(
    sizes: list[tuple[int, int]], num_usable: int, max_num_seqs: int
) -> None:
    bench = Bench(num_usable, max_num_seqs=max_num_seqs)
    waiting = list(sizes)
    requests: list[DecodeRequest] = []
    while waiting or bench.scheduler.has_work:
        request = bench.add(*waiting[0]) if waiting else None
        if request is not None:
            requests.append(request)
            waiting.pop(0)
        bench.step()
    assert not bench.failed
    assert [request.request.num_output_tokens for request in requests] == [
        most for _, most in sizes
    ]


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(2, 40)), min_size=1, max_size=8),
    num_usable=st.integers(4, 12),
    host_blocks=st.integers(0, 6),
)
def test_who_is_exhausted_fails_alone(
    sizes: list[tuple[int, int]], num_usable: int, host_blocks: int
) -> None:
    """It is the youngest, its KV does not fit into host memory, and the others go on."""
    bench = Bench(num_usable, host_blocks=host_blocks)
    requests = [bench.add(*size) for size in sizes]
    while bench.scheduler.has_work:
        running = {
            request: request.request.num_computed_tokens for request in bench.scheduler.running
        }
        held_by_host = bench.host.num_blocks
        plan = bench.step()
        for index, request in enumerate(plan.failed):
            elder = [other for other in running if other.serial < request.serial]
            younger = set(running) - {*elder, request}
            assert younger <= {*plan.preempted, *plan.failed}
            num_blocks = num_blocks_for(running[request], BLOCK_SIZE)
            is_alone = not elder and index == len(plan.failed) - 1
            assert is_alone or held_by_host + num_blocks > host_blocks or plan.preempted
            assert request.status is DecodeStatus.FINISHED
            assert not request.request.block_table
        bench.check()
    for added in requests:
        if added is not None and added not in bench.failed:
            inner = added.request
            assert inner.num_output_tokens == inner.sampling.max_tokens


@settings(deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 14), st.integers(2, 20)), min_size=2, max_size=6),
    num_usable=st.integers(9, 14),
)
@example(sizes=[(4, 6), (8, 6), (11, 4), (12, 6), (6, 4)], num_usable=14)
def test_who_returns_to_others_stays(sizes: list[tuple[int, int]], num_usable: int) -> None:
    bench = Bench(num_usable)
    for size in sizes:
        bench.add(*size)
    returned: set[DecodeRequest] = set()
    while bench.scheduler.has_work:
        plan = bench.step()
        assert not returned & {*plan.preempted}
        returned = set(plan.resumed)
