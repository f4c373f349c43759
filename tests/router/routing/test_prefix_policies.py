"""Pairs by what prefix caches hold: predictions, bindings of conversations, explanations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.pool.members import Member, Role, WorkerLoad
from router.pool.view import PoolView
from router.routing.explain import Explanation
from router.routing.policy import Pair, PairingPolicy
from router.routing.prefixes import MAX_CONVERSATIONS, Binding, Conversations, Prefixes
from router.routing.request_shape import RequestShape
from router.routing.scorers import SCORERS
from router.routing.scorers.predicted_ttft import delay_of_others_s
from runtime.block_hash import hash_blocks
from runtime.tiers import TierTokens
from tests.router.routing.pools import Clock, decode, load, pool_of, prefill

BLOCK = 64
TEXT = list(range(10, 10 + 100 * BLOCK))
BY_PREFIX = [name for name, scorer in SCORERS.items() if scorer.by_prefix]


class Router:
    """A policy over a pool whose workers' blocks the test sets."""

    def __init__(self, name: str, *members: Member) -> None:
        self.clock = Clock()
        self.pool: PoolView = pool_of(*members)
        self.prefixes = Prefixes(self.clock)
        self.policy = PairingPolicy(name, prefixes=self.prefixes)
        for member in members:
            self.prefixes.index.add(member.key)
        self.num_reports = 0

    def holds(self, member: Member, tokens: list[int], salt: str = "") -> None:
        self.prefixes.index.store(member.key, hash_blocks(tokens, BLOCK, salt=salt))

    def says(self, member: Member, **fields: object) -> None:
        self.num_reports += 1
        report = WorkerLoad(sequence=self.num_reports, **fields)  # type: ignore[arg-type]
        self.pool.report(member.key, report)

    def pick(self, tokens: list[int], salt: str = "", **fields: object) -> Pair:
        shape = RequestShape(
            num_context_tokens=len(tokens),
            cache_salt=salt,
            block_hashes=hash_blocks(tokens, BLOCK, salt=salt),
            first_tokens=tokens[:BLOCK],
            explain=True,
            **fields,  # type: ignore[arg-type]
        )
        return self.policy.pick(shape, self.pool)

    def why(self, tokens: list[int], salt: str = "", **fields: object) -> Explanation:
        why = self.pick(tokens, salt, **fields).why
        assert why is not None
        return why


P = [prefill(number) for number in range(8)]
D = [decode(number, kv_block_bytes=1 << 20) for number in range(3)]


@pytest.mark.parametrize("name", BY_PREFIX)
@pytest.mark.parametrize("number", range(8))
def test_a_context_goes_to_the_worker_that_has_it(name: str, number: int) -> None:
    router = Router(name, *P, *D)
    router.holds(P[number], TEXT[: 80 * BLOCK])
    assert router.pick(TEXT).prefill.key == P[number].key


@pytest.mark.parametrize("name", BY_PREFIX)
def test_a_long_queue_is_not_worth_a_short_match(name: str) -> None:
    router = Router(name, *P, *D)
    router.holds(P[0], TEXT[: 4 * BLOCK])
    with router.pool.in_flight(P[0].key, 200_000):
        assert router.pick(TEXT).prefill.key != P[0].key


@pytest.mark.parametrize("name", BY_PREFIX)
def test_prompts_of_one_prefix_that_come_together_go_together(name: str) -> None:
    router = Router(name, *P, *D)
    first = router.pick(TEXT)
    for tail in range(3):
        assert router.pick([*TEXT[: 90 * BLOCK], *[tail] * 99]).prefill is first.prefill


def test_what_was_expected_and_never_came_is_forgotten() -> None:
    router = Router("predicted-ttft", *P, *D)
    first = router.pick(TEXT)
    assert router.why(TEXT).estimate.prefill_blocks > 0
    router.clock.now = 1000.0
    why = router.why(TEXT)
    assert why.estimate.prefill_blocks == 0
    assert why.miss == "never seen"
    assert first.estimate is not None


def test_the_prediction_is_what_was_measured() -> None:
    router = Router("predicted-ttft", P[0], D[0])
    router.says(P[0], clock_s=1.0)
    router.says(P[0], clock_s=9.0, num_tokens_done=8000, busy_s=2.0)
    router.says(D[0], clock_s=1.0, num_total_blocks=999, num_free_blocks=999)
    path = {"received": (("prefill-0/0", 20 << 20),), "received_s": (("prefill-0/0", 2.0),)}
    router.says(D[0], clock_s=2.0, num_total_blocks=999, num_free_blocks=999, **path)
    router.holds(P[0], TEXT[: 60 * BLOCK])
    router.holds(D[0], TEXT[: 30 * BLOCK])
    with router.pool.in_flight(P[0].key, 1000):
        estimate = router.pick(TEXT).estimate
    assert estimate is not None
    assert estimate.prefill_blocks == 60
    assert estimate.decode_blocks == 30
    assert estimate.num_new_tokens == 40 * BLOCK
    assert estimate.queue_s == pytest.approx(1000 / 4000)
    assert estimate.compute_s == pytest.approx(40 * BLOCK / 4000)
    assert estimate.transfer_s == pytest.approx(70 / 10 - estimate.compute_s)
    assert estimate.room_s == 0.0


def works(router: Router, member: Member, share: float) -> None:
    """It has worked so much of the last minute, at 20,000 tokens a second."""
    router.says(member, clock_s=1.0)
    done = round(60 * share * 20_000)
    router.says(member, clock_s=61.0, num_tokens_done=done, busy_s=60.0 * share)


@pytest.mark.parametrize(("num_blocks", "is_kept"), [(20, False), (90, True)])
def test_a_worker_that_works_much_keeps_what_leaves_little_to_compute(
    num_blocks: int, is_kept: bool
) -> None:
    router = Router("predicted-ttft", *P[:2], D[0])
    works(router, P[0], 0.8)
    works(router, P[1], 0.2)
    router.holds(P[0], TEXT[: num_blocks * BLOCK])
    assert (router.pick(TEXT).prefill.key == P[0].key) is is_kept


def test_others_wait_for_what_is_brought_until_the_worker_has_caught_up() -> None:
    router = Router("predicted-ttft", *P[:2], D[0])
    works(router, P[0], 0.75)
    busy, idle = router.pool.candidates(Role.PREFILL)
    assert delay_of_others_s(idle, 2.0) == 0.0
    assert delay_of_others_s(busy, 2.0) == pytest.approx(2.0 * 0.75 / 0.25, rel=0.01)
    works(router, P[1], 1.0)
    assert delay_of_others_s(idle, 2.0) == pytest.approx(2.0 * 0.95 / 0.05)


def test_the_queue_is_what_goes_before_the_requests_tier() -> None:
    """The first worker has most tokens, nearly all of them of the last tier."""
    router = Router("predicted-ttft", *P[:2], D[0])
    long = (TierTokens(0, 0.5, 1_000), TierTokens(2, 0.2, 99_000))
    router.says(P[0], num_tokens_waiting=100_000, tokens_by_tier=long)
    router.says(P[1], num_tokens_waiting=20_000)
    first = router.pick(TEXT, tier_order=0)
    assert first.prefill.key == P[0].key
    assert first.estimate is not None
    assert first.estimate.queue_s == pytest.approx(1_000 / 0.8 / 20_000)
    assert router.pick(TEXT[::-1], tier_order=2).prefill.key == P[1].key


def test_prompts_that_a_report_does_not_know_of_yet_are_ahead_of_every_tier() -> None:
    router = Router("predicted-ttft", P[0], D[0])
    tiers = (TierTokens(0, 0.5, 1_000), TierTokens(1, 0.0, 9_000))
    router.says(P[0], num_tokens_waiting=10_000, tokens_by_tier=tiers)
    load = router.pool.candidates(Role.PREFILL)[0].load
    with router.pool.in_flight(P[0].key, 500):
        assert [load.num_tokens_ahead(order) for order in (0, 1)] == [1_500, 10_500]
    assert load.num_tokens_ahead(0) >= 0


def test_a_conversation_stays_where_only_tiers_behind_wait() -> None:
    router = Router("predicted-ttft", *P[:2], D[0])
    bound = router.pick(TEXT, conversation="c").prefill
    tiers = (TierTokens(0, 0.5, 1), TierTokens(1, 0.0, 10**6))
    router.says(bound, num_tokens_waiting=10**6 + 1, tokens_by_tier=tiers)
    assert router.why(TEXT, conversation="c", tier_order=1).binding == "overloaded"
    assert router.why(TEXT, conversation="c", tier_order=0).binding == "kept"


def test_a_rank_without_room_is_waited_for() -> None:
    router = Router("predicted-ttft", P[0], D[0])
    full = {"num_total_blocks": 99, "num_free_blocks": 1, "num_requests_blocked": 3}
    router.says(D[0], clock_s=1.0, **full)
    router.says(D[0], clock_s=11.0, num_requests_done=20, **full)
    estimate = router.pick(TEXT).estimate
    assert estimate is not None
    assert estimate.room_s == pytest.approx(4 / 2.0)


@pytest.mark.parametrize("name", BY_PREFIX)
def test_a_conversation_goes_back_to_its_pair(name: str) -> None:
    router = Router(name, *P, *D)
    first = router.pick(TEXT[:BLOCK], conversation="c")
    for _ in range(5):  # others come and go
        router.pick(list(range(500, 900)))
    router.clock.now = 1000.0
    pair = router.pick(TEXT, conversation="c")
    assert pair.keys == first.keys
    assert pair.why is not None
    assert pair.why.binding == "kept"


def test_an_overload_breaks_a_binding_and_does_not_rewrite_it() -> None:
    router = Router("predicted-ttft", *P, *D)
    first = router.pick(TEXT[:BLOCK], conversation="c")
    with router.pool.in_flight(first.prefill.key, 10_000_000):
        other = router.pick(TEXT, conversation="c")
        assert other.prefill.key != first.prefill.key
        assert other.why is not None
        assert other.why.binding == "overloaded"
    back = router.pick(TEXT, conversation="c")
    assert back.keys == first.keys


def test_a_binding_to_a_worker_that_is_gone_is_made_anew() -> None:
    router = Router("predicted-ttft", *P, *D)
    first = router.pick(TEXT, conversation="c")
    left = [member for member in [*P, *D] if member.key != first.prefill.key]
    router.pool.update(left)
    second = router.pick(TEXT, conversation="c")
    assert second.why is not None
    assert second.why.binding == "gone"
    assert router.pick(TEXT, conversation="c").keys == second.keys


def test_what_an_attempt_excludes_is_not_bound() -> None:
    router = Router("predicted-ttft", *P, *D)
    first = router.pick(TEXT, conversation="c")
    excluded = frozenset({first.decode.key})
    assert router.pick(TEXT, conversation="c", excluded=excluded).decode.key != first.decode.key


def test_conversations_of_two_salts_have_nothing_in_common() -> None:
    conversations, binding = Conversations(), Binding(P[0].key, D[0].key)
    conversations.bind("a", "c", binding)
    assert conversations.get("a", "c") == binding
    assert conversations.get("b", "c") is None


def test_the_latest_conversations_are_remembered() -> None:
    conversations, binding = Conversations(3), Binding(P[0].key, D[0].key)
    for name in "abc":
        conversations.bind("", name, binding)
    conversations.get("", "a")
    conversations.bind("", "d", binding)
    assert [conversations.get("", name) is not None for name in "abcd"] == [True, False, True, True]
    assert len(conversations) == 3 <= MAX_CONVERSATIONS


def reasons() -> dict[str, tuple[Router, Explanation]]:
    found = {}
    router = Router("predicted-ttft", *P, *D)
    found["never seen"] = router.why(TEXT)
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT[: 50 * BLOCK])
    found["tokens differ at block 50"] = router.why(TEXT)
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT)
    router.prefixes.index.discard(P[1].key, hash_blocks(TEXT, BLOCK)[40:])
    found["evicted: block 40"] = router.why(TEXT)
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT)
    with router.pool.in_flight(P[1].key, 10_000_000):
        found["other rank chosen"] = router.why(TEXT)
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT)
    found["other salt"] = router.why(TEXT, salt="mine")
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT)
    found[""] = router.why(TEXT)
    return found


def test_says_why_there_is_no_hit() -> None:
    for miss, why in reasons().items():
        assert why.miss == miss
    assert reasons()["other rank chosen"].best_prefill == ("prefill-1/0", 100)
    assert reasons()[""].best_prefill[0] == "prefill-1/0"


def test_nothing_is_said_of_the_caches_of_other_salts() -> None:
    router = Router("predicted-ttft", *P, *D)
    router.holds(P[1], TEXT, salt="theirs")
    assert router.why(TEXT, salt="mine").miss == "never seen"
    assert router.why(TEXT).miss == "never seen"


@pytest.mark.parametrize("name", ["least-loaded", "round-robin"])
def test_other_policies_keep_nothing(name: str) -> None:
    router = Router(name, *P, *D)
    assert router.policy.prefixes is None
    pair = router.pick(TEXT, conversation="c")
    assert pair.estimate is None
    assert len(router.prefixes.conversations) == 0


def test_a_queue_that_the_worker_has_computed_is_no_queue() -> None:
    router = Router("predicted-ttft", P[0], D[0])
    with router.pool.in_flight(P[0].key, 50_000):
        router.says(P[0], num_tokens_waiting=50_000)
        router.says(P[0], num_tokens_waiting=9_000)
        router.says(P[0], num_tokens_waiting=4_000)
        candidate = router.pool.candidates(P[0].role)[0]
        assert candidate.load.num_tokens_left == 4_000
        assert candidate.num_tokens == 50_000


def test_blocks_of_another_size_are_never_matched() -> None:
    small = replace(P[1], block_size=16)
    router = Router("predicted-ttft", P[0], small, *D)
    router.prefixes.index.store(small.key, hash_blocks(TEXT, 16))
    assert router.why(TEXT).best_prefill == ("", 0)


def test_reports_of_load_count_where_no_clock_is_told() -> None:
    router = Router("predicted-ttft", P[0], P[1], *D)
    router.pool.report(P[0].key, load(num_tokens_waiting=90_000, sequence=1))
    assert router.pick(TEXT).prefill.key == P[1].key
