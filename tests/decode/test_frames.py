"""Outboxes: one frame a step, bounded memory, and routers that go away."""

from __future__ import annotations

import asyncio

import pytest

from decode import frames
from decode.frames import Delta, Outboxes, StepNews
from runtime.errors import OutOfBlocksError
from runtime.pb import common_pb2
from runtime.sampling import FinishReason, PositionLogprobs
from tests.decode.helpers import FakeClock


def token(request_id: str, index: int) -> Delta:
    return Delta(request_id=request_id, start_index=index, token_ids=(index + 10,))


class Bench:
    def __init__(self, max_pending_deltas: int = 100) -> None:
        self.clock = FakeClock()
        self.lost: list[str] = []
        self.outboxes = Outboxes(
            self.lost.append, self.clock, lost_after_s=5.0, max_pending_deltas=max_pending_deltas
        )


def test_news_are_sorted_by_router() -> None:
    news = StepNews()
    news.add("r0", token("a", 1))
    news.add("r1", token("b", 1))
    news.add("r0", token("c", 4))
    news.drop("r1")
    assert news.take() == {"r0": [token("a", 1), token("c", 4)]}
    assert news.take() == {}


async def test_one_frame_holds_a_step_and_a_slow_reader_gets_several_steps() -> None:
    bench = Bench()
    stream = bench.outboxes.stream("r0")
    assert await anext(stream) == []  # the stream stands
    bench.outboxes.put({"r0": [token("a", 1), token("b", 1)]})
    assert await anext(stream) == [token("a", 1), token("b", 1)]
    bench.outboxes.put({"r0": [token("a", 2)]})
    bench.outboxes.put({"r0": [token("a", 3)], "r1": [token("c", 1)]})
    assert await anext(stream) == [token("a", 2), token("a", 3)]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    bench.outboxes.put({"r0": [token("a", 4)]})
    assert await waiting == [token("a", 4)]
    await stream.aclose()


async def test_a_silent_stream_gets_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "HEARTBEAT_S", 0.01)
    stream = Bench().outboxes.stream("r0")
    assert [await anext(stream) for _ in range(3)] == [[], [], []]
    await stream.aclose()


async def test_what_came_before_the_stream_waits_for_it() -> None:
    bench = Bench()
    bench.outboxes.put({"r0": [token("a", 1)]})
    bench.clock.now += 4.9
    bench.outboxes.sweep()
    stream = bench.outboxes.stream("r0")
    assert await anext(stream) == []
    assert await anext(stream) == [token("a", 1)]
    await stream.aclose()
    assert bench.lost == []


async def test_a_router_without_a_stream_is_lost_after_a_while() -> None:
    bench = Bench()
    bench.outboxes.expect("never")
    stream = bench.outboxes.stream("left")
    await anext(stream)
    bench.clock.now += 100.0
    bench.outboxes.sweep()
    assert bench.lost == ["never"]
    await stream.aclose()
    bench.clock.now += 5.0
    bench.outboxes.sweep()
    bench.outboxes.sweep()
    assert bench.lost == ["never", "left"]
    assert bench.outboxes.num_pending_deltas == 0


async def test_a_reader_that_is_too_slow_is_lost_and_its_stream_ends() -> None:
    bench = Bench(max_pending_deltas=3)
    stream = bench.outboxes.stream("r0")
    await anext(stream)
    bench.outboxes.put({"r0": [token("a", index) for index in range(4)]})
    assert bench.lost == ["r0"]
    assert [deltas async for deltas in stream] == []
    assert bench.outboxes.num_pending_deltas == 0


async def test_a_later_stream_takes_over() -> None:
    bench = Bench()
    old = bench.outboxes.stream("r0")
    await anext(old)
    waiting = asyncio.ensure_future(anext(old, None))
    await asyncio.sleep(0)
    new = bench.outboxes.stream("r0")
    await anext(new)
    assert await waiting is None
    bench.outboxes.put({"r0": [token("a", 1)]})
    assert await anext(new) == [token("a", 1)]
    await new.aclose()


async def test_closing_lets_readers_finish() -> None:
    bench = Bench()
    stream = bench.outboxes.stream("r0")
    await anext(stream)
    bench.outboxes.put({"r0": [token("a", 1)]})
    bench.outboxes.close()
    assert [deltas async for deltas in stream] == [[token("a", 1)]]


def test_a_delta_on_the_wire() -> None:
    delta = Delta(
        request_id="a",
        start_index=3,
        token_ids=(5,),
        logprobs=(PositionLogprobs(-0.5, (5, 6), (-0.5, -1.5)),),
        finish_reason=FinishReason.ERROR,
        error=OutOfBlocksError("no room"),
        timings=common_pb2.Timings(decode_reserve_s=2.0),
        num_cached_tokens=64,
    )
    message = delta.to_proto()
    assert message.error.request_id == "a"
    assert message.error.code == common_pb2.ERROR_CODE_OUT_OF_BLOCKS
    assert message.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert list(message.logprobs[0].top_ids) == [5, 6]
    assert message.timings.decode_reserve_s == 2.0
    assert (message.start_index, list(message.token_ids)) == (3, [5])
