"""Token buckets and limits, with a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.keys.bucket import MINUTE_S, TokenBucket
from router.keys.ledger import Charge, KeyLedger, LimitKind
from router.keys.record import LEAST_OUTPUT, KeyLimits

ASKS = st.lists(st.tuples(st.floats(0.0, 90.0), st.integers(0, 150)), max_size=60)
"""Seconds since the one before, and the amount."""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def charge(num_tokens: int = 0, *, name: str = "alice", holder: str = "here") -> Charge:
    return Charge(name=name, holder=holder, num_tokens=num_tokens)


def settle(ledger: KeyLedger, taken: Charge, num_tokens: int) -> None:
    """It has ended; nothing of it was charged since it was let in."""
    ledger.settle(taken, taken.num_tokens, num_tokens, 0)


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
    ledger, limits = KeyLedger(clock), KeyLimits(tokens_per_minute=600, max_concurrent_requests=9)

    def remaining() -> int:
        level = ledger.decide(charge(0, name="alice"), limits).tokens
        assert level is not None
        return level.remaining

    taken = charge(500)
    assert ledger.decide(taken, limits).refused_by is None
    assert remaining() == 100
    settle(ledger, taken, 150)
    assert remaining() == 450
    long = charge(400)
    assert ledger.decide(long, limits).refused_by is None
    settle(ledger, long, 1250)  # 800 more than there were
    refused = ledger.decide(charge(1), limits)
    assert refused.refused_by is LimitKind.TOKENS
    assert refused.retry_after_s == pytest.approx(80.1)
    assert refused.tokens is not None
    assert refused.tokens.remaining == 0


def test_an_answer_of_any_length_is_taken_for_what_is_usual() -> None:
    clock = Clock()
    ledger = KeyLedger(clock)
    limits = KeyLimits(tokens_per_minute=100_000, max_concurrent_requests=9)
    asked = replace(charge(10), num_open=2)
    assert ledger.decide(asked, limits).num_tokens == 10 + 2 * LEAST_OUTPUT
    ledger.settle(asked, 522, 10 + 2 * 1256, 2 * 1256)
    usual = LEAST_OUTPUT + 100  # a tenth of the way
    assert ledger.decide(asked, limits).num_tokens == 10 + 2 * usual
    assert ledger.decide(charge(10), limits).num_tokens == 10
    for _ in range(100):  # short answers: it is never taken for less than the least
        taken = ledger.decide(asked, limits).num_tokens
        ledger.settle(asked, taken, 12, 2)
    assert taken == 10 + 2 * LEAST_OUTPUT
    assert ledger.decide(replace(asked, name="bob"), limits).num_tokens == 10 + 2 * LEAST_OUTPUT


@given(st.integers(1, 30_000), st.integers(1, 200))
def test_requests_that_say_nothing_of_their_length_begin_as_a_minutes_tokens_allow(
    tokens_per_minute: int, num_asked: int
) -> None:
    ledger, limits = KeyLedger(Clock()), KeyLimits(tokens_per_minute=tokens_per_minute)
    asked = replace(charge(20), num_open=1)
    let_in = [ledger.decide(asked, limits) for _ in range(num_asked)]
    num_running = ledger.num_running("alice")
    assert num_running == sum(verdict.refused_by is None for verdict in let_in)
    assert 1 <= num_running <= max(1, tokens_per_minute // (20 + LEAST_OUTPUT))


@given(st.integers(1, 20_000), st.lists(st.integers(0, 5000), max_size=40))
def test_requests_of_one_token_are_bounded_in_number_where_tokens_alone_are_limited(
    tokens_per_minute: int, steps: list[int]
) -> None:
    ledger, limits = KeyLedger(Clock()), KeyLimits(tokens_per_minute=tokens_per_minute)
    for _ in steps:
        ledger.decide(charge(1), limits)
    assert ledger.num_running("alice") <= max(1, tokens_per_minute // LEAST_OUTPUT)
    assert KeyLimits(requests_per_minute=1).most_at_once == 0
    assert replace(limits, max_concurrent_requests=7).most_at_once == 7


@given(
    st.integers(100, 2000),
    st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 400)), min_size=1, max_size=60),
)
def test_however_long_answers_grow_no_more_is_begun_before_the_debt_is_paid(
    tokens_per_minute: int, steps: list[tuple[float, int]]
) -> None:
    """Tokens are spent as they come: what was used is never ahead of a bucket and its inflow, but
    by what those that run have used since the last of them was let in.
    """
    clock = Clock()
    began = clock.now
    ledger = KeyLedger(clock)
    limits = KeyLimits(tokens_per_minute=tokens_per_minute, max_concurrent_requests=4)
    used = 0
    for pause_s, num_tokens in steps:
        clock.now += pause_s
        verdict = ledger.decide(charge(1), limits)
        if verdict.refused_by is None:
            bound = tokens_per_minute * (1 + (clock.now - began) / MINUTE_S)
            assert used <= bound + 1e-3
            used += 1
        if ledger.num_running("alice"):
            ledger.spend("alice", num_tokens=num_tokens)
            used += num_tokens


def test_seconds_of_cpu_are_paid_in_requests_and_who_asks_for_no_token_needs_none() -> None:
    ledger = KeyLedger(Clock())
    limits = KeyLimits(requests_per_minute=10, tokens_per_minute=1000)
    assert ledger.decide(charge(1000), limits).refused_by is None
    ledger.spend("alice", num_tokens=500, num_requests=4.5)
    ledger.spend("nobody", num_requests=1.0)  # it has no limits
    counting = ledger.decide(charge(0), limits)
    assert counting.refused_by is None
    assert counting.requests is not None
    assert counting.requests.remaining == 3  # of 3.5
    assert ledger.decide(charge(1), limits).refused_by is LimitKind.TOKENS
    ledger.spend("alice", num_requests=10.0)
    refused = ledger.decide(charge(0), limits)
    assert refused.refused_by is LimitKind.REQUESTS
    assert refused.retry_after_s == pytest.approx(45.0)


def test_a_request_larger_than_the_bucket_waits_for_a_full_one_and_no_longer() -> None:
    clock = Clock()
    ledger, limits = KeyLedger(clock), KeyLimits(tokens_per_minute=100, max_concurrent_requests=2)
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
    assert (refused.refused_by, refused.num_tokens) == (LimitKind.CONCURRENCY, 0)
    assert refused.requests is not None
    assert refused.requests.remaining == 4
    assert refused.tokens is not None
    assert refused.tokens.remaining == 90
    settle(ledger, running, 10)
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
    settle(ledger, lost, 0)  # too late: it is nobody's
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
            settle(ledger, running.pop(), num_tokens)
        assert ledger.num_running("alice") == len(running) <= most
