"""Filter > score > pick, and the load that the pool view hands to it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.pool.view import FAILURE_COOLDOWN_S, Candidate, PoolView
from router.routing.policy import SCORERS, Exclusions, NoWorkersError, PairingPolicy, load_score


def candidate(
    role: Role, number: int, *, layout: str = "l", requests: int = 0, **change: object
) -> Candidate:
    draining = bool(change.pop("draining", False))
    member = Member(
        key=WorkerKey(f"{role.value}-{number}", 1, 0),
        role=role,
        address="127.0.0.1:1",
        num_ranks=1,
        model="m",
        max_model_len=100,
        layout_fingerprint=layout,
        transport="loopback",
        draining=draining,
    )
    options = {"num_tokens": 0, "recently_failed": False, "whole": True, **change}
    return Candidate(member=member, num_requests=requests, **options)  # type: ignore[arg-type]


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Candidate], list[Candidate]]:
    def side(role: Role) -> list[Candidate]:
        return [
            candidate(
                role,
                number,
                layout=draw(st.sampled_from("xy")),
                requests=draw(st.integers(0, 3)),
                draining=draw(st.booleans()),
                recently_failed=draw(st.booleans()),
                whole=draw(st.integers(0, 4)) > 0,
            )
            for number in range(draw(st.integers(0, 5)))
        ]

    return side(Role.PREFILL), side(Role.DECODE)


@given(pools(), st.sampled_from(sorted(SCORERS)), st.data())
def test_a_pick_is_legal_and_found_whenever_there_is_one(pool, name: str, data) -> None:
    prefills, decodes = pool
    keys = [c.member.key for c in (*prefills, *decodes)]
    suspects = {key for key in keys if data.draw(st.integers(0, 3)) == 0}
    excluded = Exclusions(suspects=suspects)

    def usable(side: list[Candidate]) -> list[Candidate]:
        left = [c for c in side if not c.member.draining and c.whole]
        return [c for c in left if not c.recently_failed] or left

    legal = {
        (p.member.key, d.member.key)
        for p in usable(prefills)
        for d in usable(decodes)
        if p.member.compatibility == d.member.compatibility
    }
    try:
        pair = PairingPolicy(name).pick(prefills, decodes, excluded)
    except NoWorkersError as error:
        pair, refusal = None, error.message
    if pair is None:
        assert not legal
        assert "Fix" in refusal
        return
    assert pair.keys in legal
    lives = {key.life for key in suspects}
    suspicion = {
        keys: len(suspects & set(keys)) + sum(key.life in lives for key in keys) for keys in legal
    }
    least = min(suspicion.values())
    assert suspicion[pair.keys] == least
    if name == "least-loaded":
        score = {c.member.key: load_score(c) for c in (*prefills, *decodes)}
        best = min(score[p] + score[d] for p, d in legal if suspicion[p, d] == least)
        assert sum(score[key] for key in pair.keys) == best


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from(sorted(SCORERS)))
def test_equal_members_take_turns(num_prefills: int, num_decodes: int, name: str) -> None:
    prefills = [candidate(Role.PREFILL, i) for i in range(num_prefills)]
    decodes = [candidate(Role.DECODE, i) for i in range(num_decodes)]
    policy = PairingPolicy(name)
    turns = num_prefills * num_decodes
    picks = [policy.pick(prefills, decodes) for _ in range(turns)]
    assert set(Counter(p.prefill.key for p in picks).values()) == {num_decodes}
    assert set(Counter(p.decode.key for p in picks).values()) == {num_prefills}


def test_waiting_prompt_tokens_weigh() -> None:
    busy = candidate(Role.PREFILL, 0, requests=1, num_tokens=100_000)
    idle = candidate(Role.PREFILL, 1, requests=3)
    picked = PairingPolicy("least-loaded").pick([busy, idle], [candidate(Role.DECODE, 0)])
    assert picked.prefill.key.instance == "prefill-1"


def test_excluded_members_are_not_picked_again() -> None:
    prefills = [candidate(Role.PREFILL, 0)]
    decodes = [candidate(Role.DECODE, i) for i in range(2)]
    policy = PairingPolicy("least-loaded")
    excluded = Exclusions(members={decodes[0].member.key})
    assert policy.pick(prefills, decodes, excluded).decode.key == decodes[1].member.key
    excluded.members.add(decodes[1].member.key)
    with pytest.raises(NoWorkersError, match="tried"):
        policy.pick(prefills, decodes, excluded)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rank(number: int, *, num_ranks: int = 2, load: WorkerLoad | None = None) -> Member:
    return Member(
        key=WorkerKey("decode-0", 1, number),
        role=Role.DECODE,
        address=f"127.0.0.1:{number + 1}",
        num_ranks=num_ranks,
        model="m",
        max_model_len=100,
        layout_fingerprint="l",
        transport="loopback",
        load=load or WorkerLoad(),
    )


def test_ranks_wait_for_their_whole_instance() -> None:
    pool = PoolView(Clock())
    pool.update([rank(0)])
    assert [c.whole for c in pool.candidates(Role.DECODE)] == [False]
    pool.update([rank(0), rank(1)])
    assert [c.whole for c in pool.candidates(Role.DECODE)] == [True, True]


def prefill_rank(number: int, *, num_parts: int) -> Member:
    return replace(
        rank(number, num_ranks=4),
        key=WorkerKey("prefill-0", 1, number),
        role=Role.PREFILL,
        num_parts=num_parts,
    )


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


def test_pairs_spread_over_the_ranks_of_an_instance() -> None:
    pool = PoolView(Clock())
    pool.update([*(prefill_rank(number, num_parts=1) for number in range(4)), rank(0, num_ranks=1)])
    policy = PairingPolicy("least-loaded")
    picked = []
    with ExitStack() as in_flight:
        for _ in range(8):
            pair = policy.pick(pool.candidates(Role.PREFILL), pool.candidates(Role.DECODE))
            picked.append(pair.prefill.key.rank)
            in_flight.enter_context(pool.in_flight(pair.prefill.key, 100))
    assert sorted(picked) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_failure_counts_against_all_ranks_of_the_instance() -> None:
    pool = PoolView(Clock())
    other = replace(rank(0, num_ranks=1), key=WorkerKey("decode-1", 1, 0))
    pool.update([rank(0), rank(1), other])
    pool.mark_failed(rank(0).key, "test")
    failed = {c.member.key: c.recently_failed for c in pool.candidates(Role.DECODE)}
    assert failed == {rank(0).key: True, rank(1).key: True, other.key: False}


def test_ranks_beside_a_suspect_come_after_other_instances() -> None:
    pool = PoolView(Clock())
    beside = [prefill_rank(number, num_parts=1) for number in range(4)]
    other = replace(beside[0], key=WorkerKey("prefill-1", 1, 0), num_ranks=1)
    decode = rank(0, num_ranks=1)
    policy = PairingPolicy("least-loaded")
    exclusions = Exclusions(suspects={beside[0].key, decode.key})

    def pick() -> Member:
        candidates = pool.candidates(Role.PREFILL), pool.candidates(Role.DECODE)
        return policy.pick(*candidates, exclusions).prefill

    pool.update([*beside, other, decode])
    with pool.in_flight(other.key, 10_000):
        assert pick() == other
    pool.update([*beside, decode])
    with ExitStack() as in_flight:
        for member in beside[1:]:
            in_flight.enter_context(pool.in_flight(member.key, 10_000))
        assert pick() != beside[0]


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
    assert pool.candidates(Role.DECODE)[0].recently_failed
    clock.now = FAILURE_COOLDOWN_S + 0.1
    assert not pool.candidates(Role.DECODE)[0].recently_failed


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
