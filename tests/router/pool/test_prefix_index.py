"""The index against a plain dict of sets: any events, gaps, restarts and dumps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.pool import prefix_index
from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixIndex
from runtime.block_hash import hash_blocks

KEYS = [WorkerKey(f"prefill-{n}", epoch, 0) for n in range(3) for epoch in (1, 2)]
HASHES = [bytes([n]) * 16 for n in range(12)]

some_hashes = st.lists(st.sampled_from(HASHES), max_size=8)
event = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(KEYS), st.just([])),
    st.tuples(st.just("remove"), st.sampled_from(KEYS), st.just([])),
    st.tuples(st.just("clear"), st.sampled_from(KEYS), st.just([])),
    st.tuples(st.just("store"), st.sampled_from(KEYS), some_hashes),
    st.tuples(st.just("discard"), st.sampled_from(KEYS), some_hashes),
)
Model = dict[WorkerKey, set[bytes]]


def apply(index: PrefixIndex, model: Model, what: str, key: WorkerKey, hashes: list[bytes]) -> None:
    if what == "add":
        index.add(key)
        model.setdefault(key, set())
    elif what == "remove":
        index.remove(key)
        model.pop(key, None)
    elif key not in model:
        return
    elif what == "clear":
        index.clear(key)
        model[key] = set()
    elif what == "store":
        index.store(key, hashes)
        model[key] |= set(hashes)
    else:
        index.discard(key, hashes)
        model[key] -= set(hashes)


def leading(held: set[bytes], context: list[bytes]) -> int:
    for number, block_hash in enumerate(context):
        if block_hash not in held:
            return number
    return len(context)


@settings(max_examples=200, deadline=None)
@given(st.lists(event, max_size=60), st.lists(st.sampled_from(HASHES), max_size=8))
def test_says_what_a_dict_of_sets_says(
    events: list[tuple[str, WorkerKey, list[bytes]]], context: list[bytes]
) -> None:
    index, model = PrefixIndex(), Model()
    for what, key, hashes in events:
        apply(index, model, what, key, hashes)
    assert set(index.ranks) == model.keys()
    assert {key: index.blocks(key) for key in model} == model
    assert {key: index.num_blocks(key) for key in model} == {k: len(v) for k, v in model.items()}
    assert len(index) == len(set().union(*model.values()))
    expected = {key: leading(held, context) for key, held in model.items()}
    match = index.match(context)
    assert {key: match.num_blocks(key) for key in KEYS} == {k: expected.get(k, 0) for k in KEYS}
    assert match.most == max(expected.values(), default=0)
    levels = list(match.levels())
    assert [level.num_blocks for level in levels] == sorted(
        {number for number in expected.values() if number}, reverse=True
    )
    for level in levels:
        assert set(level.keys) == {k for k, n in expected.items() if n == level.num_blocks}


@settings(max_examples=30, deadline=None)
@given(st.lists(event, max_size=60))
def test_stays_right_where_few_sets_are_remembered_and_logs_are_short(
    events: list[tuple[str, WorkerKey, list[bytes]]],
) -> None:
    index, model = PrefixIndex(), Model()
    saved = prefix_index.SLACK, prefix_index.MAX_SETS
    prefix_index.SLACK, prefix_index.MAX_SETS = 0, 1
    try:
        for what, key, hashes in events:
            apply(index, model, what, key, hashes)
            assert {key: index.blocks(key) for key in model} == model
    finally:
        prefix_index.SLACK, prefix_index.MAX_SETS = saved


def test_a_log_does_not_grow_with_what_comes_and_goes() -> None:
    index, key = PrefixIndex(), KEYS[0]
    index.add(key)
    for _ in range(10_000):
        index.store(key, HASHES)
        index.discard(key, HASHES[1:])
    assert len(index._holders[key].log) < 3 * prefix_index.SLACK
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
