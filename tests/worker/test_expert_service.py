"""A recording over real gRPC: windows while the call lasts, nothing before, nothing behind."""

from __future__ import annotations

import asyncio

import grpc.aio
import numpy as np
import pytest

from engine.experts.counted import CountedExperts
from runtime.pb import common_pb2
from tests.engine.tiny import TINY
from tests.worker.counted_rank import EXPERTS, WORKER, Rank, make_experts, served
from worker import expert_load


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> CountedExperts:
    return make_experts(tmp_path_factory.mktemp("checkpoint"))


async def test_windows_come_while_the_call_lasts(experts: CountedExperts) -> None:
    rank = Rank(experts)
    rank.step({(1, 0): 1000})  # before anybody asks
    async with served(rank.feed) as record, asyncio.timeout(20):
        frames = aiter(record(every=2, num_windows=2))
        model = (await anext(frames)).model
        assert (model.worker, model.role, model.name) == (WORKER, common_pb2.ROLE_DECODE, "tiny")
        assert list(model.layers) == [1, 2]
        assert (model.num_experts, model.top_k) == (EXPERTS, TINY["num_experts_per_tok"])
        assert (model.num_endpoints, model.num_slots) == (2, EXPERTS + 1)
        table = np.frombuffer(model.placement, dtype="<i4").reshape(2, EXPERTS + 1)
        assert table.tolist() == [list(row) for row in experts.placements.table]
        assert model.expert_bytes == 4 * 3 * TINY["hidden_size"] * TINY["moe_intermediate_size"]
        for _ in range(2):
            rank.step({(1, 3): 2, (2, 5): 1})
        rank.step({(1, 3): 1})
        rank.step({})
        rank.step({})
        windows = [frame.window async for frame in frames]
        assert [(window.first_pass, window.end_pass) for window in windows] == [(2, 4), (4, 6)]
        counts = [np.frombuffer(window.counts, dtype="<i8").reshape(2, -1) for window in windows]
        assert [each.sum() for each in counts] == [4, 0]
        assert (counts[0][0, 3], counts[0][1, 5]) == (3, 1)


async def test_nothing_is_read_when_the_call_has_ended(experts: CountedExperts) -> None:
    rank = Rank(experts)
    assert rank.feed is not None
    async with served(rank.feed) as record, asyncio.timeout(20):
        call = record()
        frames = aiter(call)
        await anext(frames)
        rank.step({(1, 0): 1})
        assert (await anext(frames)).window.end_pass == 1
        call.cancel()
        while rank.feed.windows.num_followers:
            await asyncio.sleep(0.01)


async def test_a_dense_model_has_nothing_to_record() -> None:
    async with served(Rank(None).feed) as record:
        with pytest.raises(grpc.aio.AioRpcError, match="'tiny' has no experts"):
            await anext(aiter(record()))


async def test_a_window_of_no_passes_is_refused(experts: CountedExperts) -> None:
    async with served(Rank(experts).feed) as record:
        with pytest.raises(grpc.aio.AioRpcError, match="passes_per_window is 0"):
            await anext(aiter(record(every=0)))


async def test_who_reads_too_slowly_is_told_and_not_lied_to(
    experts: CountedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_load, "MAX_BYTES_BEHIND", 100)
    rank = Rank(experts)
    async with served(rank.feed) as record, asyncio.timeout(20):
        frames = aiter(record())
        await anext(frames)
        for _ in range(50):
            rank.step({})
        with pytest.raises(grpc.aio.AioRpcError, match="more passes a window"):
            async for _ in frames:
                pass
