"""What goes back to the routers: one frame a step and router process, with all its requests' news.

`StepNews` collects deltas on the engine loop's thread; `Outboxes` holds them on the event loop
until a router's stream takes them. A router that reads slowly gets several steps in one frame, so
memory is bounded by what its requests generate, and by `max_pending_deltas` in any case. A router
whose stream has been away for `lost_after_s`, or that reads too slowly for the bound, counts as
lost: its requests are to be aborted. No delta is ever delivered twice; one that was handed to a
stream that then broke is gone, which the router sees by `start_index`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.pb import common_pb2, decode_pb2
from runtime.sampling import FinishReason, PositionLogprobs
from runtime.wire import error_to_proto, finish_reason_to_proto, logprobs_to_proto

logger = get_logger(__name__)

HEARTBEAT_S = 1.0
"""A stream without news gets an empty frame so often: it carries the load, and finds dead peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """News of one request in one step.

    Attributes:
        request_id: whose.
        start_index: output index of the first of `token_ids`.
        token_ids: new output tokens; empty if the request only ends.
        logprobs: empty, or one per token.
        finish_reason: set in the last delta of a request.
        error: why, with ERROR and ABORT.
        timings: with the first delta and with the last.
        num_cached_tokens: prompt tokens that this rank's prefix cache gave.
    """

    request_id: str
    start_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    timings: common_pb2.Timings | None = None
    num_cached_tokens: int = 0

    def to_proto(self) -> decode_pb2.TokenDelta:
        """The message of the wire."""
        error = None if self.error is None else error_to_proto(self.error, self.request_id)
        return decode_pb2.TokenDelta(
            request_id=self.request_id,
            start_index=self.start_index,
            token_ids=self.token_ids,
            logprobs=[logprobs_to_proto(item) for item in self.logprobs],
            finish_reason=finish_reason_to_proto(self.finish_reason),
            error=error,
            timings=self.timings,
            num_cached_tokens=self.num_cached_tokens,
        )


class StepNews:
    """The deltas of the present step by router. Belongs to the engine loop's thread."""

    def __init__(self) -> None:
        self._deltas: defaultdict[str, list[Delta]] = defaultdict(list)

    def add(self, router_id: str, delta: Delta) -> None:
        """Append a delta of one of the router's requests."""
        self._deltas[router_id].append(delta)

    def drop(self, router_id: str) -> None:
        """Forget the deltas of a router that nobody reads for."""
        self._deltas.pop(router_id, None)

    def take(self) -> Mapping[str, list[Delta]]:
        """Return all since the last call, by router."""
        deltas, self._deltas = self._deltas, defaultdict(list)
        return deltas


@dataclass(slots=True)
class _Outbox:
    pending: list[Delta] = field(default_factory=list)
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
        lost_after_s: float = 5.0,
        max_pending_deltas: int = 100_000,
    ) -> None:
        """Start without routers.

        Args:
            on_lost: called once with the id of a router that is lost.
            clock: monotonic seconds.
            lost_after_s: how long a router may be without a stream.
            max_pending_deltas: most deltas that wait for one router.
        """
        self._on_lost = on_lost
        self._clock = clock
        self._lost_after_s = lost_after_s
        self._max_pending = max_pending_deltas
        self._boxes: dict[str, _Outbox] = {}
        self._closed = False

    @property
    def num_pending_deltas(self) -> int:
        """Deltas that no stream has taken yet."""
        return sum(len(box.pending) for box in self._boxes.values())

    def expect(self, router_id: str) -> None:
        """Know a router from now on, although it may have no stream yet."""
        if router_id not in self._boxes:
            self._boxes[router_id] = _Outbox(away_since=self._clock())

    def put(self, news: Mapping[str, Sequence[Delta]]) -> None:
        """Add the deltas of one step."""
        for router_id, deltas in news.items():
            self.expect(router_id)
            box = self._boxes[router_id]
            box.pending += deltas
            box.changed.set()
            if len(box.pending) > self._max_pending:
                self._lose(router_id, f"{len(box.pending)} deltas wait for it")

    def sweep(self) -> None:
        """Give up routers that have been away for too long; call it about once a second."""
        now = self._clock()
        for router_id, box in list(self._boxes.items()):
            if box.stream is None and now - box.away_since >= self._lost_after_s:
                self._lose(router_id, f"without a stream for {now - box.away_since:.1f} s")

    def close(self) -> None:
        """End all streams once they have taken what is pending."""
        self._closed = True
        for box in self._boxes.values():
            box.changed.set()

    async def stream(self, router_id: str) -> AsyncGenerator[list[Delta], None]:
        """Yield what is new, as lists; an empty list at first, and after a second without news.

        Ends when a later stream of the same router takes over, or when the router is lost.
        """
        self.expect(router_id)
        box = self._boxes[router_id]
        me = object()
        box.stream = me
        box.changed.set()  # wakes a predecessor, which then leaves
        try:
            yield []
            while box.stream is me and self._boxes.get(router_id) is box:
                if not box.pending and not self._closed:
                    await self._wait(box)
                    if box.stream is not me:
                        return
                deltas, box.pending = box.pending, []
                if self._closed and not deltas:
                    return
                yield deltas
        finally:
            if box.stream is me:
                box.stream = None
                box.away_since = self._clock()

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
