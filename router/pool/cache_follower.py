"""One rank's blocks in the index, from what its stream says: dumps, events, and nothing unchecked.

A frame that cannot be of this worker, or that no worker of ours would send, is refused whole, and
with it all that the worker says until it begins anew with a dump. One that is taken is taken in
slices, between which the loop does other things: the index is right after each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from router.pool.members import WorkerKey
from router.pool.prefix_index import Holding, PrefixIndex
from runtime.block_hash import DIGEST_SIZE
from runtime.pb import cache_pb2

MAX_FRAME_BLOCKS = 1 << 16
MAX_RANK_BLOCKS = 1 << 20
"""Far more than a rank has; 100 MiB here."""
SLICE_BLOCKS = 1024
"""That are taken at once: below a millisecond."""

STORED = cache_pb2.CACHE_EVENT_KIND_STORED
REMOVED = cache_pb2.CACHE_EVENT_KIND_REMOVED
CLEARED = cache_pb2.CACHE_EVENT_KIND_CLEARED


class CacheFrameError(ValueError):
    """A frame that is refused; the message says why."""


class CacheGapError(CacheFrameError):
    """Events were lost: only a dump helps."""


class CacheFollower:
    """Follows one life of one rank."""

    def __init__(self, key: WorkerKey, index: PrefixIndex) -> None:
        """The rank holds nothing until its first dump."""
        self.next_sequence = 0
        """Of the next event; 0: a dump is needed."""
        self.num_dumps = 0
        self._key = key
        self._index = index
        self._draft: Holding | None = None
        """What the dump that is under way has said so far."""
        self._num_dumped = 0
        index.add(key)

    def apply(self, frame: cache_pb2.CacheFrame) -> Iterator[int]:
        """Check a frame; what is returned takes it, a slice with each step: so many blocks.

        Raises:
            CacheGapError: events are missing before this one.
            CacheFrameError: it is of another life, or malformed, or too large.
        """
        worker = frame.worker
        if (worker.instance, worker.epoch, worker.rank) != tuple(self._key):
            raise CacheFrameError(
                f"a frame of {worker.instance}/{worker.rank}, epoch {worker.epoch:016x}, on the "
                f"stream of {self._key}, epoch {self._key.epoch:016x}"
            )
        _check_hashes(frame.hashes)
        if frame.dump != cache_pb2.CACHE_DUMP_UNSPECIFIED:
            return self._take_dump(frame)
        if frame.kinds or frame.hashes:
            return self._take_events(frame)
        return iter(())

    def break_off(self) -> None:
        """The stream has ended: of a dump that was under way nothing is kept."""
        draft, self._draft, self._num_dumped = self._draft, None, 0
        if draft is not None:
            self._index.drop(draft)

    def forget(self) -> None:
        """What it said cannot be relied on."""
        self.break_off()
        self.next_sequence = 0
        self._index.clear(self._key)

    def _take_dump(self, frame: cache_pb2.CacheFrame) -> Iterator[int]:
        if frame.kinds or not frame.first_sequence:
            raise CacheFrameError("a dump with events, or without a sequence")
        self._num_dumped += len(frame.hashes) // DIGEST_SIZE
        self._check_size(self._num_dumped)
        draft = self._draft = self._draft or self._index.draft()

        def take() -> Iterator[int]:
            for hashes in _slices(frame.hashes):
                self._index.store_draft(draft, hashes)
                yield len(hashes)
            if frame.dump == cache_pb2.CACHE_DUMP_LAST:
                self._draft, self._num_dumped = None, 0
                self._index.publish(self._key, draft)
                self.next_sequence = frame.first_sequence
                self.num_dumps += 1

        return take()

    def _take_events(self, frame: cache_pb2.CacheFrame) -> Iterator[int]:
        kinds, num_hashes = frame.kinds, len(frame.hashes) // DIGEST_SIZE
        if len(kinds) != num_hashes:
            raise CacheFrameError(f"{len(kinds)} kinds of events, {num_hashes} hashes")
        if not set(kinds) <= {STORED, REMOVED, CLEARED}:
            raise CacheFrameError(f"kinds of events {sorted(set(kinds))}: 1 to 3 are known")
        if not self.next_sequence or frame.first_sequence != self.next_sequence:
            expected, self.next_sequence = self.next_sequence, 0
            raise CacheGapError(f"events from {frame.first_sequence} on, expected {expected}")
        self._check_size(self._index.num_blocks(self._key) + kinds.count(STORED))

        def take() -> Iterator[int]:
            for number, hashes in enumerate(_slices(frame.hashes)):
                first = number * SLICE_BLOCKS
                self._take_slice(kinds[first : first + SLICE_BLOCKS], hashes)
                yield len(hashes)

        return take()

    def _take_slice(self, kinds: bytes, hashes: list[bytes]) -> None:
        """Some events, of which there are as many as hashes."""
        self.next_sequence += len(kinds)
        start = 0
        for kind, run in groupby(kinds):
            end = start + sum(1 for _ in run)
            if kind == STORED:
                self._index.store(self._key, hashes[start:end])
            elif kind == REMOVED:
                self._index.discard(self._key, hashes[start:end])
            else:
                self._index.clear(self._key)
            start = end

    def _check_size(self, num_blocks: int) -> None:
        if num_blocks > MAX_RANK_BLOCKS:
            raise CacheFrameError(f"{num_blocks} blocks of one rank: at most {MAX_RANK_BLOCKS}")


def _check_hashes(hashes: bytes) -> None:
    """16 bytes each."""
    if len(hashes) % DIGEST_SIZE or len(hashes) > MAX_FRAME_BLOCKS * DIGEST_SIZE:
        raise CacheFrameError(
            f"{len(hashes)} bytes of hashes: a multiple of {DIGEST_SIZE}, at most "
            f"{MAX_FRAME_BLOCKS * DIGEST_SIZE}"
        )


def _slices(hashes: bytes) -> Iterator[list[bytes]]:
    """Of one hash at least each."""
    size = SLICE_BLOCKS * DIGEST_SIZE
    for start in range(0, len(hashes), size):
        end = min(start + size, len(hashes))
        yield [hashes[at : at + DIGEST_SIZE] for at in range(start, end, DIGEST_SIZE)]
