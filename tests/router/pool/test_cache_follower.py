"""Frames of caches: any events, gaps, dumps and lives against a plain set; hostile ones refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.pool import cache_follower
from router.pool.cache_follower import CacheFollower, CacheFrameError, CacheGapError
from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixIndex
from runtime.pb import cache_pb2, common_pb2

KEY = WorkerKey("prefill-0", 7, 1)
HASHES = [bytes([n]) * 16 for n in range(6)]
STORED, REMOVED, CLEARED = 1, 2, 3
PIECE, LAST = cache_pb2.CACHE_DUMP_PIECE, cache_pb2.CACHE_DUMP_LAST


def frame(**fields: object) -> cache_pb2.CacheFrame:
    worker = common_pb2.WorkerIdentity(instance="prefill-0", epoch=7, rank=1)
    return cache_pb2.CacheFrame(**{"worker": worker, **fields})  # type: ignore[arg-type]


def events(first: int, *pairs: tuple[int, bytes]) -> cache_pb2.CacheFrame:
    kinds, hashes = bytes(kind for kind, _ in pairs), b"".join(each for _, each in pairs)
    return frame(first_sequence=first, kinds=kinds, hashes=hashes)


def dump(sequence: int, *hashes: bytes, last: bool = True) -> cache_pb2.CacheFrame:
    kind = LAST if last else PIECE
    return frame(first_sequence=sequence, hashes=b"".join(hashes), dump=kind)


def take(follower: CacheFollower, frame: cache_pb2.CacheFrame) -> list[int]:
    """Blocks of each slice."""
    return list(follower.apply(frame))


class Worker:
    """A cache and its log, whose frames may be lost."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.sequence = 1

    def act(self, pairs: list[tuple[int, bytes]]) -> cache_pb2.CacheFrame:
        first, self.sequence = self.sequence, self.sequence + len(pairs)
        for kind, each in pairs:
            if kind == STORED:
                self.held.add(each)
            elif kind == REMOVED:
                self.held.discard(each)
            else:
                self.held.clear()
        return events(first, *pairs)

    def dump(self) -> list[cache_pb2.CacheFrame]:
        held = sorted(self.held)
        pieces = [dump(self.sequence, each, last=False) for each in held]
        return [*pieces, dump(self.sequence)]


pair = st.tuples(st.sampled_from([STORED, STORED, REMOVED, CLEARED]), st.sampled_from(HASHES))
step = st.tuples(st.lists(pair, min_size=1, max_size=5), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(step, max_size=20))
def test_the_index_holds_what_the_worker_holds_whatever_is_lost(
    steps: list[tuple[list[tuple[int, bytes]], bool]],
) -> None:
    worker, index = Worker(), PrefixIndex()
    follower = CacheFollower(KEY, index)
    for pairs, is_lost in steps:
        news = worker.act(pairs)
        if is_lost:
            continue
        try:
            take(follower, news)
        except CacheGapError:
            assert follower.next_sequence == 0  # a dump is asked for
            follower.break_off()
            for piece in worker.dump():
                take(follower, piece)
        assert index.blocks(KEY) == worker.held
        assert follower.next_sequence == worker.sequence


def test_a_later_life_begins_with_nothing() -> None:
    index = PrefixIndex()
    take(CacheFollower(KEY, index), dump(1, *HASHES))
    index.remove(KEY)
    later = KEY._replace(epoch=8)
    CacheFollower(later, index)
    assert index.match(HASHES).most == 0


def test_a_dump_replaces_what_was_known_once_it_is_whole() -> None:
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(4, *HASHES[:3]))
    take(follower, dump(9, HASHES[3], last=False))
    assert index.blocks(KEY) == set(HASHES[:3])
    follower.break_off()  # the stream broke in the middle
    take(follower, dump(9, HASHES[4]))
    assert index.blocks(KEY) == {HASHES[4]}
    assert follower.next_sequence == 9


WRONG = {
    "of another epoch": frame(
        worker=common_pb2.WorkerIdentity(instance="prefill-0", epoch=8, rank=1),
        first_sequence=5,
        kinds=b"\x01",
        hashes=HASHES[5],
    ),
    "of a worker that is not this one": frame(
        worker=common_pb2.WorkerIdentity(instance="prefill-9", epoch=7, rank=1),
        first_sequence=5,
        hashes=HASHES[5],
        dump=LAST,
    ),
    "of another rank": frame(
        worker=common_pb2.WorkerIdentity(instance="prefill-0", epoch=7, rank=0)
    ),
    "half a hash": frame(first_sequence=5, kinds=b"\x01", hashes=b"\0" * 15),
    "more kinds than hashes": frame(first_sequence=5, kinds=b"\x01\x01", hashes=HASHES[5]),
    "hashes without kinds": frame(first_sequence=5, hashes=HASHES[5]),
    "a kind that is unknown": events(5, (9, HASHES[5])),
    "a dump with events": frame(first_sequence=5, kinds=b"\x01", hashes=HASHES[5], dump=LAST),
    "a dump without a sequence": frame(hashes=HASHES[5], dump=LAST),
    "a huge frame": dump(5, bytes(16 * (cache_follower.MAX_FRAME_BLOCKS + 1))),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_hostile_frames_are_refused_and_change_nothing(wrong: cache_pb2.CacheFrame) -> None:
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(5, HASHES[0]))
    with pytest.raises(CacheFrameError):
        take(follower, wrong)
    assert index.blocks(KEY) == {HASHES[0]}
    assert list(index.ranks) == [KEY]


def test_a_cache_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_follower, "MAX_RANK_BLOCKS", 4)
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(1, *HASHES[:3]))
    with pytest.raises(CacheFrameError, match="5 blocks of one rank: at most 4"):
        take(follower, events(1, (STORED, HASHES[3]), (STORED, HASHES[4])))
    follower.break_off()
    take(follower, dump(1, *HASHES[:3], last=False))
    with pytest.raises(CacheFrameError, match="at most 4"):
        take(follower, dump(1, *HASHES[3:5], last=False))


def test_events_before_the_first_dump_are_a_gap() -> None:
    follower = CacheFollower(KEY, PrefixIndex())
    with pytest.raises(CacheGapError):
        take(follower, events(1, (STORED, HASHES[0])))


@settings(max_examples=100, deadline=None)
@given(st.lists(pair, min_size=1, max_size=30), st.integers(1, 5))
def test_after_each_slice_of_events_the_index_is_as_the_worker_was_then(
    pairs: list[tuple[int, bytes]], slice_blocks: int
) -> None:
    worker, index = Worker(), PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(worker.sequence))
    num_taken = 0
    with pytest.MonkeyPatch.context() as small:
        small.setattr(cache_follower, "SLICE_BLOCKS", slice_blocks)
        for num_blocks in follower.apply(events(1, *pairs)):
            worker.act(pairs[num_taken : num_taken + num_blocks])
            num_taken += num_blocks
            assert num_blocks <= slice_blocks
            assert index.blocks(KEY) == worker.held
            assert follower.next_sequence == worker.sequence
    assert num_taken == len(pairs)


def test_a_large_dump_is_taken_in_slices_and_seen_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_follower, "SLICE_BLOCKS", 4)
    hashes = [n.to_bytes(16, "big") for n in range(100, 110)]
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(1, HASHES[0]))
    assert take(follower, dump(7, *hashes, last=False)) == [4, 4, 2]
    for _ in follower.apply(dump(7, *hashes[:5])):
        assert index.blocks(KEY) == {HASHES[0]}
        assert index.match(hashes).most == 0
    assert index.blocks(KEY) == set(hashes)


def test_of_events_that_were_taken_in_part_the_rest_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_follower, "SLICE_BLOCKS", 2)
    index = PrefixIndex()
    follower = CacheFollower(KEY, index)
    take(follower, dump(5))
    stored = [(STORED, each) for each in HASHES[:5]]
    next(follower.apply(events(5, *stored)))  # the stream breaks here
    follower.break_off()
    assert index.blocks(KEY) == set(HASHES[:2])
    assert follower.next_sequence == 7
