"""Which ranks hold the KV of which blocks: exact, as their own events tell it.

A block is known by its chained hash (`runtime.block_hash`), so who holds block k of a context can
give all of the context up to there, if it holds the blocks before, too. For every block the index
has a set of ranks, as the bits of one int; a lookup walks a context's blocks and keeps those ranks
that hold all of them so far. Most neighbours in a chain have the same holders, so equal sets are
one object, and a step of the walk is a lookup and a comparison.

One event loop owns it. It believes what it is told; `router.requests.cache_streams` checks that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.pool.members import WorkerKey

MAX_SETS = 4096
"""Sets of ranks that are remembered, so that equal ones are one object."""
MAX_EVICTED = 1 << 17
"""Blocks that nobody holds any more are remembered as such, the latest of them."""
MAX_EXPECTED = 1 << 20
SLACK = 1024


@dataclass(slots=True)
class _Holder:
    """One rank. ``log`` has each of its blocks at least once, and some that it held before."""

    slot: int
    bit: int
    log: list[bytes] = field(default_factory=list)
    num_blocks: int = 0


class Level(NamedTuple):
    """Ranks that hold as many leading blocks of a context, and not the next."""

    num_blocks: int
    keys: Sequence[WorkerKey]


class PrefixMatch:
    """Who holds how many leading blocks of one context. Good until the index changes."""

    __slots__ = ("_keys", "_sets", "_slots")

    def __init__(
        self,
        sets: Sequence[tuple[int, int]],
        slots: Mapping[WorkerKey, _Holder],
        keys: Sequence[WorkerKey | None],
    ) -> None:
        """``sets``: (number of blocks, ranks as bits), fewest blocks first; no rank twice."""
        self._sets = sets
        self._slots = slots
        self._keys = keys

    @property
    def most(self) -> int:
        """Leading blocks that some rank holds."""
        return self._sets[-1][0] if self._sets else 0

    def num_blocks(self, key: WorkerKey) -> int:
        """Leading blocks that this rank holds."""
        holder = self._slots.get(key)
        if holder is not None:
            for num_blocks, ranks in self._sets:
                if ranks & holder.bit:
                    return num_blocks
        return 0

    def levels(self) -> Iterator[Level]:
        """Most blocks first; ranks that hold nothing are in none."""
        for num_blocks, ranks in reversed(self._sets):
            keys = [key for slot in _bits(ranks) if (key := self._keys[slot]) is not None]
            yield Level(num_blocks, keys)


NO_MATCH = PrefixMatch((), {}, ())
"""Of an index that knows nothing."""


class PrefixIndex:
    """The blocks of all ranks that were added."""

    def __init__(self) -> None:
        self._ranks_of: dict[bytes, int] = {}
        self._holders: dict[WorkerKey, _Holder] = {}
        self._keys: list[WorkerKey | None] = []
        self._free: list[int] = []
        self._sets: dict[int, int] = {}
        self._evicted: dict[bytes, None] = {}
        self._expected: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Blocks that any rank holds."""
        return len(self._ranks_of)

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether any rank holds the block."""
        return block_hash in self._ranks_of

    @property
    def ranks(self) -> Collection[WorkerKey]:
        """That were added."""
        return self._holders.keys()

    def add(self, key: WorkerKey) -> None:
        """Know a rank, which holds nothing yet; one that is known stays as it is."""
        if key not in self._holders:
            slot = self._free.pop() if self._free else len(self._keys)
            if slot == len(self._keys):
                self._keys.append(None)
            self._keys[slot] = key
            self._holders[key] = _Holder(slot, 1 << slot)

    def remove(self, key: WorkerKey) -> None:
        """Forget a rank and what it held; one that is not known is no error."""
        if key in self._holders:
            self.clear(key)
            holder = self._holders.pop(key)
            slot, bit = holder.slot, holder.bit
            for block_hash in [h for h, ranks in self._expected.items() if ranks & bit]:
                self._unexpect(block_hash, bit)
            self._keys[slot] = None
            self._free.append(slot)

    def num_blocks(self, key: WorkerKey) -> int:
        """That a rank holds."""
        holder = self._holders.get(key)
        return holder.num_blocks if holder is not None else 0

    def blocks(self, key: WorkerKey) -> set[bytes]:
        """That a rank holds; walks over them."""
        holder = self._holders[key]
        return {h for h in holder.log if self._ranks_of.get(h, 0) & holder.bit}

    def store(self, key: WorkerKey, block_hashes: Iterable[bytes]) -> None:
        """A rank holds these blocks, too."""
        holder, ranks_of, sets = self._holders[key], self._ranks_of, self._sets
        bit, log = holder.bit, holder.log
        for block_hash in block_hashes:
            ranks = ranks_of.get(block_hash)
            if ranks is None:
                ranks_of[block_hash] = bit
            elif ranks & bit:
                continue
            else:
                both = ranks | bit
                ranks_of[block_hash] = sets.get(both) or self._remember(both)
            holder.num_blocks += 1
            log.append(block_hash)
        if len(log) > 2 * holder.num_blocks + SLACK:
            holder.log = list(self.blocks(key))

    def discard(self, key: WorkerKey, block_hashes: Iterable[bytes]) -> None:
        """A rank holds these blocks no more; those that it does not hold are no error."""
        holder, ranks_of, sets = self._holders[key], self._ranks_of, self._sets
        bit = holder.bit
        for block_hash in block_hashes:
            ranks = ranks_of.get(block_hash, 0)
            if not ranks & bit:
                continue
            holder.num_blocks -= 1
            left = ranks ^ bit
            if left:
                ranks_of[block_hash] = sets.get(left) or self._remember(left)
            else:
                del ranks_of[block_hash]
                self._note_evicted(block_hash)
        if len(holder.log) > 2 * holder.num_blocks + SLACK:
            holder.log = list(self.blocks(key))

    def clear(self, key: WorkerKey) -> None:
        """A rank holds nothing any more."""
        holder = self._holders[key]
        log, holder.log = holder.log, []
        self.discard(key, log)

    def expect(self, key: WorkerKey, block_hashes: Iterable[bytes]) -> None:
        """A rank is going to hold these: lookups find them until `unexpect`."""
        holder = self._holders.get(key)
        if holder is not None and len(self._expected) < MAX_EXPECTED:
            expected, bit = self._expected, holder.bit
            for block_hash in block_hashes:
                expected[block_hash] = expected.get(block_hash, 0) | bit

    def unexpect(self, key: WorkerKey, block_hashes: Iterable[bytes]) -> None:
        """It holds them by now, or will not."""
        holder = self._holders.get(key)
        if holder is not None:
            for block_hash in block_hashes:
                self._unexpect(block_hash, holder.bit)

    def match(self, block_hashes: Sequence[bytes]) -> PrefixMatch:
        """Who holds how many leading blocks of a context, whose blocks' hashes these are."""
        get = self._look_up if self._expected else self._ranks_of.get
        sets: list[tuple[int, int]] = []
        alive = get(block_hashes[0], 0) if block_hashes else 0
        if not alive:
            return NO_MATCH
        num_blocks = 0
        for block_hash in block_hashes:
            ranks = get(block_hash, 0)
            if ranks is not alive:
                still = ranks & alive
                if still != alive:
                    sets.append((num_blocks, alive ^ still))
                    alive = still
                    if not alive:
                        break
            num_blocks += 1
        if alive:
            sets.append((num_blocks, alive))
        return PrefixMatch(sets, self._holders, self._keys)

    def was_evicted(self, block_hash: bytes) -> bool:
        """Whether the block was held, and by nobody any more; of the latest of these."""
        return block_hash in self._evicted and block_hash not in self._ranks_of

    def _look_up(self, block_hash: bytes, default: int) -> int:
        """Ranks that hold the block or are going to."""
        held = self._ranks_of.get(block_hash, default)
        expected = self._expected.get(block_hash)
        return held if expected is None else held | expected

    def _unexpect(self, block_hash: bytes, bit: int) -> None:
        left = self._expected.get(block_hash, 0) & ~bit
        if left:
            self._expected[block_hash] = left
        else:
            self._expected.pop(block_hash, None)

    def _remember(self, ranks: int) -> int:
        if len(self._sets) >= MAX_SETS:
            self._sets.clear()
        self._sets[ranks] = ranks
        return ranks

    def _note_evicted(self, block_hash: bytes) -> None:
        evicted = self._evicted
        evicted[block_hash] = None
        if len(evicted) > MAX_EVICTED:
            for old in list(evicted)[: MAX_EVICTED // 8]:
                del evicted[old]


def _bits(ranks: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while ranks:
        low = ranks & -ranks
        yield low.bit_length() - 1
        ranks ^= low
