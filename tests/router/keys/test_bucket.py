"""Token buckets and limits, with a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.bucket import MINUTE_S, TokenBucket
from router.keys.ledger import Charge, KeyLedger, LimitKind
from router.keys.record import KeyLimits

ASKS = st.lists(st.tuples(st.floats(0.0, 90.0), st.integers(0, 150)), max_size=60)
"""Seconds since the one before, and the amount."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def charge(num_tokens: int = 0, *, name: str = "alice", holder: str = "here") -> Charge:
    return Charge(name=name, holder=holder, num_tokens=num_tokens)


@given(st.integers(1, 100), ASKS)
def test_no_stretch_of_time_gives_more_than_a_bucket_and_what_flows_in(
    capacity: int, asks: list[tuple[float, int]]
) -> None:
    now, bucket = 0.0, TokenBucket(capacity, 0.0)
    taken: list[tuple[float, int]] = []
    for pause_s, amount in asks:
        now += pause_s
        amount = min(amount, capacity)
        if bucket.wait_s(amount, now) == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for first, (began, _) in enumerate(taken):
        total = 0
        for at, amount in taken[first:]:
            total += amount
            assert total <= capacity * (1 + (at - began) / MINUTE_S) + 1e-3


@given(st.integers(1, 100), st.integers(-200, 500), st.integers(0, 150))
def test_who_waits_as_long_as_told_is_let_in_and_not_sooner(
    capacity: int, spent: int, amount: int
) -> None:
    bucket = TokenBucket(capacity, 0.0)
    bucket.take(spent, 0.0)
    wait_s = bucket.wait_s(amount, 0.0)
    if wait_s > 0.01:
        assert bucket.wait_s(amount, wait_s - 0.005) > 0.0
    assert bucket.wait_s(amount, wait_s) == 0.0


@given(st.integers(1, 100), ASKS)
def test_a_bucket_never_holds_more_than_it_can(
    capacity: int, asks: list[tuple[float, int]]
) -> None:
    now, bucket = 0.0, TokenBucket(capacity, 0.0)
    for pause_s, amount in asks:
        now += pause_s
        bucket.take(amount - 75, now)  # some are given back
        assert bucket.level(now) <= capacity


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 100))
def test_a_new_limit_holds_at_once(old: int, new: int, spent: int) -> None:
    bucket = TokenBucket(old, 0.0)
    bucket.take(spent, 0.0)
    before = bucket.level(0.0)
    bucket.resize(new, 0.0)
    assert bucket.capacity == new
    assert bucket.level(0.0) == min(new, before + max(0, new - old))


def test_requests_of_a_minute_are_counted() -> None:
    clock = Clock()
    ledger, limits = KeyLedger(clock), KeyLimits(requests_per_minute=2)
    told = [ledger.decide(charge(), limits) for _ in range(3)]
    assert [verdict.refused_by for verdict in told] == [None, None, LimitKind.REQUESTS]
    assert told[2].retry_after_s == pytest.approx(30.0)
    assert [verdict.requests.remaining for verdict in told if verdict.requests] == [1, 0, 0]
    assert told[0].requests is not None
    assert told[0].requests.reset_s == pytest.approx(30.0)
    assert told[0].tokens is None
    clock.now += told[2].retry_after_s
    assert ledger.decide(charge(), limits).refused_by is None


def test_what_a_request_cost_more_or_less_is_settled_when_it_ends() -> None:
    clock = Clock()
    ledger, limits = KeyLedger(clock), KeyLimits(tokens_per_minute=600)

    def remaining() -> int:
        level = ledger.decide(charge(0, name="alice"), limits).tokens
        assert level is not None
        return level.remaining

    taken = charge(500)
    assert ledger.decide(taken, limits).refused_by is None
    assert remaining() == 100
    ledger.settle(taken, 150)
    assert remaining() == 450
    long = charge(400)
    assert ledger.decide(long, limits).refused_by is None
    ledger.settle(long, 1250)  # 800 more than there were
    refused = ledger.decide(charge(1), limits)
    assert refused.refused_by is LimitKind.TOKENS
    assert refused.retry_after_s == pytest.approx(80.1)
    assert refused.tokens is not None
    assert refused.tokens.remaining == 0


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_no_longer() -> None:
    clock = Clock()
    ledger, limits = KeyLedger(clock), KeyLimits(tokens_per_minute=100)
    assert ledger.decide(charge(5000), limits).refused_by is None
    assert ledger.decide(charge(1), limits).refused_by is LimitKind.TOKENS
    clock.now += 60 * 50  # the debt is paid, and the bucket full again
    assert ledger.decide(charge(5000), limits).refused_by is None


def test_a_refused_request_takes_nothing() -> None:
    ledger = KeyLedger(Clock())
    limits = KeyLimits(requests_per_minute=5, tokens_per_minute=100, max_concurrent_requests=1)
    running = charge(10)
    assert ledger.decide(running, limits).refused_by is None
    refused = ledger.decide(charge(10), limits)
    assert refused.refused_by is LimitKind.CONCURRENCY
    assert refused.requests is not None
    assert refused.requests.remaining == 4
    assert refused.tokens is not None
    assert refused.tokens.remaining == 90
    ledger.settle(running, 10)
    assert ledger.decide(charge(10), limits).refused_by is None


def test_keys_have_limits_of_their_own() -> None:
    ledger, limits = KeyLedger(Clock()), KeyLimits(requests_per_minute=1)
    assert ledger.decide(charge(name="alice"), limits).refused_by is None
    assert ledger.decide(charge(name="bob"), limits).refused_by is None
    assert ledger.decide(charge(name="alice"), limits).refused_by is LimitKind.REQUESTS


def test_requests_of_a_process_that_ended_are_in_flight_no_more() -> None:
    ledger, limits = KeyLedger(Clock()), KeyLimits(max_concurrent_requests=2)
    lost, alive = charge(holder="http-1"), charge(holder="http-2")
    for each in (lost, alive):
        assert ledger.decide(each, limits).refused_by is None
    assert ledger.decide(charge(), limits).refused_by is LimitKind.CONCURRENCY
    ledger.forget("http-1")
    assert ledger.num_running("alice") == 1
    ledger.settle(lost, 0)  # too late: it is nobody's
    assert ledger.num_running("alice") == 1
    assert ledger.decide(charge(holder="http-3"), limits).refused_by is None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.floats(0.0, 20.0)), max_size=80),
    st.integers(1, 4),
)
def test_never_more_requests_run_than_a_key_may_have(
    steps: list[tuple[bool, int, float]], most: int
) -> None:
    clock = Clock()
    ledger = KeyLedger(clock)
    limits = KeyLimits(max_concurrent_requests=most, tokens_per_minute=100)
    running: list[Charge] = []
    for begins, num_tokens, pause_s in steps:
        clock.now += pause_s
        if begins:
            each = charge(num_tokens)
            if ledger.decide(each, limits).refused_by is None:
                running.append(each)
        elif running:
            ledger.settle(running.pop(), num_tokens)
        assert ledger.num_running("alice") == len(running) <= most
