"""Ranks that count what they are told, and tell it over real gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import torch

from engine.boot.build import build_model
from engine.boot.experts import counted_experts, place_experts
from engine.experts.counted import CountedExperts
from engine.options import ChunkSteps, EngineOptions, KVOptions
from engine.parallel.dims import ParallelDims
from runtime.net.credentials import Credentials, Listen
from runtime.pb import experts_pb2, experts_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server, open_channel
from runtime.rpc.wire import identity
from tests.engine.tiny import TINY, tiny_config, write_checkpoint
from worker.expert_load import ExpertLoadFeed, open_expert_load, told_of
from worker.expert_service import add_experts

CREDENTIALS = Credentials.of_secret("test-secret")
WORKER = identity("decode-0", 7, 1)
EXPERTS = TINY["n_routed_experts"]
OPTIONS: Any = SimpleNamespace(
    role="decode", served_name="tiny", section=SimpleNamespace(num_endpoints=2)
)


def make_experts(folder: Path) -> CountedExperts:
    """Those of the tiny model, one of them in two slots."""
    model = build_model(write_checkpoint(folder, tiny_config()))
    options = EngineOptions(
        steps=ChunkSteps(max_num_batched_tokens=64),
        kv=KVOptions(num_blocks=8, block_size=4),
        num_redundant_experts=1,
    )
    placements = place_experts(options, model.config, ParallelDims(), torch.device("cpu"))
    counted = counted_experts(model, placements)
    assert counted is not None
    return counted


class Rank:
    """An engine loop that runs what is posted at once, and steps when it is told to."""

    def __init__(self, experts: CountedExperts | None) -> None:
        self.feed = open_expert_load(experts, lambda work: work())
        self.passed = told_of(self.feed)

    @property
    def num_followers(self) -> int:
        """Who record."""
        return self.feed.windows.num_followers if self.feed else 0

    def step(self, counts: dict[tuple[int, int], int]) -> None:
        """Tokens by layer and expert."""
        assert self.feed is not None
        for (layer, expert), number in counts.items():
            self.feed.experts.counter.bins(layer)[expert] += number
        self.passed()


Record = Callable[..., grpc.aio.UnaryStreamCall]  # type: ignore[type-arg]


@contextlib.asynccontextmanager
async def listening(feed: ExpertLoadFeed | None) -> AsyncIterator[str]:
    """Its address."""
    server = create_server(CREDENTIALS)
    add_experts(server, WORKER, OPTIONS, feed)
    port = bind_port(server, Listen(bind="127.0.0.1", port=0), CREDENTIALS)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def served(feed: ExpertLoadFeed | None) -> AsyncIterator[Record]:
    """What calls it."""
    async with listening(feed) as address, open_channel(address, CREDENTIALS) as channel:
        stub = experts_pb2_grpc.ExpertsStub(channel)

        def record(every: int = 1, num_windows: int = 0) -> object:
            return stub.Record(
                experts_pb2.RecordRequest(passes_per_window=every, num_windows=num_windows)
            )

        yield record
