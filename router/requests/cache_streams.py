"""A stream of every rank of the pool that says what its prefix cache holds, for the index.

Opened only where the policy chooses by it. A stream that broke goes on where it was; after a gap,
or where the worker says something that no worker would, it begins anew with a dump. A rank that
left the pool leaves the index, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.pool.cache_follower import (
    SLICE_BLOCKS,
    CacheFollower,
    CacheFrameError,
    CacheGapError,
)
from router.pool.members import Member, WorkerKey, load_from_proto
from router.pool.prefix_index import PrefixIndex
from router.pool.view import PoolView
from router.requests.clients import FollowCall, WorkerClients
from runtime.background import tell_failure
from runtime.errors import TandemError
from runtime.logging import get_logger
from runtime.pb import cache_pb2
from runtime.rpc.grpc_calls import map_rpc_errors
from runtime.trace.context import without_trace

logger = get_logger(__name__)

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 5.0
REFUSED_S = 30.0
"""A worker whose frames were refused is asked again only after so long."""
SWEEP_PAUSE_S = 0.001
"""Between two slices of what ranks gave up: requests go first."""


class CacheStream:
    """The stream of one life of one rank."""

    def __init__(
        self,
        member: Member,
        index: PrefixIndex,
        follow: Callable[[cache_pb2.FollowRequest], FollowCall],
        router_id: str,
        on_frame: Callable[[WorkerKey, cache_pb2.CacheFrame], None],
        *,
        refused_s: float | None = None,
    ) -> None:
        """``on_frame`` is called with each frame that was taken."""
        self.key = member.key
        self.follower = CacheFollower(member.key, index)
        self.is_refused = False
        """Whether the last frame was one that no worker sends."""
        self._identity = member.identity
        self._follow = follow
        self._router_id = router_id
        self._on_frame = on_frame
        self._refused_s = REFUSED_S if refused_s is None else refused_s
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"cache-{member.key}", context=without_trace()
        )
        self._task.add_done_callback(tell_failure)

    def stop(self) -> None:
        """End it."""
        self._task.cancel()

    def on_closed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once it has ended."""
        self._task.add_done_callback(lambda _: listener())

    async def wait_closed(self) -> None:
        """Return when it has ended."""
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        """Follow again and again, whatever breaks the stream; until cancelled."""
        num_fruitless, trouble = 0, ""
        while True:
            before = self.follower.num_dumps, self.follower.next_sequence
            problem = await self._once()
            is_fruitless = before == (self.follower.num_dumps, self.follower.next_sequence)
            num_fruitless = num_fruitless + 1 if is_fruitless else 0
            if problem != trouble:
                logger.warning("news of a cache broke off worker=%s reason=%r", self.key, problem)
            trouble = problem
            delay_s = min(RETRY_FIRST_S * 2.0 ** min(num_fruitless, 10), RETRY_MAX_S)
            await asyncio.sleep(self._refused_s if self.is_refused else delay_s)

    async def _once(self) -> str:
        """Follow until something ends it; says what."""
        self.is_refused = False
        try:
            with map_rpc_errors(f"the cache of {self.key}"):
                await self._read()
        except CacheGapError as error:
            return str(error)
        except CacheFrameError as error:
            self.is_refused = True
            self.follower.forget()
            return f"refused: {error}"
        except TandemError as error:
            return error.message
        except Exception as error:  # a defect of ours: begin anew rather than keep what is stale
            logger.exception("news of a cache could not be taken worker=%s", self.key)
            self.is_refused = True
            self.follower.forget()
            return repr(error)
        return "the worker ended the stream"

    async def _read(self) -> None:
        follower = self.follower
        call = self._follow(
            cache_pb2.FollowRequest(
                router_id=self._router_id,
                worker=self._identity,
                next_sequence=follower.next_sequence,
            )
        )
        try:
            async for frame in call:
                for _ in follower.apply(frame):
                    await asyncio.sleep(0)
                self._on_frame(self.key, frame)
        finally:
            call.cancel()
            follower.break_off()


class CacheStreams:
    """A stream for every member of the pool, and the index that they keep."""

    def __init__(
        self, pool: PoolView, clients: WorkerClients, router_id: str, index: PrefixIndex
    ) -> None:
        self._pool = pool
        self._clients = clients
        self._router_id = router_id
        self._index = index
        self._streams: dict[WorkerKey, CacheStream] = {}
        self._ending: set[CacheStream] = set()
        self._sweeper: asyncio.Task[None] | None = None
        index.on_retire(self._sweep_soon)

    def follow_pool(self) -> None:
        """Open streams to new members; forget those that are gone."""
        members = {member.key: member for member in self._pool.members()}
        for key in self._streams.keys() - members.keys():
            self._end(self._streams.pop(key))
            self._index.remove(key)
        for key, member in members.items():
            if key not in self._streams:
                self._streams[key] = CacheStream(
                    member,
                    self._index,
                    self._clients.cache(member),
                    self._router_id,
                    self._take_load,
                )

    @property
    def num_known(self) -> int:
        """Ranks of which a dump was taken, and nothing is missing since."""
        return sum(stream.follower.next_sequence > 0 for stream in self._streams.values())

    async def close(self) -> None:
        """End all streams, and return when they and those of ranks that left have ended."""
        for stream in self._streams.values():
            self._end(stream)
        self._streams.clear()
        while self._ending:
            await next(iter(self._ending)).wait_closed()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})

    def _end(self, stream: CacheStream) -> None:
        stream.stop()
        self._ending.add(stream)
        stream.on_closed(lambda: self._ending.discard(stream))

    def _sweep_soon(self) -> None:
        if self._sweeper is None or self._sweeper.done():
            loop = asyncio.get_running_loop()
            self._sweeper = loop.create_task(self._sweep(), context=without_trace())
            self._sweeper.add_done_callback(tell_failure)

    async def _sweep(self) -> None:
        """What ranks gave up leaves the index in slices, so that no request waits for all of it."""
        while self._index.sweep(SLICE_BLOCKS):
            await asyncio.sleep(SWEEP_PAUSE_S)

    def _take_load(self, key: WorkerKey, frame: cache_pb2.CacheFrame) -> None:
        if frame.HasField("load"):
            self._pool.report(key, load_from_proto(frame.load))
