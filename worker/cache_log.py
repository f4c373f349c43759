"""What the prefix cache of this rank holds, as told to routers: a mirror and the latest events.

The block pool belongs to the engine loop, which hands its events over once a step (`CacheFeed`).
The mirror makes dumps without asking it, and every follower reads the one log at its own pace: a
follower that is behind the log gets a dump. The log has events as frames do, so that they are
written once, however many follow. While nobody does, nothing is recorded, and the engine loop does
nothing for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from engine.memory.block_pool import BlockPool
from engine.memory.events import BlockRemoved, BlockStored, CacheEvent
from runtime.block_hash import DIGEST_SIZE
from runtime.notifications import Notifications
from runtime.pb import cache_pb2

T = TypeVar("T")

MAX_EVENTS = 1 << 16
LINGER_S = 30.0
"""Events are recorded for so long after the last follower has gone: it may come back."""


class CacheEvents(NamedTuple):
    """Some events, oldest first, as a frame has them."""

    kinds: bytes
    """One byte each."""
    hashes: bytes
    """16 bytes each; zero of one that clears."""


class CacheLog:
    """Mirror and log. One event loop owns it."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        """``max_events`` are kept for followers that are behind."""
        self.is_live = False
        """Whether the mirror is complete, as of the latest event."""
        self.next_sequence = 1
        """Of the event that comes next; events of this life are counted from 1."""
        self._max_events = max_events
        self._kinds, self._hashes = bytearray(), bytearray()
        self._held: dict[bytes, None] = {}
        self._changed = Notifications()

    @property
    def num_blocks(self) -> int:
        """That the cache holds."""
        return len(self._held)

    def begin(self, block_hashes: Sequence[bytes]) -> None:
        """The cache holds exactly these; what was before is forgotten, and nobody can go on."""
        self.is_live = True
        self._held = dict.fromkeys(block_hashes)
        self._forget(len(self._kinds))
        self.next_sequence += 1  # what happened meanwhile counts as one event that is lost
        self._changed.notify()

    def end(self) -> None:
        """Events are not told any more."""
        self.is_live = False
        self._held = {}
        self._forget(len(self._kinds))
        self.next_sequence += 1

    def put(self, events: Sequence[CacheEvent]) -> None:
        """Events of one step, oldest first."""
        if not self.is_live:
            return  # told before the pool heard that nobody follows
        held, kinds, hashes = self._held, self._kinds, self._hashes
        for event in events:
            if isinstance(event, BlockStored):
                held[event.block_hash] = None
                kinds.append(cache_pb2.CACHE_EVENT_KIND_STORED)
                hashes += event.block_hash
            elif isinstance(event, BlockRemoved):
                held.pop(event.block_hash, None)
                kinds.append(cache_pb2.CACHE_EVENT_KIND_REMOVED)
                hashes += event.block_hash
            else:
                held.clear()
                kinds.append(cache_pb2.CACHE_EVENT_KIND_CLEARED)
                hashes += bytes(DIGEST_SIZE)
        self.next_sequence += len(events)
        self._forget(len(kinds) - self._max_events)
        self._changed.notify()

    def can_go_on(self, sequence: int) -> bool:
        """Whether all events from this one on are kept or yet to come."""
        return self.is_live and self.next_sequence - len(self._kinds) <= sequence <= (
            self.next_sequence
        )

    def since(self, sequence: int, most: int) -> CacheEvents:
        """At most so many events from this one on; `can_go_on` must be true."""
        first = sequence - (self.next_sequence - len(self._kinds))
        end = first + most
        return CacheEvents(
            bytes(self._kinds[first:end]),
            bytes(self._hashes[first * DIGEST_SIZE : end * DIGEST_SIZE]),
        )

    def dump(self, piece: int) -> Iterator[list[bytes]]:
        """All blocks of this moment, in lists of at most so many; one list at least."""
        hashes = list(self._held)
        for start in range(0, max(1, len(hashes)), piece):
            yield hashes[start : start + piece]

    async def wait(self, timeout_s: float) -> None:
        """Return when there is news, at the latest after ``timeout_s``."""
        await self._changed.wait(timeout_s)

    def _forget(self, num_events: int) -> None:
        """The oldest; fewer than one: none."""
        if num_events > 0:
            del self._kinds[:num_events]
            del self._hashes[: num_events * DIGEST_SIZE]


class CacheFeed:
    """The way from the engine loop's block pool to the log. Create it on the event loop."""

    def __init__(
        self,
        pool: BlockPool,
        post: Callable[[Callable[[], None]], None],
        *,
        linger_s: float = LINGER_S,
    ) -> None:
        """``post`` has the engine loop, which owns ``pool``, call something between two steps."""
        self.log = CacheLog()
        self._pool = pool
        self._post = post
        self._linger_s = linger_s
        self._loop = asyncio.get_running_loop()
        self._num_followers = 0
        self._is_recording = False
        self._stopping: asyncio.TimerHandle | None = None

    def tell(self) -> None:
        """Hand over what happened; called on the engine loop's thread after every step."""
        if self._pool.has_events:
            self._hand_over(self.log.put, self._pool.take_events())

    @contextlib.contextmanager
    def follow(self) -> Iterator[CacheLog]:
        """The log, which is kept up to date meanwhile."""
        self._num_followers += 1
        if self._stopping is not None:
            self._stopping.cancel()
            self._stopping = None
        if not self._is_recording:
            self._is_recording = True
            self._post(self._start)
        try:
            yield self.log
        finally:
            self._num_followers -= 1
            if not self._num_followers:
                self._stopping = self._loop.call_later(self._linger_s, self._stop)

    def _stop(self) -> None:
        self._stopping = None
        self._is_recording = False
        self.log.end()
        self._post(self._pool.stop_events)

    def _start(self) -> None:
        """On the engine loop's thread: nothing comes between these hashes and later events."""
        self._hand_over(self.log.begin, self._pool.start_events())

    def _hand_over(self, take: Callable[[Sequence[T]], None], what: Sequence[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody follows
            self._loop.call_soon_threadsafe(take, what)
