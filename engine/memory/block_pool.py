"""Who owns which KV block: allocation, reference counts, prefix cache. Pure Python, no bytes.

A block is in exactly one of three places:

- referenced: held by one or more requests (reference count > 0);
- evictable: held by nobody, but still findable by its hash; least recently used first;
- free: held by nobody and without a hash.

`allocate` takes free blocks first and then evicts. `release` hands a chain back last block first,
so that the tail of a chain is evicted before its head: a head without its tail is still a useful
prefix, a tail without its head can never be matched. Every operation is O(1) per block. Not
thread-safe: the engine loop owns the pool.
"""

from collections import OrderedDict
from collections.abc import Sequence

from engine.memory.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from runtime.errors import InternalError, OutOfBlocksError

DUMMY_BLOCK = 0
"""The block that padding tokens are written to. No request ever owns it."""


class BlockPool:
    """Reference counts over `num_blocks` blocks, of which block 0 is reserved."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        record_events: bool = False,
    ) -> None:
        """Make every block but block 0 free.

        Args:
            num_blocks: blocks of the KV pool, block 0 included; at least 2.
            block_size: tokens per block.
            enable_prefix_caching: without it `commit` does nothing and nothing ever matches.
            record_events: keep events for `take_events`; whoever asks for them must drain them.
        """
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; block 0 is reserved, so give at least 2")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._record_events = record_events
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, DUMMY_BLOCK, -1))  # popped from the end
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._events: list[CacheEvent] = []

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can ever own: all but the dummy."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can give now, cached but unreferenced ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that are findable by a hash, referenced or not."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        """Return how many times the block is held."""
        return self._ref_counts[block_id]

    def can_allocate(self, num_blocks: int) -> bool:
        """Whether `allocate(num_blocks)` would succeed now."""
        return num_blocks <= self.num_free_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks with a reference count of 1; all of them or none.

        Raises:
            OutOfBlocksError: too few blocks are free or evictable.
        """
        if not self.can_allocate(num_blocks):
            raise OutOfBlocksError(
                f"{num_blocks} KV blocks wanted, {self.num_free_blocks} of "
                f"{self.num_usable_blocks} free"
            )
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """Add one reference to each block; each must be held already."""
        for block_id in block_ids:
            self._check_held(block_id, "share")
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each block; `block_ids` in order of positions.

        Blocks that nobody holds any more become evictable if they have a hash, else free.

        Raises:
            InternalError: a block that is not held (double release) or that does not exist.
        """
        for block_id in reversed(block_ids):
            self._check_held(block_id, "release")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._retire(block_id)

    def commit(self, block_ids: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Make held blocks, whose KV is complete, findable by their hashes.

        If another block already has the hash, that one stays findable and the new one remains
        private to its request. Committing a block again under its own hash does nothing.

        Raises:
            InternalError: a block that is not held, or that has a different hash already.
        """
        assert len(block_ids) == len(block_hashes)
        if not self.enable_prefix_caching:
            return
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            self._check_held(block_id, "commit")
            known = self._hash_of.get(block_id)
            if known is not None and known != block_hash:
                raise InternalError(f"block {block_id} is committed under two different hashes")
            if known is None and block_hash not in self._block_of:
                self._hash_of[block_id] = block_hash
                self._block_of[block_hash] = block_id
                self._record(BlockStored(block_hash))

    def match_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, one reference of each now taken.

        The caller passes at most `max_cached_blocks(...)` hashes of a prompt, and releases the
        blocks if it cannot go on (for example when the rest cannot be allocated).
        """
        block_ids: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            self._evictable.pop(block_id, None)
            self._ref_counts[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def count_prefix(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks `match_prefix` would find, taking nothing."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash not in self._block_of:
                return index
        return len(block_hashes)

    def count_idle_prefix(self, block_hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return how many blocks `match_prefix` would find, and how many of those nobody holds.

        Takes nothing. What nobody holds counts as free until it is matched.
        """
        num_found = num_idle = 0
        for block_hash in block_hashes:
            block_id = self._block_of.get(block_hash)
            if block_id is None:
                break
            num_found += 1
            num_idle += self._ref_counts[block_id] == 0
        return num_found, num_idle

    def forget(self, block_ids: Sequence[int]) -> None:
        """Make held blocks private again: their KV must not be found by anybody from now on.

        Raises:
            InternalError: a block that is not held.
        """
        for block_id in block_ids:
            self._check_held(block_id, "forget")
            block_hash = self._hash_of.pop(block_id, None)
            if block_hash is not None:
                del self._block_of[block_hash]
                self._record(BlockRemoved(block_hash))

    def reset_prefix_cache(self) -> None:
        """Forget every hash. Held blocks stay with their holders, and become private."""
        self._free.extend(reversed(self._evictable))
        self._evictable.clear()
        self._hash_of.clear()
        self._block_of.clear()
        self._record(AllBlocksCleared())

    def start_events(self) -> list[bytes]:
        """Keep events for `take_events` from now on; return the hashes that are findable now.

        Where events are kept already, those so far are void: the hashes include what they say.
        """
        self._record_events = True
        self._events = []
        return list(self._block_of)

    def stop_events(self) -> None:
        """Keep no events any more."""
        self._record_events = False
        self._events = []

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would return any."""
        return bool(self._events)

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, oldest first, and forget them."""
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Check that the books agree: run when idle and after every step of the tests. O(n).

        Raises:
            InternalError: a block is in two places or in none, or the hash maps disagree.
        """
        held = {block_id for block_id, count in enumerate(self._ref_counts) if count > 0}
        free = set(self._free)
        evictable = set(self._evictable)
        problems = {
            "a negative reference count": min(self._ref_counts) < 0,
            "a block is free twice": len(free) != len(self._free),
            "a free block is held": bool(held & (free | evictable)),
            "a free block is evictable": bool(free & evictable),
            "a block is lost": held | free | evictable != set(range(1, self.num_blocks)),
            "a free block has a hash": bool(free & self._hash_of.keys()),
            "an evictable block has no hash": bool(evictable - self._hash_of.keys()),
            "the hash maps disagree": self._hash_of
            != {block_id: block_hash for block_hash, block_id in self._block_of.items()},
        }
        found = [problem for problem, is_there in problems.items() if is_there]
        if found:
            raise InternalError(f"block pool: {'; '.join(found)}")

    def _check_held(self, block_id: int, verb: str) -> None:
        if not DUMMY_BLOCK < block_id < self.num_blocks:
            raise InternalError(f"cannot {verb} block {block_id}: ids are 1..{self.num_blocks - 1}")
        if self._ref_counts[block_id] == 0:
            raise InternalError(f"cannot {verb} block {block_id}: nobody holds it")

    def _retire(self, block_id: int) -> None:
        if block_id in self._hash_of:
            self._evictable[block_id] = None
        else:
            self._free.append(block_id)

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hash_of.pop(block_id)
        del self._block_of[block_hash]
        self._record(BlockRemoved(block_hash))
        return block_id

    def _record(self, event: CacheEvent) -> None:
        if self._record_events:
            self._events.append(event)
