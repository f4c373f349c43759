"""The index against a plain dict of sets: any events, gaps, restarts, dumps and sweeps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.pool import block_log, prefix_index
from router.pool.members import WorkerKey
from router.pool.prefix_index import Expectation, PrefixIndex
from runtime.block_hash import hash_blocks

KEYS = [WorkerKey(f"prefill-{n}", epoch, 0) for n in range(3) for epoch in (1, 2)]
HASHES = [bytes([n]) * 16 for n in range(12)]

some_hashes = st.lists(st.sampled_from(HASHES), max_size=8)
WHAT = [
    *["add", "remove", "clear", "store", "store", "discard", "dump", "dropped dump"],
    *["sweep", "expect", "expect", "unexpect"],
]
event = st.tuples(st.sampled_from(WHAT), st.sampled_from(KEYS), some_hashes)
Event = tuple[str, WorkerKey, list[bytes]]


class Model:
    """An index, and beside it what it should know, as plain sets."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.held: dict[WorkerKey, set[bytes]] = {}
        self.expected: dict[WorkerKey, Counter[bytes]] = {}
        self._sent: list[tuple[Expectation, Counter[bytes]]] = []

    def apply(self, what: str, key: WorkerKey, hashes: list[bytes]) -> None:
        index = self.index
        if what == "add":
            index.add(key)
            if key not in self.held:
                self._hold(key, set())
        elif what == "remove":
            index.remove(key)
            self.held.pop(key, None)
            self.expected.pop(key, None)
        elif what == "sweep":
            index.sweep(len(hashes))
        elif what == "unexpect":
            if self._sent:
                expectation, counted = self._sent.pop(len(hashes) % len(self._sent))
                index.unexpect(expectation)
                counted.subtract(expectation.block_hashes)
        elif key in self.held:
            self._change(what, key, hashes)

    def _change(self, what: str, key: WorkerKey, hashes: list[bytes]) -> None:
        index = self.index
        if what == "clear":
            index.clear(key)
            self._hold(key, set())
        elif what == "store":
            index.store(key, hashes)
            self.held[key] |= set(hashes)
        elif what == "discard":
            index.discard(key, hashes)
            self.held[key] -= set(hashes)
        elif what == "expect":
            expectation = index.expect(key, hashes)
            assert expectation is not None
            self.expected[key].update(hashes)
            self._sent.append((expectation, self.expected[key]))
        else:
            draft = index.draft()
            index.store_draft(draft, hashes[:3])
            self.check(HASHES)  # half a dump is not to be seen
            index.store_draft(draft, hashes[3:])
            if what == "dump":
                index.publish(key, draft)
                self._hold(key, set(hashes))
            else:
                index.drop(draft)

    def _hold(self, key: WorkerKey, hashes: set[bytes]) -> None:
        """What was expected of the rank before is expected no more."""
        self.held[key], self.expected[key] = hashes, Counter()

    def check(self, context: list[bytes]) -> None:
        index, held = self.index, self.held
        assert set(index.ranks) == held.keys()
        assert {key: index.blocks(key) for key in held} == held
        assert {key: index.num_blocks(key) for key in held} == {k: len(v) for k, v in held.items()}
        everything = set().union(*held.values())
        assert len(index) == len(everything)
        assert {h for h in HASHES if h in index} == everything
        assert not any(index.was_evicted(h) for h in everything)
        found = {k: leading(held[k] | set(+self.expected[k]), context) for k in held}
        match = index.match(context)
        assert {key: match.num_blocks(key) for key in KEYS} == {k: found.get(k, 0) for k in KEYS}
        assert match.most == max(found.values(), default=0)
        levels = list(match.levels())
        assert [level.num_blocks for level in levels] == sorted(
            {number for number in found.values() if number}, reverse=True
        )
        for level in levels:
            assert set(level.keys) == {k for k, n in found.items() if n == level.num_blocks}

    def end(self) -> None:
        """Nothing is left of ranks that are gone, and of what was on its way."""
        for expectation, _ in self._sent:
            self.index.unexpect(expectation)
        for key in KEYS:
            self.index.remove(key)
        while self.index.sweep(3):
            pass
        assert not self.index._ranks_of
        assert not self.index._expected
        assert not self.index._gone
        assert sorted(self.index._free) == list(range(len(self.index._keys)))


def leading(held: set[bytes], context: list[bytes]) -> int:
    for number, block_hash in enumerate(context):
        if block_hash not in held:
            return number
    return len(context)


@settings(max_examples=200, deadline=None)
@given(st.lists(event, max_size=60), st.lists(st.sampled_from(HASHES), max_size=8))
def test_says_what_plain_sets_say_at_every_moment(
    events: list[Event], context: list[bytes]
) -> None:
    model = Model()
    for each in events:
        model.apply(*each)
        model.check(context)
    model.end()


@settings(max_examples=100, deadline=None)
@given(st.lists(event, max_size=60))
def test_stays_right_where_few_sets_are_remembered_and_logs_are_short(
    events: list[Event],
) -> None:
    with pytest.MonkeyPatch.context() as small:
        small.setattr(block_log, "SLACK", 0)
        small.setattr(block_log, "PACE", 1)
        small.setattr(prefix_index, "MAX_SETS", 1)
        model = Model()
        for each in events:
            model.apply(*each)
            model.check(HASHES[:4])
        model.end()


class CountingDict(dict[bytes, int]):
    """Counts who is asked for."""

    num_lookups = 0

    def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
        self.num_lookups += 1
        return super().get(key, default)


def test_no_call_of_the_loop_walks_over_all_that_a_rank_held() -> None:
    """However much is given up, one call looks at as many blocks as it was asked to."""
    index = PrefixIndex()
    books = index._ranks_of = CountingDict()
    number = 20_000
    hashes = [n.to_bytes(16, "big") for n in range(number)]
    most = 0

    def spent() -> int:
        walked, books.num_lookups = books.num_lookups, 0
        return walked

    for key in KEYS[:3]:
        index.add(key)
        index.store(key, hashes)
    spent()
    index.remove(KEYS[0])
    index.clear(KEYS[1])
    draft = index.draft()
    index.publish(KEYS[2], draft)
    assert spent() == 0
    assert index.match(hashes[:1]).most == 0
    spent()
    while index.sweep(100):
        most = max(most, spent())
    assert most == 100
    assert len(index) == 0


def test_a_log_is_written_anew_a_few_entries_at_a_time() -> None:
    index, key = PrefixIndex(), KEYS[0]
    books = index._ranks_of = CountingDict()
    hashes = [n.to_bytes(16, "big") for n in range(20_000)]
    index.add(key)
    index.store(key, hashes)
    for start in range(0, len(hashes) - 10, 10):
        books.num_lookups = 0
        index.discard(key, hashes[start : start + 10])
        assert books.num_lookups <= 10 * (1 + block_log.PACE)
    assert index.blocks(key) == set(hashes[-10:])
    assert len(index._holdings[key].log) < 3 * block_log.SLACK


def test_a_log_does_not_grow_with_what_comes_and_goes() -> None:
    index, key = PrefixIndex(), KEYS[0]
    index.add(key)
    for _ in range(10_000):
        index.store(key, HASHES)
        index.discard(key, HASHES[1:])
    assert len(index._holdings[key].log) < 3 * block_log.SLACK
    assert index.blocks(key) == {HASHES[0]}


def test_a_place_that_was_given_up_does_not_show_what_was_held_there() -> None:
    index = PrefixIndex()
    index.add(KEYS[0])
    index.store(KEYS[0], HASHES)
    index.remove(KEYS[0])
    index.add(KEYS[1])
    assert index.match(HASHES).num_blocks(KEYS[1]) == 0
    assert len(index) == 0


def test_tells_what_was_evicted_from_what_was_never_there() -> None:
    index = PrefixIndex()
    index.add(KEYS[0])
    index.store(KEYS[0], HASHES[:2])
    index.discard(KEYS[0], HASHES[1:2])
    assert [index.was_evicted(h) for h in HASHES[:3]] == [False, True, False]
    index.store(KEYS[0], HASHES[1:2])
    assert not index.was_evicted(HASHES[1])


def test_finds_the_same_context_of_the_same_salt_alone() -> None:
    index, context = PrefixIndex(), list(range(1, 33))
    index.add(KEYS[0])
    index.store(KEYS[0], hash_blocks(context, 8, salt="a"))
    assert index.match(hash_blocks([*context, 99], 8, salt="a")).num_blocks(KEYS[0]) == 4
    assert index.match(hash_blocks([*context[:20], *context], 8, salt="a")).most == 2
    assert index.match(hash_blocks(context, 8, salt="b")).most == 0
