"""What experts get, from the engine loop to whoever follows it on the event loop.

The windows belong to the engine loop's thread (`experts.windows`), which hands each over as
it ends. Beside the metrics, which are of one window in a hundred steps, nothing is read from the
device while nobody follows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry

from engine.experts.counted import CountedExperts
from engine.experts.pass_clock import PassClock
from engine.operations import do_nothing
from experts.balancedness import Balancedness, balancedness_of, rank_rows
from experts.noise_floor import Routing, UniformPasses
from experts.windows import LoadWindow, LoadWindows, ReadableCounts, TakeWindow
from runtime.metrics.core import gauge_of

MAX_BYTES_BEHIND = 256 * 2**20
"""Of windows that a follower has not read; one that is further behind is given up."""

METRIC_PASSES = 100
"""Of the windows that the metrics are of."""
_DRAWN_TOKENS = 256
"""Of a pass that the noise floor is drawn from, and held against windows of any size."""

_EVEN = Balancedness(overall=1.0, worst_layer=1.0, worst_layer_index=0)

Post = Callable[[Callable[[], None]], None]
"""Has the engine loop's thread do something between two steps."""


def open_expert_load(
    experts: CountedExperts | None, post: Post, counts: ReadableCounts | None = None
) -> ExpertLoadFeed | None:
    """What tells of a rank's experts; None for a dense model.

    Args:
        experts: of the rank.
        post: to its engine loop.
        counts: of the ranks that it speaks for; None for its own.
    """
    return None if experts is None else ExpertLoadFeed(experts, post, counts)


def told_of(feed: ExpertLoadFeed | None) -> Callable[[], None]:
    """What the engine loop calls behind every step."""
    return do_nothing if feed is None else feed.passed


class ExpertLoadFeed:
    """The windows of one rank.

    `windows` and `passed` are for the engine loop, the rest for the event loop.

    Attributes:
        experts: of the rank.
        windows: of what its experts get.
        clock: of its steps.
    """

    def __init__(
        self, experts: CountedExperts, post: Post, counts: ReadableCounts | None = None
    ) -> None:
        self.experts, self.windows = experts, LoadWindows(counts or experts.counter)
        self.clock = PassClock()
        self._post = post
        self._latest: LoadWindow | None = None

    def passed(self) -> None:
        """The group has launched a step; for the engine loop."""
        self.clock.passed()
        self.windows.passed()

    @contextlib.contextmanager
    def follow(self, every: int) -> Iterator[FollowedWindows]:
        """Windows of `every` passes, from the next one on that begins."""
        followed = FollowedWindows(asyncio.get_running_loop())
        keys: list[int] = []
        self._post(lambda: keys.append(self.windows.follow(every, followed.put)))
        try:
            yield followed
        finally:
            self._post(lambda: self.windows.unfollow(keys[0]))

    def tell_windows(self, every: int, take: TakeWindow) -> None:
        """Have `take` told of windows of `every` passes, on the engine loop, as long as it runs."""

        def follow() -> None:
            self.windows.follow(every, take)

        self._post(follow)

    def watch(self, registry: CollectorRegistry) -> None:
        """Export how even the latest window of this rank's tokens is on the ranks that share them.

        A scrape computes it; the engine loop hands over a window now and then.
        """
        routing = Routing.of(self.experts.config)
        uniform = UniformPasses(routing, num_tokens=_DRAWN_TOKENS)
        self.tell_windows(METRIC_PASSES, self._keep)
        _watch(registry, "", "", self._balancedness)
        _watch(
            registry,
            "_of_floor",
            ", as a share of what a router without any preference reaches with as many tokens",
            lambda: self._of_floor(uniform),
        )

    def _keep(self, window: LoadWindow) -> None:
        self._latest = window

    def _balancedness(self) -> Balancedness:
        """Of the latest window, 1 before there is one."""
        experts, window = self.experts, self._latest
        if window is None:
            return _EVEN
        table = np.array(experts.placements.table, dtype=np.int64)
        return balancedness_of(rank_rows(window.counts_LE[None], table, experts.num_ranks))

    def _of_floor(self, uniform: UniformPasses) -> Balancedness:
        """Of the latest window, as shares of its noise floor; 1 where it has no token."""
        experts, window, now = self.experts, self._latest, self._balancedness()
        if window is None or not window.counts_LE.any():
            return _EVEN
        num_layers, num_slots = np.shape(experts.placements.table)
        # Sums of passes are held against sums of as many tokens, which chance tears less apart.
        num_tokens = window.counts_LE.sum(axis=1).max() / experts.config.num_experts_per_tok
        floor = uniform.floor(
            tokens_per_pass=float(num_tokens),
            num_ranks=experts.num_ranks,
            num_slots=num_slots,
            num_layers=num_layers,
        )
        return Balancedness(
            overall=now.overall / floor.overall,
            worst_layer=now.worst_layer / floor.worst_layer,
            worst_layer_index=now.worst_layer_index,
        )

    def deliver(self) -> None:
        """Have windows handed over that have ended: where no step follows, nobody else does it."""
        self._post(self.windows.deliver)


def _watch(
    registry: CollectorRegistry, suffix: str, beside: str, tell: Callable[[], Balancedness]
) -> None:
    gauge_of(
        registry,
        f"pd_expert_balancedness{suffix}",
        f"Mean over fullest rank, summed over layers, of this rank's latest tokens{beside}",
        lambda: tell().overall,
    )
    gauge_of(
        registry,
        f"pd_expert_worst_layer_balancedness{suffix}",
        f"The same of the least even layer{beside}",
        lambda: tell().worst_layer,
    )


class FollowedWindows:
    """The windows that one follower has not read, oldest first.

    Attributes:
        is_behind: whether the follower read too slowly for all to be kept: some are lost.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self._queue: asyncio.Queue[LoadWindow] = asyncio.Queue()
        self._num_bytes = 0
        self.is_behind = False

    async def next(self, timeout_s: float) -> LoadWindow | None:
        """The next window; None if none ends within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                window = await self._queue.get()
        except TimeoutError:
            return None
        self._num_bytes -= window.counts_LE.nbytes
        return window

    def put(self, window: LoadWindow) -> None:
        """Hand a window over; on the engine loop's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody reads
            self._event_loop.call_soon_threadsafe(self._put, window)

    def _put(self, window: LoadWindow) -> None:
        self.is_behind |= self._num_bytes > MAX_BYTES_BEHIND
        if not self.is_behind:
            self._num_bytes += window.counts_LE.nbytes
            self._queue.put_nowait(window)
