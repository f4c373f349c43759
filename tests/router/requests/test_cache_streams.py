"""The router's streams of caches against a worker's service, over real gRPC, and hostile ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from router.pool.cache_follower import CacheFollower
from router.pool.members import Member, Role, WorkerKey
from router.pool.prefix_index import PrefixIndex
from router.pool.view import PoolView
from router.requests import cache_streams
from router.requests.cache_streams import CacheStreams
from router.requests.clients import WorkerClients
from runtime.net.credentials import Credentials, Listen
from runtime.pb import cache_pb2, cache_pb2_grpc, registry_pb2
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.wire import identity
from tests.router.routing.pools import endpoint
from tests.worker.cached_rank import Rank, block_hash
from worker.cache_service import CacheService

CREDENTIALS = Credentials.of_secret("test-secret")


class LossyService(CacheService):
    """Loses the frames that ``loses`` says, and changes the others as ``change`` says."""

    loses: Callable[[cache_pb2.CacheFrame], bool] = staticmethod(lambda frame: False)
    change: Callable[[cache_pb2.CacheFrame], None] = staticmethod(lambda frame: None)
    num_calls = 0

    async def Follow(self, request, context):  # type: ignore[no-untyped-def]
        self.num_calls += 1
        async for frame in super().Follow(request, context):
            if not self.loses(frame):
                self.change(frame)
                yield frame


class Worker:
    """One member of a pool, whose engine loop turns every few milliseconds."""

    def __init__(self, number: int, epoch: int = 7) -> None:
        self.key = WorkerKey(f"prefill-{number}", epoch, 0)
        self.rank = Rank(num_blocks=17)
        self.load = registry_pb2.WorkerLoad(num_tokens_waiting=5, sequence=1)
        mine = identity(*self.key)
        self.service = LossyService(mine, self.rank.feed, lambda: self.load, frame_interval_s=0.0)

    async def __aenter__(self) -> Worker:
        self._server = create_server(CREDENTIALS)
        cache_pb2_grpc.add_CacheServicer_to_server(self.service, self._server)
        port = bind_port(self._server, Listen(bind="127.0.0.1", port=0), CREDENTIALS)
        await self._server.start()
        self.member: Member = endpoint(
            Role.PREFILL, 0, key=self.key, address=f"127.0.0.1:{port}", block_size=4
        )
        self._turning = asyncio.create_task(self._turn())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._turning.cancel()
        await self._server.stop(0)

    async def _turn(self) -> None:
        while True:
            self.rank.step()
            await asyncio.sleep(0.002)


class Router:
    """A pool, an index and the streams between."""

    def __init__(self) -> None:
        self.pool = PoolView(asyncio.get_running_loop().time)
        self.index = PrefixIndex()
        self.clients = WorkerClients(CREDENTIALS)
        self.streams = CacheStreams(self.pool, self.clients, "router-1", self.index)

    def sees(self, *workers: Worker) -> None:
        self.pool.update([worker.member for worker in workers])
        self.streams.follow_pool()

    async def until(self, worker: Worker, numbers: set[int]) -> None:
        async with asyncio.timeout(60):
            while worker.key not in self.index.ranks or self.index.blocks(worker.key) != {
                block_hash(number) for number in numbers
            }:
                await asyncio.sleep(0.002)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(cache_streams, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(cache_streams, "REFUSED_S", 0.2)
    made = Router()
    yield made
    await made.streams.close()
    await made.clients.close()


async def test_the_index_follows_every_member_until_it_leaves(router: Router) -> None:
    async with Worker(0) as first, Worker(1) as second:
        first.rank.compute(1, 2)
        router.sees(first, second)
        await router.until(first, {1, 2})
        second.rank.compute(2, 3)
        await router.until(second, {2, 3})
        assert router.streams.num_known == 2
        assert router.pool.reported_load(first.key).num_tokens_waiting == 5
        router.sees(second)
        assert list(router.index.ranks) == [second.key]
        assert block_hash(1) not in router.index


async def test_a_lost_event_is_noticed_and_a_dump_mends_it(router: Router) -> None:
    async with Worker(0) as worker:
        router.sees(worker)
        worker.rank.compute(1)
        await router.until(worker, {1})
        lost: list[cache_pb2.CacheFrame] = []

        def loses(frame: cache_pb2.CacheFrame) -> bool:
            if frame.kinds and not lost:
                lost.append(frame)
                return True
            return False

        worker.service.loses = loses  # type: ignore[method-assign]
        worker.rank.compute(2)
        while not lost:
            await asyncio.sleep(0.002)
        worker.rank.compute(3)
        await router.until(worker, {1, 2, 3})
        assert worker.service.num_calls == 2


async def test_a_later_life_takes_nothing_over(router: Router) -> None:
    async with Worker(0, epoch=7) as first, Worker(0, epoch=8) as later:
        first.rank.compute(1)
        router.sees(first)
        await router.until(first, {1})
        router.sees(later)
        await router.until(later, set())
        assert block_hash(1) not in router.index


async def test_streams_of_ranks_that_left_have_ended_when_all_are_closed(router: Router) -> None:
    async with Worker(0) as first, Worker(1) as second:
        first.rank.compute(1)
        router.sees(first, second)
        await router.until(first, {1})
        streams = [task for task in asyncio.all_tasks() if task.get_name().startswith("cache-")]
        assert len(streams) == 2
        router.sees()
        await router.streams.close()
        assert all(stream.done() for stream in streams)


async def test_what_a_rank_held_leaves_the_index_between_requests(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices: list[int] = []
    sweep = router.index.sweep

    def counted(most: int) -> bool:
        slices.append(most)
        return sweep(most)

    monkeypatch.setattr(router.index, "sweep", counted)
    monkeypatch.setattr(cache_streams, "SLICE_BLOCKS", 2)
    async with Worker(0) as worker:
        worker.rank.compute(1, 2, 3, 4, 5)
        router.sees(worker)
        await router.until(worker, {1, 2, 3, 4, 5})
        router.sees()
        assert block_hash(1) not in router.index
        async with asyncio.timeout(60):
            while router.index._ranks_of:
                await asyncio.sleep(0.001)
    assert set(slices) == {2}
    assert len(slices) >= 3


async def test_a_worker_that_is_not_there_yet_is_asked_again(router: Router) -> None:
    async with Worker(0) as worker:
        address = worker.member.address
    worker = Worker(0)
    worker.member = endpoint(Role.PREFILL, 0, key=worker.key, address=address)
    router.sees(worker)
    await asyncio.sleep(0.05)
    server = create_server(CREDENTIALS)
    cache_pb2_grpc.add_CacheServicer_to_server(worker.service, server)
    bind_port(server, Listen(bind="127.0.0.1", port=int(address.split(":")[1])), CREDENTIALS)
    await server.start()
    worker.rank.compute(1)
    async with asyncio.timeout(60):
        while not router.streams.num_known:
            worker.rank.step()
            await asyncio.sleep(0.01)
    assert router.index.blocks(worker.key) == {block_hash(1)}
    await server.stop(0)


def _another_epoch(frame: cache_pb2.CacheFrame) -> None:
    frame.worker.epoch += 1


def _another_worker(frame: cache_pb2.CacheFrame) -> None:
    frame.worker.instance = "prefill-1"


def _huge(frame: cache_pb2.CacheFrame) -> None:
    if frame.dump:
        frame.hashes = bytes(5 << 20)


@pytest.mark.parametrize("change", [_another_epoch, _another_worker, _huge])
async def test_a_worker_that_lies_is_not_believed_and_others_are(
    router: Router, change: Callable[[cache_pb2.CacheFrame], None]
) -> None:
    async with Worker(0) as liar, Worker(1) as honest:
        honest.rank.compute(9)
        liar.rank.compute(1)
        liar.service.change = change  # type: ignore[method-assign]
        router.sees(liar, honest)
        await router.until(honest, {9})
        while not liar.service.num_calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert router.index.blocks(liar.key) == set()
        assert router.index.blocks(honest.key) == {block_hash(9)}
        assert liar.service.num_calls < 10  # it is left alone for a while
        liar.service.change = lambda frame: None  # type: ignore[method-assign]
        await router.until(liar, {1})


async def test_a_defect_of_ours_ends_no_stream_for_good(
    router: Router, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with Worker(0) as worker:
        worker.rank.compute(1)
        router.sees(worker)
        await router.until(worker, {1})

        def fails(*_: object) -> None:
            raise KeyError("a defect")

        with monkeypatch.context() as broken:
            broken.setattr(CacheFollower, "apply", fails)
            worker.rank.compute(2)
            await router.until(worker, set())  # what may be stale is forgotten
        await router.until(worker, {1, 2})
    assert "a defect" in caplog.text


async def test_a_service_of_an_older_worker_is_no_failure(router: Router) -> None:
    server = create_server(CREDENTIALS)
    port = bind_port(server, Listen(bind="127.0.0.1", port=0), CREDENTIALS)
    await server.start()
    member = endpoint(Role.PREFILL, 0, address=f"127.0.0.1:{port}")
    router.pool.update([member])
    router.streams.follow_pool()
    await asyncio.sleep(0.1)
    assert router.streams.num_known == 0
    assert router.index.num_blocks(member.key) == 0
    assert not router.pool.recently_failed(member.key)
    await server.stop(0)


async def test_a_call_without_the_secret_is_refused() -> None:
    async with Worker(0) as worker:
        channel = grpc.aio.insecure_channel(worker.member.address)
        stub = cache_pb2_grpc.CacheStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="secret"):
            async for _ in stub.Follow(cache_pb2.FollowRequest()):
                pass
        await channel.close()
        assert not worker.rank.posted
