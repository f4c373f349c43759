"""The pool as one router process sees it."""

from __future__ import annotations

from dataclasses import replace

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import FAILURE_COOLDOWN_S, PoolView
from tests.router.routing.pools import Clock, decode, prefill


def rank(number: int, *, num_ranks: int = 2, load: WorkerLoad | None = None) -> Member:
    key = WorkerKey("decode-0", 1, number)
    return decode(0, key=key, num_ranks=num_ranks, load=load or WorkerLoad())


def prefill_rank(number: int, *, num_parts: int) -> Member:
    key = WorkerKey("prefill-0", 1, number)
    return prefill(0, key=key, num_ranks=4, num_parts=num_parts)


def test_ranks_wait_for_their_whole_instance() -> None:
    pool = PoolView(Clock())
    pool.update([rank(0)])
    assert [c.whole for c in pool.candidates(Role.DECODE)] == [False]
    pool.update([rank(0), rank(1)])
    assert [c.whole for c in pool.candidates(Role.DECODE)] == [True, True]


def test_one_endpoint_speaks_for_tensor_parallel_ranks_and_each_data_parallel_one_for_itself() -> (
    None
):
    pool = PoolView(Clock())
    pool.update([prefill_rank(0, num_parts=4)])
    assert [c.whole for c in pool.candidates(Role.PREFILL)] == [True]
    for count in range(1, 5):
        pool.update([prefill_rank(number, num_parts=1) for number in range(count)])
        assert {c.whole for c in pool.candidates(Role.PREFILL)} == {count == 4}


def test_ranks_of_another_life_do_not_make_an_instance_whole() -> None:
    pool = PoolView(Clock())
    former = replace(rank(1), key=WorkerKey("decode-0", 9, 1))
    pool.update([rank(0), former])
    assert [c.whole for c in pool.candidates(Role.DECODE)] == [False, False]


def test_a_failure_counts_against_all_ranks_of_the_instance() -> None:
    pool = PoolView(Clock())
    other = replace(rank(0, num_ranks=1), key=WorkerKey("decode-1", 1, 0))
    pool.update([rank(0), rank(1), other])
    pool.mark_failed(rank(0).key, "test")
    failed = {m.key: pool.recently_failed(m.key) for m in pool.members(Role.DECODE)}
    assert failed == {rank(0).key: True, rank(1).key: True, other.key: False}


def test_load_is_ours_and_what_others_reported() -> None:
    pool = PoolView(Clock())
    pool.update([rank(0, num_ranks=1)])
    key = rank(0).key

    def num_requests() -> int:
        return pool.candidates(Role.DECODE)[0].num_requests

    with pool.in_flight(key), pool.in_flight(key):
        assert num_requests() == 2
        pool.report(key, WorkerLoad(num_requests_running=5))  # 2 of them are ours
        assert num_requests() == 5
        with pool.in_flight(key):
            assert num_requests() == 6
        pool.report(key, WorkerLoad(num_requests_running=1))  # has not heard of all of ours yet
        assert num_requests() == 2
    assert num_requests() == 0


def test_a_failure_is_forgotten() -> None:
    clock = Clock()
    pool = PoolView(clock)
    pool.update([rank(0, num_ranks=1)])
    pool.mark_failed(rank(0).key, "test")
    assert set(pool.failing()) == {rank(0).key}
    clock.now = FAILURE_COOLDOWN_S + 0.1
    assert not pool.failing()


def test_listeners_hear_of_membership_only() -> None:
    pool = PoolView(Clock())
    calls: list[int] = []
    pool.on_change(lambda: calls.append(1))
    pool.update([rank(0)])
    pool.update([rank(0, load=WorkerLoad(num_requests_running=3))])
    assert len(calls) == 1
    pool.update([])
    assert len(calls) == 2
    with pool.in_flight(rank(0).key):
        assert pool.num_in_flight(rank(0).key) == 1
    assert pool.num_in_flight(rank(0).key) == 0
