"""What goes back to the routers: one frame a step and router process, with all its requests' news.

Deltas wait here until a router's stream takes them. A router that reads slowly gets several steps
in one frame, so memory is bounded by what its requests generate, and by `max_pending_deltas` in any
case. A router whose stream has been away for `lost_after_s`, or that reads too slowly for the
bound, counts as lost: its requests are to be aborted.

Nobody knows what a stream that broke had delivered. So what was handed to one is kept for a while
(`SentLog`), and the router's next stream says what it lacks of each request: that comes again, in
order, before anything newer. A delta may come twice, which `start_index` shows; none is missing, or
the request ends with PEER_LOST.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from decode.frames import Delta
from decode.places import Places
from runtime.errors import PeerLostError
from runtime.logging import get_logger
from runtime.sampling import FinishReason

logger = get_logger(__name__)

HEARTBEAT_S = 1.0
"""A stream without news gets an empty frame so often: it carries the load, and finds dead peers."""
REPLAY_S = 15.0
"""What was sent is kept for so long: longer than a dead connection stays unnoticed."""
LOST_AFTER_S = 10.0
"""A router may be without a stream for so long."""
MAX_FRAME_DELTAS = 4096
"""A frame with log-probabilities of all its deltas is still far below the limit of a message."""


@dataclass(slots=True, eq=False)
class Trail:
    """What can still be told of one request.

    Attributes:
        request_id: whose.
        kept_from: every output token from this index on is kept, waits, or is yet to come.
    """

    request_id: str
    kept_from: int


Entry = tuple[Trail, Delta]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentLimits:
    """How much of what was sent is kept for one router.

    Attributes:
        max_deltas: most deltas.
        max_bytes: about the most memory.
        keep_s: the longest time.
    """

    max_deltas: int = 100_000
    max_bytes: int = 64 * 2**20
    keep_s: float = REPLAY_S


class SentLog:
    """What was handed to a router's streams, oldest first."""

    def __init__(self, limits: SentLimits) -> None:
        self._limits = limits
        self._batches: deque[tuple[float, int, list[Entry]]] = deque()
        self._num_deltas = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        return self._num_deltas

    def __iter__(self) -> Iterator[Entry]:
        for _, _, entries in self._batches:
            yield from entries

    def add(self, entries: list[Entry], now: float) -> None:
        """Keep what is about to be sent."""
        num_bytes = sum(delta.num_bytes for _, delta in entries)
        self._batches.append((now, num_bytes, entries))
        self._num_deltas += len(entries)
        self._num_bytes += num_bytes

    def expire(self, now: float) -> Iterator[Entry]:
        """Drop, and yield, what is too old or too much."""
        limits = self._limits
        while self._batches:
            sent_at, num_bytes, entries = self._batches[0]
            is_kept = self._num_deltas <= limits.max_deltas and self._num_bytes <= limits.max_bytes
            if is_kept and now < sent_at + limits.keep_s:
                return
            self._batches.popleft()
            self._num_deltas -= len(entries)
            self._num_bytes -= num_bytes
            yield from entries


@dataclass(slots=True)
class _Outbox:
    sent: SentLog
    trails: dict[str, Trail] = field(default_factory=dict)
    """Of every request that the router may ask for, by id."""
    pending: list[Entry] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: object | None = None
    """Identity of the stream that reads now."""
    away_since: float = 0.0


class Outboxes:
    """Pending deltas of every router. Every method runs on the event loop."""

    def __init__(
        self,
        on_lost: Callable[[str], None],
        clock: Callable[[], float],
        *,
        places: Places,
        on_gap: Callable[[str], None],
        lost_after_s: float = LOST_AFTER_S,
        max_pending_deltas: int = 100_000,
        limits: SentLimits | None = None,
    ) -> None:
        """Start without routers.

        Args:
            on_lost: called once with the id of a router that is lost.
            clock: monotonic seconds.
            places: are given back when a request's last delta comes by.
            on_gap: called with the id of a request that cannot be continued without a gap.
            lost_after_s: how long a router may be without a stream.
            max_pending_deltas: most deltas that wait for one router.
            limits: of what is kept after it was sent.
        """
        self._on_lost = on_lost
        self._clock = clock
        self._places = places
        self._on_gap = on_gap
        self._lost_after_s = lost_after_s
        self._max_pending = max_pending_deltas
        self._limits = limits or SentLimits()
        self._boxes: dict[str, _Outbox] = {}
        self._closed = False

    @property
    def num_pending_deltas(self) -> int:
        """Deltas that no stream has taken yet."""
        return sum(len(box.pending) for box in self._boxes.values())

    @property
    def num_kept_deltas(self) -> int:
        """Deltas that were sent, and can be sent again."""
        return sum(len(box.sent) for box in self._boxes.values())

    def expect(self, router_id: str, request_id: str, first_index: int) -> None:
        """Know a request, and its router, although that may have no stream yet.

        Args:
            router_id: whose frames carry the tokens.
            request_id: with a place; an earlier request of this id is forgotten.
            first_index: output index of the token that prefill will give.
        """
        self._box(router_id).trails[request_id] = Trail(request_id, first_index)

    def put(self, news: Mapping[str, Sequence[Delta]]) -> None:
        """Add the deltas of one step; those that nobody can be told are dropped."""
        for router_id, deltas in news.items():
            for delta in deltas:
                if delta.finish_reason is not None:
                    self._places.give_back(delta.request_id)
            box = self._boxes.get(router_id)
            if box is None:
                continue  # it is lost
            box.pending += [
                (box.trails[delta.request_id], delta)
                for delta in deltas
                if delta.request_id in box.trails
            ]
            box.changed.set()
            if len(box.pending) > self._max_pending:
                self._lose(router_id, f"{len(box.pending)} deltas wait for it")

    def sweep(self) -> None:
        """Give up routers that have been away for too long; call it about once a second."""
        now = self._clock()
        for router_id, box in list(self._boxes.items()):
            self._expire(box)
            if box.stream is None and now - box.away_since >= self._lost_after_s:
                self._lose(router_id, f"without a stream for {now - box.away_since:.1f} s")

    def close(self) -> None:
        """End all streams once they have taken what is pending."""
        self._closed = True
        for box in self._boxes.values():
            box.changed.set()

    async def stream(
        self, router_id: str, resume: Mapping[str, int] | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Yield what is new, as lists; an empty list at first, and after a second without news.

        Ends when a later stream of the same router takes over, or when the router is lost.

        Args:
            router_id: whose.
            resume: by request id, the output index of the next token that the router lacks.
        """
        box = self._box(router_id)
        me = object()
        box.stream = me
        box.changed.set()  # wakes a predecessor, which then leaves
        again = self._again(box, resume or {})
        try:
            yield []
            for start in range(0, len(again), MAX_FRAME_DELTAS):
                yield again[start : start + MAX_FRAME_DELTAS]
            while box.stream is me and self._boxes.get(router_id) is box:
                if not box.pending and not self._closed:
                    await self._wait(box)
                    if box.stream is not me:
                        return
                if self._closed and not box.pending:
                    return
                yield self._take(box)
        finally:
            if box.stream is me:
                box.stream = None
                box.away_since = self._clock()

    def _box(self, router_id: str) -> _Outbox:
        box = self._boxes.get(router_id)
        if box is None:
            box = self._boxes[router_id] = _Outbox(
                sent=SentLog(self._limits), away_since=self._clock()
            )
        return box

    def _take(self, box: _Outbox) -> list[Delta]:
        """What a frame holds; kept from before it is sent."""
        entries, box.pending = box.pending[:MAX_FRAME_DELTAS], box.pending[MAX_FRAME_DELTAS:]
        if entries:
            box.sent.add(entries, self._clock())
            self._expire(box)
        return [delta for _, delta in entries if not delta.is_silent]

    def _expire(self, box: _Outbox) -> None:
        for trail, delta in box.sent.expire(self._clock()):
            trail.kept_from = max(trail.kept_from, delta.end_index)
            is_over = delta.finish_reason is not None
            if is_over and box.trails.get(trail.request_id) is trail:
                del box.trails[trail.request_id]

    def _again(self, box: _Outbox, resume: Mapping[str, int]) -> list[Delta]:
        """What was sent and may be lost, in order, and the ends of what cannot be continued."""
        self._expire(box)
        wanted: dict[Trail, int] = {}
        lost: list[Delta] = []
        for request_id, next_index in resume.items():
            trail = box.trails.get(request_id)
            if trail is not None and trail.kept_from <= next_index:
                wanted[trail] = next_index
                continue
            lost.append(_lost(request_id, next_index))
            if trail is not None:
                self._forget(box, trail)
        again = [
            delta
            for trail, delta in box.sent
            if trail in wanted
            and not delta.is_silent
            and (delta.end_index > wanted[trail] or delta.finish_reason is not None)
        ]
        return [*again, *lost]

    def _forget(self, box: _Outbox, trail: Trail) -> None:
        """The router hears no more of this request."""
        del box.trails[trail.request_id]
        box.pending = [entry for entry in box.pending if entry[0] is not trail]
        self._on_gap(trail.request_id)

    @staticmethod
    async def _wait(box: _Outbox) -> None:
        box.changed.clear()
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await box.changed.wait()
        except TimeoutError:
            return

    def _lose(self, router_id: str, reason: str) -> None:
        logger.warning("router lost: %s router_id=%s", reason, router_id)
        box = self._boxes.pop(router_id)
        box.changed.set()
        self._on_lost(router_id)


def _lost(request_id: str, next_index: int) -> Delta:
    error = PeerLostError(
        f"decode does not have output token {next_index} of this request any more, or never knew "
        "the request: it cannot be continued here",
        request_id=request_id,
    )
    return Delta(
        request_id=request_id,
        start_index=next_index,
        finish_reason=FinishReason.ERROR,
        error=error,
    )
