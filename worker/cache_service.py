"""The gRPC face of a rank's prefix cache: a dump, then events, for every router that follows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from runtime.pb import cache_pb2, cache_pb2_grpc, common_pb2, registry_pb2
from runtime.rpc.wire import same_identity
from worker.cache_log import CacheEvents, CacheFeed, CacheLog

MAX_FRAME_BLOCKS = 16_384
"""Of a frame, 17 bytes each: far below the limit of a message."""
FRAME_INTERVAL_S = 0.02
"""What happens within this time goes in one frame."""
HEARTBEAT_S = 1.0
"""A frame comes so often, with the load, also where nothing happens."""

FollowContext = grpc.aio.ServicerContext[cache_pb2.FollowRequest, cache_pb2.CacheFrame]


class CacheService(cache_pb2_grpc.CacheServicer):
    """Serves one rank."""

    def __init__(
        self,
        identity: common_pb2.WorkerIdentity,
        feed: CacheFeed,
        load: Callable[[], registry_pb2.WorkerLoad],
        *,
        frame_interval_s: float = FRAME_INTERVAL_S,
    ) -> None:
        """``load`` makes a new report."""
        self._identity = identity
        self._feed = feed
        self._load = load
        self._frame_interval_s = frame_interval_s

    async def Follow(
        self, request: cache_pb2.FollowRequest, context: FollowContext
    ) -> AsyncIterator[cache_pb2.CacheFrame]:
        """See cache.proto."""
        if not same_identity(request.worker, self._identity):
            await _refuse(context, self._identity)
        with self._feed.follow() as log:
            sequence = request.next_sequence
            yield self._frame()
            while True:
                if log.is_live and not log.can_go_on(sequence):
                    sequence = log.next_sequence
                    for frame in self._dump(log, sequence):
                        yield frame
                elif log.is_live and sequence < log.next_sequence:
                    events = log.since(sequence, MAX_FRAME_BLOCKS)
                    yield self._frame_of(sequence, events)
                    sequence += len(events.kinds)
                    await asyncio.sleep(self._frame_interval_s)
                else:
                    await log.wait(HEARTBEAT_S)
                    if not log.is_live or sequence == log.next_sequence:
                        yield self._frame()

    def _frame(self) -> cache_pb2.CacheFrame:
        return cache_pb2.CacheFrame(worker=self._identity, load=self._load())

    def _frame_of(self, sequence: int, events: CacheEvents) -> cache_pb2.CacheFrame:
        frame = self._frame()
        frame.first_sequence = sequence
        frame.kinds, frame.hashes = events
        return frame

    def _dump(self, log: CacheLog, sequence: int) -> list[cache_pb2.CacheFrame]:
        """Of this moment: events that come while it is sent are behind it."""
        frames = [
            cache_pb2.CacheFrame(
                worker=self._identity,
                first_sequence=sequence,
                hashes=b"".join(piece),
                dump=cache_pb2.CACHE_DUMP_PIECE,
            )
            for piece in log.dump(MAX_FRAME_BLOCKS)
        ]
        frames[-1].dump = cache_pb2.CACHE_DUMP_LAST
        return frames


async def _refuse(
    context: grpc.aio.ServicerContext[Any, Any], mine: common_pb2.WorkerIdentity
) -> None:
    text = f"this is {mine.instance}/{mine.rank}, epoch {mine.epoch:016x}, and another was meant"
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
