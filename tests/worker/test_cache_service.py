"""What followers of a rank's prefix cache are told, against a real block pool, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from runtime.net.credentials import Credentials, Listen
from runtime.pb import cache_pb2, cache_pb2_grpc, registry_pb2
from runtime.rpc.grpc_calls import bind_port, create_server, open_channel
from runtime.rpc.wire import identity
from tests.worker.cached_rank import Rank, block_hash
from worker import cache_service
from worker.cache_service import CacheService

CREDENTIALS = Credentials.of_secret("test-secret")
WORKER = identity("prefill-0", 7, 0)


class Follower:
    """What one stream says of the cache, checked as a router does."""

    def __init__(self, call: AsyncIterator[cache_pb2.CacheFrame]) -> None:
        self._call = aiter(call)
        self.held: set[bytes] = set()
        self.next_sequence = 0
        self.num_dumps = 0
        self._dumped: set[bytes] = set()

    async def frame(self) -> cache_pb2.CacheFrame:
        async with asyncio.timeout(60):
            frame = await anext(self._call)
        assert frame.worker == WORKER
        hashes = [frame.hashes[at : at + 16] for at in range(0, len(frame.hashes), 16)]
        if frame.dump:
            self._dumped |= set(hashes)
            if frame.dump == cache_pb2.CACHE_DUMP_LAST:
                self.held, self._dumped = self._dumped, set()
                self.next_sequence = frame.first_sequence
                self.num_dumps += 1
        elif frame.kinds:
            assert frame.first_sequence == self.next_sequence
            self.next_sequence += len(frame.kinds)
            for kind, each in zip(frame.kinds, hashes, strict=True):
                if kind == cache_pb2.CACHE_EVENT_KIND_STORED:
                    self.held.add(each)
                elif kind == cache_pb2.CACHE_EVENT_KIND_REMOVED:
                    self.held.discard(each)
                else:
                    self.held.clear()
        return frame

    async def until(self, numbers: set[int]) -> None:
        while self.held != {block_hash(number) for number in numbers} or not self.num_dumps:
            await self.frame()


@contextlib.asynccontextmanager
async def served(rank: Rank) -> AsyncIterator[Callable[..., grpc.aio.UnaryStreamCall]]:  # type: ignore[type-arg]
    server = create_server(CREDENTIALS)
    load = registry_pb2.WorkerLoad(num_tokens_waiting=5)
    service = CacheService(WORKER, rank.feed, lambda: load, frame_interval_s=0.0)
    cache_pb2_grpc.add_CacheServicer_to_server(service, server)
    listen = Listen(bind="127.0.0.1", port=0)
    port = bind_port(server, listen, CREDENTIALS)
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", CREDENTIALS) as channel:
            stub = cache_pb2_grpc.CacheStub(channel)

            def follow(next_sequence: int = 0, worker: object = WORKER) -> object:
                request = cache_pb2.FollowRequest(worker=worker, next_sequence=next_sequence)
                return stub.Follow(request)

            yield follow
    finally:
        await server.stop(0)


async def follow_to_dump(rank: Rank, follower: Follower) -> None:
    await follower.frame()
    rank.step()
    while not follower.num_dumps:
        await follower.frame()


async def test_tells_all_that_is_held_and_then_every_change() -> None:
    rank = Rank()
    rank.compute(1, 2, 3)
    async with served(rank) as follow:
        follower = Follower(follow())
        first = await follower.frame()
        assert first.load.num_tokens_waiting == 5
        rank.step()
        await follower.until({1, 2, 3})
        rank.compute(4, 5, 6, 7, 8)
        rank.step()
        await follower.until({1, 2, 3, 4, 5, 6, 7, 8})
        rank.compute(9)  # takes the place of the one that was used least recently
        rank.step()
        await follower.until({1, 2, 4, 5, 6, 7, 8, 9})
        rank.pool.reset_prefix_cache()
        rank.step()
        await follower.until(set())
        assert follower.num_dumps == 1


async def test_a_pool_that_nobody_follows_records_nothing() -> None:
    rank = Rank(linger_s=0.0)
    rank.compute(1)
    assert not rank.pool.has_events
    async with served(rank) as follow:
        call = follow()
        await follow_to_dump(rank, Follower(call))
        rank.compute(2)
        assert rank.pool.has_events
        rank.step()
        call.cancel()
        for _ in range(100):
            await asyncio.sleep(0.01)
            rank.step()
            if not rank.feed.log.is_live:
                break
        rank.compute(3)
        assert not rank.pool.has_events
        follower = Follower(follow())
        await follow_to_dump(rank, follower)
        await follower.until({1, 2, 3})


async def test_who_was_away_goes_on_where_it_was() -> None:
    rank = Rank()
    async with served(rank) as follow:
        call = follow()
        before = Follower(call)
        await follow_to_dump(rank, before)
        call.cancel()
        rank.compute(1, 2)
        rank.step()
        again = Follower(follow(before.next_sequence))
        again.next_sequence = before.next_sequence
        while len(again.held) < 2:
            await again.frame()
        assert again.held == {block_hash(1), block_hash(2)}
        assert again.num_dumps == 0


async def test_who_is_behind_what_is_kept_gets_a_dump() -> None:
    rank = Rank()
    rank.feed.log._max_events = 4
    async with served(rank) as follow:
        call = follow()
        before = Follower(call)
        await follow_to_dump(rank, before)
        call.cancel()
        for number in range(1, 9):
            rank.compute(number)
            rank.step()
        again = Follower(follow(before.next_sequence))
        await again.until(set(range(1, 9)))
        assert again.num_dumps == 1


@pytest.mark.parametrize("sequence", [1, 10**9, 2**63])
async def test_a_sequence_that_never_was_gets_a_dump(sequence: int) -> None:
    rank = Rank()
    rank.compute(1)
    async with served(rank) as follow:
        follower = Follower(follow(sequence))
        await follow_to_dump(rank, follower)
        await follower.until({1})


async def test_another_life_refuses() -> None:
    rank = Rank()
    async with served(rank) as follow:
        call = follow(worker=identity("prefill-0", 8, 0))
        with pytest.raises(grpc.aio.AioRpcError, match="another was meant") as refused:
            await anext(aiter(call))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert not rank.posted


async def test_a_large_cache_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_service, "MAX_FRAME_BLOCKS", 3)
    rank = Rank()
    rank.compute(*range(1, 9))
    async with served(rank) as follow:
        call = follow()
        sizes = []
        await anext(aiter(call))
        rank.step()
        async for frame in call:
            sizes.append(len(frame.hashes) // 16)
            if frame.dump == cache_pb2.CACHE_DUMP_LAST:
                break
        assert sizes == [3, 3, 2]
