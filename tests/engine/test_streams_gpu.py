"""The streams of a rank on one GPU: of work beside a step, none is lost, and all ends together."""

from __future__ import annotations

import pytest
import torch

from engine.attention.kv_spec import KVSpec
from engine.graphs.capture import Capture
from engine.memory.kv_pool import KVPool
from engine.memory.pinned_blocks import PinnedBlocks
from engine.side_stream import SideStream
from engine.streams import PRIORITY, Streams, StreamUse

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def streams() -> Streams:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return Streams(torch.device("cuda", torch.cuda.current_device()))


def test_each_use_has_a_stream_of_the_steps_priority(streams: Streams) -> None:
    pool = KVPool(4, 2, 64, KVSpec.shared(64), dtype=torch.bfloat16, device=streams.device)
    SideStream(streams)
    PinnedBlocks(pool, 2, streams)
    PinnedBlocks(pool, 2, streams)
    Capture(streams)
    Capture(streams)
    streams.of(StreamUse.EXPERT_COPIES)
    assert set(streams.uses) == set(StreamUse)
    found = [streams.of(use) for use in StreamUse]
    current = torch.cuda.current_stream()
    assert len({stream.cuda_stream for stream in (*found, current)}) == 1 + len(StreamUse)
    assert {stream.priority for stream in found} == {PRIORITY} == {current.priority}
    assert {stream.device for stream in found} == {streams.device}
    streams.close()
    assert streams.uses == ()


def test_captures_after_one_another_share_a_stream_and_each_computes(streams: Streams) -> None:
    x = torch.randn(1024, device="cuda")
    weight = torch.randn(1024, 1024, device="cuda")
    outs = [torch.empty_like(x) for _ in range(3)]

    def product(out: torch.Tensor, factor: float) -> None:
        torch.mv(weight, factor * x, out=out)

    graphs = [
        Capture(streams).graph(lambda out=out, factor=index + 1.0: product(out, factor))
        for index, out in enumerate(outs)
    ]
    x.copy_(torch.randn(1024, device="cuda"))
    for out in outs:
        out.zero_()
    for graph in graphs:
        graph.replay()
    for index, out in enumerate(outs):
        torch.testing.assert_close(out, torch.mv(weight, (index + 1.0) * x))
    streams.close()


def test_the_end_waits_for_work_that_nobody_waited_for(streams: Streams) -> None:
    side = SideStream(streams)
    x = torch.randn(4096, device="cuda")

    def slow() -> torch.Tensor:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        return x * 2

    started = side.start(slow)
    event = streams.of(StreamUse.SHARED_EXPERT).record_event()
    assert not event.query()
    streams.close()
    assert event.query()
    assert torch.equal(started.value, x * 2)
