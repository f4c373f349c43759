"""Which ranks hold the KV of which blocks: exact, as their own events tell it.

A block is known by its chained hash (`runtime.block_hash`), so who holds block k of a context can
give all of the context up to there, if it holds the blocks before, too. For every block the index
has a set of ranks, as the bits of one int; a lookup walks a context's blocks and keeps those ranks
that hold all of them so far. Most neighbours in a chain have the same holders, so equal sets are
one object, and a step of the walk is a lookup and a comparison.

A rank that leaves, whose cache is cleared or replaced by a dump gives up its bit: lookups do not
see that from then on, and `sweep` takes it out of the blocks' sets, so many at a time.

One event loop owns it. It believes what it is told; `router.requests.cache_streams` checks that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from router.pool.block_log import BlockLog
from router.pool.expected_blocks import ExpectedBlocks
from router.pool.members import WorkerKey

MAX_SETS = 4096
"""Sets of ranks that are remembered, so that equal ones are one object."""
MAX_EVICTED = 1 << 17
"""Blocks that nobody holds any more are remembered as such, the latest of them."""
MAX_EXPECTED = 1 << 20
FORGOTTEN_AT_ONCE = 1024
"""Of the evicted."""


@dataclass(slots=True, eq=False)
class Holding:
    """What one rank holds, under one bit: seen by lookups, or about to be, or given up."""

    slot: int
    bit: int
    log: BlockLog = field(default_factory=BlockLog)
    num_blocks: int = 0
    num_expectations: int = 0
    """That have not ended: till then nobody else may have the bit."""
    is_swept: bool = False
    """It was given up, and is in no block's set any more."""


class Expectation(NamedTuple):
    """Of blocks of one prompt; to be ended by `PrefixIndex.unexpect`."""

    holding: Holding
    block_hashes: Sequence[bytes]


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
        slots: Mapping[WorkerKey, Holding],
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
        holding = self._slots.get(key)
        if holding is not None:
            for num_blocks, ranks in self._sets:
                if ranks & holding.bit:
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
        self._holdings: dict[WorkerKey, Holding] = {}
        self._keys: list[WorkerKey | None] = []
        self._free: list[int] = []
        self._sets: dict[int, int] = {}
        self._evicted: dict[bytes, None] = {}
        self._expected = ExpectedBlocks()
        self._retired: deque[Holding] = deque()
        self._gone = 0
        """Bits that were given up."""
        self._drafts = 0
        """Bits that nobody is to see yet."""
        self._on_retire: list[Callable[[], None]] = []

    def __len__(self) -> int:
        """Blocks that any rank holds; walks over all while something is to be swept."""
        hidden = self._gone | self._drafts
        if not hidden:
            return len(self._ranks_of)
        return sum(ranks & ~hidden != 0 for ranks in self._ranks_of.values())

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether any rank holds the block."""
        return self._ranks_of.get(block_hash, 0) & ~(self._gone | self._drafts) != 0

    @property
    def ranks(self) -> Collection[WorkerKey]:
        """That were added."""
        return self._holdings.keys()

    def on_retire(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever there is something to sweep."""
        self._on_retire.append(listener)

    def add(self, key: WorkerKey) -> None:
        """Know a rank, which holds nothing yet; one that is known stays as it is."""
        if key not in self._holdings:
            holding = self._holdings[key] = self._make()
            self._keys[holding.slot] = key

    def remove(self, key: WorkerKey) -> None:
        """Forget a rank and what it held; one that is not known is no error."""
        holding = self._holdings.pop(key, None)
        if holding is not None:
            self._retire(holding)

    def num_blocks(self, key: WorkerKey) -> int:
        """That a rank holds."""
        holding = self._holdings.get(key)
        return holding.num_blocks if holding is not None else 0

    def blocks(self, key: WorkerKey) -> set[bytes]:
        """That a rank holds; walks over them."""
        holding = self._holdings[key]
        return {h for h in holding.log if self._ranks_of.get(h, 0) & holding.bit}

    def store(self, key: WorkerKey, block_hashes: Sequence[bytes]) -> None:
        """A rank holds these blocks, too."""
        self._store(self._holdings[key], block_hashes)

    def discard(self, key: WorkerKey, block_hashes: Sequence[bytes]) -> None:
        """A rank holds these blocks no more; those that it does not hold are no error."""
        self._discard(self._holdings[key], block_hashes)

    def clear(self, key: WorkerKey) -> None:
        """A rank holds nothing any more, and nothing is expected of it."""
        self.publish(key, self.draft())

    def draft(self) -> Holding:
        """What a rank holds, to be told bit by bit: nobody sees it until `publish`."""
        draft = self._make()
        self._drafts |= draft.bit
        return draft

    def store_draft(self, draft: Holding, block_hashes: Sequence[bytes]) -> None:
        """These blocks, too."""
        self._store(draft, block_hashes)

    def publish(self, key: WorkerKey, draft: Holding) -> None:
        """A rank holds exactly what the draft says."""
        before = self._holdings[key]
        self._drafts ^= draft.bit
        self._holdings[key] = draft
        self._keys[draft.slot] = key
        self._retire(before)

    def drop(self, draft: Holding) -> None:
        """A draft that will not be published."""
        self._drafts ^= draft.bit
        self._retire(draft)

    def sweep(self, most: int) -> bool:
        """Take what was given up out of the sets of at most so many blocks; False: none is left."""
        while self._retired and most > 0:
            holding = self._retired[0]
            taken = holding.log.take(most)
            most -= len(taken)
            self._discard(holding, taken)
            if not holding.log:
                self._retired.popleft()
                holding.is_swept = True
                self._release(holding)
        return bool(self._retired)

    def expect(self, key: WorkerKey, block_hashes: Sequence[bytes]) -> Expectation | None:
        """A rank is going to hold these: lookups find them until `unexpect`.

        None: the rank is not known, or very much is expected already.
        """
        holding = self._holdings.get(key)
        if holding is None or len(self._expected) >= MAX_EXPECTED:
            return None
        holding.num_expectations += 1
        self._expected.add(holding.bit, block_hashes)
        return Expectation(holding, block_hashes)

    def unexpect(self, expectation: Expectation) -> None:
        """It holds them by now, or will not."""
        holding, block_hashes = expectation
        holding.num_expectations -= 1
        self._expected.remove(holding.bit, block_hashes)
        self._release(holding)

    def match(self, block_hashes: Sequence[bytes]) -> PrefixMatch:
        """Who holds how many leading blocks of a context, whose blocks' hashes these are."""
        get = self._look_up if self._expected else self._ranks_of.get
        sets: list[tuple[int, int]] = []
        alive = get(block_hashes[0], 0) if block_hashes else 0
        if hidden := self._gone | self._drafts:
            alive &= ~hidden
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
        return PrefixMatch(sets, self._holdings, self._keys)

    def was_evicted(self, block_hash: bytes) -> bool:
        """Whether the block was held, and by nobody any more; of the latest of these."""
        if block_hash in self:
            return False
        return block_hash in self._evicted or self._ranks_of.get(block_hash, 0) & self._gone != 0

    def _store(self, holding: Holding, block_hashes: Sequence[bytes]) -> None:
        ranks_of, sets = self._ranks_of, self._sets
        bit, log = holding.bit, holding.log
        for block_hash in block_hashes:
            ranks = ranks_of.get(block_hash)
            if ranks is None:
                ranks_of[block_hash] = bit
            elif ranks & bit:
                continue
            else:
                both = ranks | bit
                ranks_of[block_hash] = sets.get(both) or self._remember(both)
            holding.num_blocks += 1
            log.append(block_hash)
        self._tidy(holding, len(block_hashes))

    def _discard(self, holding: Holding, block_hashes: Sequence[bytes]) -> None:
        ranks_of, sets = self._ranks_of, self._sets
        bit = holding.bit
        for block_hash in block_hashes:
            ranks = ranks_of.get(block_hash, 0)
            if not ranks & bit:
                continue
            holding.num_blocks -= 1
            left = ranks ^ bit
            if left:
                ranks_of[block_hash] = sets.get(left) or self._remember(left)
            else:
                del ranks_of[block_hash]
                self._note_evicted(block_hash)
        if not self._gone & bit:
            self._tidy(holding, len(block_hashes))

    def _tidy(self, holding: Holding, num_changed: int) -> None:
        ranks_of, bit = self._ranks_of, holding.bit
        holding.log.tidy(num_changed, holding.num_blocks, lambda h: ranks_of.get(h, 0) & bit)

    def _make(self) -> Holding:
        slot = self._free.pop() if self._free else len(self._keys)
        if slot == len(self._keys):
            self._keys.append(None)
        return Holding(slot, 1 << slot)

    def _retire(self, holding: Holding) -> None:
        self._gone |= holding.bit
        self._keys[holding.slot] = None
        self._retired.append(holding)
        for listener in self._on_retire:
            listener()

    def _release(self, holding: Holding) -> None:
        """Its bit may be another's, once it is swept and nothing is expected under it."""
        if holding.is_swept and not holding.num_expectations:
            self._gone ^= holding.bit
            self._free.append(holding.slot)

    def _look_up(self, block_hash: bytes, default: int) -> int:
        """Ranks that hold the block or are going to."""
        held = self._ranks_of.get(block_hash, default)
        expected = self._expected.ranks_of(block_hash)
        return held | expected if expected else held  # the same object, if it may be

    def _remember(self, ranks: int) -> int:
        if len(self._sets) >= MAX_SETS:
            self._sets.clear()
        self._sets[ranks] = ranks
        return ranks

    def _note_evicted(self, block_hash: bytes) -> None:
        evicted = self._evicted
        evicted[block_hash] = None
        if len(evicted) > MAX_EVICTED:
            for old in list(islice(evicted, FORGOTTEN_AT_ONCE)):
                del evicted[old]


def _bits(ranks: int) -> Iterator[int]:
    """The numbers of the bits that are set, lowest first."""
    while ranks:
        low = ranks & -ranks
        yield low.bit_length() - 1
        ranks ^= low
