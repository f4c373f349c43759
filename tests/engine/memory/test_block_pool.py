"""The block pool: each rule by example, then all of them against a model in random order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.memory.block_pool import BlockPool
from engine.memory.events import AllBlocksCleared, BlockRemoved, BlockStored
from runtime.errors import InternalError, OutOfBlocksError


def make_hash(value: int) -> bytes:
    return value.to_bytes(16, "little")


def make_hashes(*values: int) -> list[bytes]:
    return [make_hash(value) for value in values]


def test_block_zero_is_never_given() -> None:
    pool = BlockPool(4, 64)
    assert pool.num_usable_blocks == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    pool.check_integrity()


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1, 64)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 64)
    with pytest.raises(OutOfBlocksError, match="4 KV blocks wanted, 3 of 3 free"):
        pool.allocate(4)
    assert pool.num_free_blocks == 3


@pytest.mark.parametrize("block_id", [-1, 0, 4])
def test_unknown_blocks_are_refused(block_id: int) -> None:
    pool = BlockPool(4, 64)
    for operation in (pool.release, pool.share):
        with pytest.raises(InternalError, match=f"block {block_id}: ids are 1..3"):
            operation([block_id])


def test_double_release_is_refused() -> None:
    pool = BlockPool(4, 64)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(InternalError, match="nobody holds it"):
        pool.release(blocks)


def test_shared_blocks_return_with_the_last_holder() -> None:
    pool = BlockPool(4, 64)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_free_blocks == 1
    pool.release(blocks)
    assert pool.num_free_blocks == 3


def test_released_blocks_stay_findable() -> None:
    pool = BlockPool(4, 64)
    blocks = pool.allocate(2)
    pool.commit(blocks, make_hashes(1, 2))
    pool.release(blocks)
    assert pool.num_free_blocks == 3
    assert pool.count_prefix(make_hashes(1, 2, 3)) == 2
    assert pool.match_prefix(make_hashes(1, 2, 3)) == blocks
    assert pool.num_free_blocks == 1
    pool.check_integrity()


def test_counting_takes_nothing_and_tells_what_a_match_would_take() -> None:
    pool = BlockPool(6, 64)
    blocks = pool.allocate(3)
    pool.commit(blocks, make_hashes(1, 2, 3))
    pool.release(blocks[1:])
    num_free = pool.num_free_blocks
    assert pool.count_idle_prefix(make_hashes(1, 2, 3, 4)) == (3, 2)
    assert pool.count_idle_prefix(make_hashes(4)) == (0, 0)
    assert pool.num_free_blocks == num_free
    pool.match_prefix(make_hashes(1, 2, 3))
    assert pool.num_free_blocks == num_free - 2


def test_a_gap_ends_the_match() -> None:
    pool = BlockPool(4, 64)
    blocks = pool.allocate(2)
    pool.commit(blocks, make_hashes(1, 3))
    assert pool.match_prefix(make_hashes(1, 2, 3)) == blocks[:1]
    assert pool.ref_count(blocks[0]) == 2
    assert pool.ref_count(blocks[1]) == 1


def test_eviction_takes_the_oldest_chain_and_its_tail_first() -> None:
    pool = BlockPool(5, 64)
    old, new = pool.allocate(2), pool.allocate(2)
    pool.commit(old, make_hashes(1, 2))
    pool.commit(new, make_hashes(3, 4))
    pool.release(old)
    pool.release(new)
    survivors = []
    for _ in range(4):
        pool.allocate(1)
        survivors.append([i for i in (1, 2, 3, 4) if pool.count_prefix(make_hashes(i))])
    assert survivors == [[1, 3, 4], [3, 4], [3], []]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 64)
    cached = pool.allocate(1)
    pool.commit(cached, make_hashes(1))
    pool.release(cached)
    pool.allocate(2)
    assert pool.count_prefix(make_hashes(1)) == 1
    pool.allocate(1)
    assert pool.count_prefix(make_hashes(1)) == 0


def test_the_first_block_of_a_hash_stays_findable() -> None:
    pool = BlockPool(4, 64)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.commit(first, make_hashes(1))
    pool.commit(second, make_hashes(1))
    assert pool.match_prefix(make_hashes(1)) == first
    pool.release(second)
    assert pool.num_cached_blocks == 1
    pool.check_integrity()


def test_a_block_has_one_hash() -> None:
    pool = BlockPool(4, 64)
    blocks = pool.allocate(1)
    pool.commit(blocks, make_hashes(1))
    pool.commit(blocks, make_hashes(1))
    with pytest.raises(InternalError, match="two different hashes"):
        pool.commit(blocks, make_hashes(2))


def test_only_held_blocks_can_be_committed() -> None:
    pool = BlockPool(4, 64)
    with pytest.raises(InternalError, match="cannot commit block 2"):
        pool.commit([2], make_hashes(1))


def test_without_prefix_caching_nothing_matches() -> None:
    pool = BlockPool(4, 64, enable_prefix_caching=False)
    pool.commit(pool.allocate(1), make_hashes(1))
    assert pool.match_prefix(make_hashes(1)) == []


def test_reset_forgets_hashes_and_keeps_holders() -> None:
    pool = BlockPool(5, 64)
    held, idle = pool.allocate(2), pool.allocate(1)
    pool.commit(held + idle, make_hashes(1, 2, 3))
    pool.release(idle)
    pool.reset_prefix_cache()
    assert pool.num_cached_blocks == 0
    assert pool.num_free_blocks == 2
    pool.release(held)
    pool.check_integrity()
    assert pool.num_free_blocks == 4


def test_events_tell_what_is_findable() -> None:
    pool = BlockPool(3, 64, record_events=True)
    blocks = pool.allocate(2)
    pool.commit(blocks, make_hashes(1, 2))
    pool.release(blocks)
    pool.allocate(1)
    pool.reset_prefix_cache()
    assert pool.take_events() == [
        BlockStored(make_hash(1)),
        BlockStored(make_hash(2)),
        BlockRemoved(make_hash(2)),
        AllBlocksCleared(),
    ]
    assert pool.take_events() == []


def test_check_integrity_notices_a_lost_block() -> None:
    pool = BlockPool(4, 64)
    pool._free.pop()
    with pytest.raises(InternalError, match="a block is lost"):
        pool.check_integrity()


def test_check_integrity_notices_a_held_free_block() -> None:
    pool = BlockPool(4, 64)
    pool._ref_counts[2] = 1
    with pytest.raises(InternalError, match="a free block is held"):
        pool.check_integrity()


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share, commit and release chains; the model counts references by hand."""

    NUM_BLOCKS = 9

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS, 4, record_events=True)
        self.holders: list[list[int]] = []
        self.indexed: dict[bytes, None] = {}  # what a follower of the events believes
        self.contents: dict[int, bytes] = {}  # what each block was last committed as

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = self.NUM_BLOCKS - 1 - len({b for blocks in self.holders for b in blocks})
        assert self.pool.num_free_blocks == free
        if count > free:
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not {b for held in self.holders for b in held} & set(blocks)
        for block_id in blocks:
            self.contents.pop(block_id, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.share(blocks)
        self.holders.append(list(blocks))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), chain=st.integers(0, 2))
    def commit(self, data: st.DataObject, chain: int) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        pairs = [
            (block_id, make_hash(100 * chain + index))
            for index, block_id in enumerate(blocks)
            if block_id not in self.contents
        ]
        self.pool.commit([p[0] for p in pairs], [p[1] for p in pairs])
        for block_id, block_hash in pairs:
            if self.pool._block_of[block_hash] == block_id:
                self.contents[block_id] = block_hash

    @rule(chain=st.integers(0, 2), length=st.integers(0, NUM_BLOCKS))
    def match(self, chain: int, length: int) -> None:
        hashes = make_hashes(*(100 * chain + index for index in range(length)))
        expected = self.pool.count_prefix(hashes)
        blocks = self.pool.match_prefix(hashes)
        assert len(blocks) == expected
        assert [self.contents[block_id] for block_id in blocks] == hashes[:expected]
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.forget(blocks)
        for block_id in blocks:
            self.contents.pop(block_id, None)

    @rule()
    def reset(self) -> None:
        self.pool.reset_prefix_cache()
        self.contents.clear()

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_integrity()
        for block_id in range(1, self.NUM_BLOCKS):
            held = sum(blocks.count(block_id) for blocks in self.holders)
            assert self.pool.ref_count(block_id) == held
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in self.indexed
                self.indexed[event.block_hash] = None
            elif isinstance(event, BlockRemoved):
                del self.indexed[event.block_hash]
            else:
                self.indexed.clear()
        assert self.indexed.keys() == self.pool._block_of.keys()

    def teardown(self) -> None:
        for blocks in self.holders:
            self.pool.release(blocks)
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks


BlockPoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestBlockPoolMachine = BlockPoolMachine.TestCase
