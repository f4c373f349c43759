"""Filter > score > pick, against the pool as it changes."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import Candidate, PoolView
from router.routing.policy import NoWorkersError, PairingPolicy
from router.routing.request_shape import RequestShape
from router.routing.scorers import SCORERS, LeastLoaded
from tests.router.routing.pools import Clock, decode, endpoint, load, pool_of, prefill

ANY = RequestShape()


@st.composite
def pools(draw: st.DrawFn) -> PoolView:
    members, failed = [], []
    for role in Role:
        for number in range(draw(st.integers(0, 5))):
            member = endpoint(
                role,
                number,
                layout_fingerprint=draw(st.sampled_from("xy")),
                load=load(draw(st.integers(0, 3))),
                draining=draw(st.integers(0, 3)) == 0,
                num_ranks=1 if draw(st.integers(0, 4)) else 2,
            )
            members.append(member)
            failed += [member.key] if draw(st.booleans()) else []
    pool = pool_of(*members)
    for key in failed:
        pool.mark_failed(key, "test")
    return pool


def legal_pairs(pool: PoolView, excluded: set[WorkerKey]) -> set[tuple[WorkerKey, WorkerKey]]:
    """By the rules, the slow way."""
    sides = []
    for role in Role:
        left = [c.member for c in pool.candidates(role) if not c.member.draining and c.whole]
        left = [m for m in left if not pool.recently_failed(m.key)] or left
        sides.append([m for m in left if m.key not in excluded])
    prefills, decodes = sides
    return {(p.key, d.key) for p in prefills for d in decodes if p.compatibility == d.compatibility}


@given(pools(), st.sampled_from(sorted(SCORERS)), st.data())
def test_a_pick_is_legal_and_found_whenever_there_is_one(pool, name: str, data) -> None:
    keys = [member.key for member in pool.members()]
    suspects = {key for key in keys if data.draw(st.integers(0, 3)) == 0}
    excluded = {key for key in keys if data.draw(st.integers(0, 5)) == 0}
    legal = legal_pairs(pool, excluded)
    policy = PairingPolicy(name)
    shape = RequestShape(suspects=suspects, excluded=excluded)
    if not legal:
        with pytest.raises(NoWorkersError, match="Fix"):
            policy.pick(shape, pool)
        return
    pair = policy.pick(shape, pool)
    assert pair.keys in legal
    lives = {key.life for key in suspects}
    suspicion = {
        keys: len(suspects & set(keys)) + sum(key.life in lives for key in keys) for keys in legal
    }
    least = min(suspicion.values())
    assert suspicion[pair.keys] == least
    if name == "least-loaded":
        requests = {c.member.key: c.num_requests for role in Role for c in pool.candidates(role)}
        best = min(requests[p] + requests[d] for p, d in legal if suspicion[p, d] == least)
        assert sum(requests[key] for key in pair.keys) == best


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from(sorted(SCORERS)))
def test_equal_members_take_turns(num_prefills: int, num_decodes: int, name: str) -> None:
    pool = pool_of(*map(prefill, range(num_prefills)), *map(decode, range(num_decodes)))
    policy = PairingPolicy(name)
    picks = [policy.pick(ANY, pool) for _ in range(num_prefills * num_decodes)]
    assert set(Counter(p.prefill.key for p in picks).values()) == {num_decodes}
    assert set(Counter(p.decode.key for p in picks).values()) == {num_prefills}


@settings(deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_is_kept_between_picks_is_what_a_fresh_policy_sees(seed: int) -> None:
    """Whatever happens to the pool, a pick costs no more than that of a table made anew."""
    chance = random.Random(seed)
    members = [*map(prefill, range(3)), *map(decode, range(4))]
    pool, policy, scorer = pool_of(*members), PairingPolicy("least-loaded"), LeastLoaded()
    with ExitStack() as in_flight:
        for sequence in range(1, 30):
            index = chance.randrange(len(members))
            report = load(
                chance.randrange(5),
                num_free_blocks=chance.randrange(10),
                num_total_blocks=10,
                sequence=sequence,
            )
            match chance.randrange(4):
                case 0:
                    pool.report(members[index].key, report)
                case 1:
                    members[index] = replace(members[index], load=report)
                    pool.update(members)
                case 2:
                    in_flight.enter_context(pool.in_flight(members[index].key, 500))
                case 3:
                    pool.update(members[: chance.randrange(4, 8)])
            costs = []
            for picker in (policy, PairingPolicy("least-loaded")):
                try:
                    pair = picker.pick(ANY, pool)
                except NoWorkersError:
                    costs.append(None)
                    continue
                by_key = {c.member.key: c for role in Role for c in pool.candidates(role)}
                chosen = [by_key[key] for key in pair.keys]
                has_room = scorer.decode_room(chosen[1]) > 0
                costs.append((has_room, scorer.score(*chosen, ANY)))
            assert costs[0] == costs[1]


def test_waiting_prompt_tokens_weigh() -> None:
    busy = prefill(0, load=load(1, num_tokens_waiting=100_000))
    idle = prefill(1, load=load(3))
    picked = PairingPolicy("least-loaded").pick(ANY, pool_of(busy, idle, decode(0)))
    assert picked.prefill == idle


def test_a_rank_full_of_long_contexts_is_as_loaded_as_one_with_many_short_ones() -> None:
    blocks = {"num_total_blocks": 1000}
    long = decode(0, max_num_requests=100, load=load(5, num_free_blocks=100, **blocks))
    short = decode(1, max_num_requests=100, load=load(20, num_free_blocks=900, **blocks))
    assert PairingPolicy("least-loaded").pick(ANY, pool_of(prefill(0), long, short)).decode == short


def test_a_long_prompt_goes_where_there_is_room_for_it_now() -> None:
    small = decode(0, load=load(0, num_free_blocks=2, num_total_blocks=4))
    roomy = decode(1, load=load(3, num_free_blocks=99, num_total_blocks=100))
    pool, policy = pool_of(prefill(0), small, roomy), PairingPolicy("least-loaded")
    assert policy.pick(RequestShape(num_context_tokens=100), pool).decode == small
    assert policy.pick(RequestShape(num_context_tokens=128), pool).decode == roomy
    assert policy.pick(RequestShape(num_context_tokens=1_000_000), pool).decode == small


@pytest.mark.parametrize(
    "full",
    [
        {"load": WorkerLoad(num_requests_waiting=1)},
        {"load": load(2), "max_num_requests": 2},
    ],
)
def test_no_request_queues_at_one_rank_while_another_is_free(full: dict) -> None:
    busy = decode(1, load=load(9), max_num_requests=100)
    picked = PairingPolicy("least-loaded").pick(ANY, pool_of(prefill(0), decode(0, **full), busy))
    assert picked.decode == busy


def test_excluded_members_are_not_picked_again() -> None:
    pool, policy = pool_of(prefill(0), decode(0), decode(1)), PairingPolicy("least-loaded")
    excluded = {decode(0).key}
    assert policy.pick(RequestShape(excluded=excluded), pool).decode == decode(1)
    excluded.add(decode(1).key)
    with pytest.raises(NoWorkersError, match="tried"):
        policy.pick(RequestShape(excluded=excluded), pool)


def test_the_prefill_that_has_the_kv_is_taken_if_it_can_be() -> None:
    has_kv, idle = prefill(0, load=load(9)), prefill(1)
    pool, policy = pool_of(has_kv, idle, decode(0)), PairingPolicy("least-loaded")
    shape = RequestShape(preferred_prefill=has_kv.key)
    assert policy.pick(shape, pool).prefill == has_kv
    assert policy.pick(replace(shape, excluded={has_kv.key}), pool).prefill == idle
    pool.mark_failed(has_kv.key, "test")
    assert policy.pick(shape, pool).prefill == idle
    pool.update([replace(has_kv, draining=True), idle, decode(0)])
    assert policy.pick(shape, pool).prefill == idle


def test_the_prefill_that_has_the_kv_brings_its_group() -> None:
    has_kv = prefill(0, layout_fingerprint="x", load=load(9))
    partner = decode(0, layout_fingerprint="x", load=load(9))
    pool = pool_of(has_kv, partner, prefill(1), decode(1))
    pair = PairingPolicy("least-loaded").pick(RequestShape(preferred_prefill=has_kv.key), pool)
    assert (pair.prefill, pair.decode) == (has_kv, partner)


class SameHost(LeastLoaded):
    """A scorer of pairs: KV travels cheaply within a host."""

    separable = False

    def score(self, prefill: Candidate, decode: Candidate, shape: RequestShape) -> float:
        is_far = prefill.member.address != decode.member.address
        return super().score(prefill, decode, shape) + is_far * shape.num_context_tokens / 1000


def test_a_scorer_of_pairs_sees_the_best_of_both_sides() -> None:
    near = prefill(1, load=load(2)), decode(1, load=load(2))
    pool = pool_of(prefill(0), decode(2), *near)
    policy = PairingPolicy("same-host", {"same-host": SameHost()})
    assert policy.pick(RequestShape(num_context_tokens=5000), pool).keys == tuple(
        member.key for member in near
    )
    far = policy.pick(RequestShape(num_context_tokens=3000), pool)
    assert (far.prefill, far.decode) == (prefill(0), decode(2))


def rank(number: int, *, num_ranks: int = 2) -> Member:
    return decode(0, key=WorkerKey("decode-0", 1, number), num_ranks=num_ranks)


def prefill_rank(number: int) -> Member:
    return prefill(0, key=WorkerKey("prefill-0", 1, number), num_ranks=4)


def test_pairs_spread_over_the_ranks_of_an_instance() -> None:
    pool = pool_of(*map(prefill_rank, range(4)), rank(0, num_ranks=1))
    policy = PairingPolicy("least-loaded")
    picked = []
    with ExitStack() as in_flight:
        for _ in range(8):
            pair = policy.pick(ANY, pool)
            picked.append(pair.prefill.key.rank)
            in_flight.enter_context(pool.in_flight(pair.prefill.key, 100))
    assert sorted(picked) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_ranks_beside_a_suspect_come_after_other_instances() -> None:
    beside = [prefill_rank(number) for number in range(4)]
    other, partner = prefill(1), decode(0)
    policy = PairingPolicy("least-loaded")
    shape = RequestShape(suspects={beside[0].key, partner.key})
    pool = pool_of(*beside, other, partner)
    with pool.in_flight(other.key, 10_000):
        assert policy.pick(shape, pool).prefill == other
    pool.update([*beside, partner])
    with ExitStack() as in_flight:
        for member in beside[1:]:
            in_flight.enter_context(pool.in_flight(member.key, 10_000))
        assert policy.pick(shape, pool).prefill != beside[0]


def test_a_member_that_failed_is_back_after_a_moment() -> None:
    clock = Clock()
    pool, policy = PoolView(clock), PairingPolicy("round-robin")
    pool.update([prefill(0), decode(0), decode(1)])
    pool.mark_failed(decode(0).key, "test")
    assert {policy.pick(ANY, pool).decode for _ in range(4)} == {decode(1)}
    clock.now = 60.0
    assert {policy.pick(ANY, pool).decode for _ in range(2)} == {decode(0), decode(1)}


def test_a_pick_from_a_large_pool_is_cheap() -> None:
    pool = pool_of(*map(prefill, range(16)), *map(decode, range(144)))
    policy = PairingPolicy("least-loaded")
    shape = RequestShape(num_context_tokens=1000)
    times = []
    for number in range(100):
        pool.report(decode(number).key, load(1))
        start = time.perf_counter()
        policy.pick(shape, pool)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.001
