"""One rank's blocks in the index, from what its stream says: dumps, events, and nothing unchecked.

A frame that cannot be of this worker, or that no worker of ours would send, is refused whole, and
with it all that the worker says until it begins anew with a dump.
"""

from __future__ import annotations

from itertools import groupby

from router.pool.members import WorkerKey
from router.pool.prefix_index import PrefixIndex
from runtime.block_hash import DIGEST_SIZE
from runtime.pb import cache_pb2

MAX_FRAME_BLOCKS = 1 << 16
MAX_RANK_BLOCKS = 1 << 20
"""Far more than a rank has; 100 MiB here."""

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
        self._dumped: list[bytes] = []
        index.add(key)

    def apply(self, frame: cache_pb2.CacheFrame) -> None:
        """Take a frame.

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
        hashes = _split(frame.hashes)
        if frame.dump != cache_pb2.CACHE_DUMP_UNSPECIFIED:
            self._take_dump(frame, hashes)
        elif frame.kinds or hashes:
            self._take_events(frame, hashes)

    def begin(self) -> None:
        """A new stream: of a dump that was under way nothing is kept."""
        self._dumped = []

    def forget(self) -> None:
        """What it said cannot be relied on."""
        self.next_sequence = 0
        self._dumped = []
        self._index.clear(self._key)

    def _take_dump(self, frame: cache_pb2.CacheFrame, hashes: list[bytes]) -> None:
        if frame.kinds or not frame.first_sequence:
            raise CacheFrameError("a dump with events, or without a sequence")
        self._check_size(len(self._dumped) + len(hashes))
        self._dumped += hashes
        if frame.dump == cache_pb2.CACHE_DUMP_LAST:
            now, self._dumped = set(self._dumped), []
            before = self._index.blocks(self._key)
            self._index.discard(self._key, before - now)
            self._index.store(self._key, now - before)
            self.next_sequence = frame.first_sequence
            self.num_dumps += 1

    def _take_events(self, frame: cache_pb2.CacheFrame, hashes: list[bytes]) -> None:
        kinds = frame.kinds
        if len(kinds) != len(hashes):
            raise CacheFrameError(f"{len(kinds)} kinds of events, {len(hashes)} hashes")
        if not set(kinds) <= {STORED, REMOVED, CLEARED}:
            raise CacheFrameError(f"kinds of events {sorted(set(kinds))}: 1 to 3 are known")
        if not self.next_sequence or frame.first_sequence != self.next_sequence:
            expected, self.next_sequence = self.next_sequence, 0
            raise CacheGapError(f"events from {frame.first_sequence} on, expected {expected}")
        self._check_size(self._index.num_blocks(self._key) + kinds.count(STORED))
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


def _split(hashes: bytes) -> list[bytes]:
    """16 bytes each."""
    if len(hashes) % DIGEST_SIZE or len(hashes) > MAX_FRAME_BLOCKS * DIGEST_SIZE:
        raise CacheFrameError(
            f"{len(hashes)} bytes of hashes: a multiple of {DIGEST_SIZE}, at most "
            f"{MAX_FRAME_BLOCKS * DIGEST_SIZE}"
        )
    return [hashes[at : at + DIGEST_SIZE] for at in range(0, len(hashes), DIGEST_SIZE)]
