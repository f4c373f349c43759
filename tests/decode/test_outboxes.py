"""Outboxes: one frame a step, bounded memory, routers that go away, and streams that break."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode import outboxes as module
from decode.frames import Delta
from decode.outboxes import Outboxes, SentLimits
from decode.places import Places
from runtime.errors import ErrorCode
from runtime.sampling import FinishReason
from tests.decode.helpers import FakeClock


def token(request_id: str, index: int, finish_reason: FinishReason | None = None) -> Delta:
    return Delta(
        request_id=request_id,
        start_index=index,
        token_ids=(index + 10,),
        finish_reason=finish_reason,
    )


def last(request_id: str, index: int) -> Delta:
    return token(request_id, index, FinishReason.LENGTH)


class Bench:
    def __init__(
        self, max_pending_deltas: int = 1000, limits: SentLimits | None = None, expect: bool = True
    ) -> None:
        self.clock = FakeClock()
        self.lost: list[str] = []
        self.gaps: list[str] = []
        self.places = Places(1000)
        self.outboxes = Outboxes(
            self.lost.append,
            self.clock,
            places=self.places,
            on_gap=self.gaps.append,
            lost_after_s=5.0,
            max_pending_deltas=max_pending_deltas,
            limits=limits,
        )
        if expect:
            for request_id in "ab":
                self.expect(request_id)

    def expect(self, request_id: str, first_index: int = 0, router_id: str = "r0") -> None:
        self.places.take(request_id)
        self.outboxes.expect(router_id, request_id, first_index)

    def put(self, *deltas: Delta) -> None:
        self.outboxes.put({"r0": deltas})

    async def read(self, count: int) -> list[Delta]:
        """The first frames of a new stream, which then breaks."""
        return await self.resume({}, count)

    async def resume(self, points: Mapping[str, int], count: int = 1) -> list[Delta]:
        """The same, of a router that lacks tokens."""
        stream = self.outboxes.stream("r0", points)
        assert await anext(stream) == []  # the stream stands
        deltas = [delta for _ in range(count) for delta in await anext(stream)]
        await stream.aclose()
        return deltas


async def test_one_frame_holds_a_step_and_a_slow_reader_gets_several_steps() -> None:
    bench = Bench()
    bench.expect("c", router_id="r1")
    stream = bench.outboxes.stream("r0")
    assert await anext(stream) == []  # the stream stands
    bench.put(token("a", 1), token("b", 1))
    assert await anext(stream) == [token("a", 1), token("b", 1)]
    bench.put(token("a", 2))
    bench.outboxes.put({"r0": [token("a", 3)], "r1": [token("c", 1)]})
    assert await anext(stream) == [token("a", 2), token("a", 3)]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    bench.put(token("a", 4))
    assert await waiting == [token("a", 4)]
    await stream.aclose()


async def test_a_frame_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FRAME_DELTAS", 2)
    bench = Bench()
    bench.put(*(token("a", index) for index in range(1, 6)))
    stream = bench.outboxes.stream("r0")
    assert [len(await anext(stream)) for _ in range(4)] == [0, 2, 2, 1]
    await stream.aclose()
    stream = bench.outboxes.stream("r0", {"a": 2})
    assert [len(await anext(stream)) for _ in range(3)] == [0, 2, 2]
    await stream.aclose()


async def test_a_silent_stream_gets_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    stream = Bench().outboxes.stream("r0")
    assert [await anext(stream) for _ in range(3)] == [[], [], []]
    await stream.aclose()


async def test_what_came_before_the_stream_waits_for_it() -> None:
    bench = Bench()
    bench.put(token("a", 1))
    bench.clock.now += 4.9
    bench.outboxes.sweep()
    assert await bench.read(1) == [token("a", 1)]
    assert bench.lost == []


async def test_a_router_without_a_stream_is_lost_after_a_while() -> None:
    bench = Bench(expect=False)
    bench.expect("a", router_id="never")
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
    # What the engine loop still says of its requests is heard by nobody, and gives the place back.
    bench.outboxes.put({"never": [last("a", 3)]})
    assert bench.outboxes.num_pending_deltas == 0
    assert len(bench.places) == 0


def test_a_cut_of_a_few_seconds_loses_nobody() -> None:
    assert module.LOST_AFTER_S >= 10.0
    assert module.REPLAY_S > module.LOST_AFTER_S


async def test_a_reader_that_is_too_slow_is_lost_and_its_stream_ends() -> None:
    bench = Bench(max_pending_deltas=3)
    stream = bench.outboxes.stream("r0")
    await anext(stream)
    bench.put(*(token("a", index) for index in range(4)))
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
    bench.put(token("a", 1))
    assert await anext(new) == [token("a", 1)]
    await new.aclose()


async def test_closing_lets_readers_finish() -> None:
    bench = Bench()
    stream = bench.outboxes.stream("r0")
    await anext(stream)
    bench.put(token("a", 1))
    bench.outboxes.close()
    assert [deltas async for deltas in stream] == [[token("a", 1)]]


async def test_what_a_broken_stream_took_with_it_comes_again() -> None:
    bench = Bench()
    bench.put(token("a", 1), token("b", 1), token("a", 2))
    assert len(await bench.read(1)) == 3
    bench.put(token("a", 3))
    # The router has a's first token and none of b's.
    again = await bench.resume({"a": 2, "b": 1}, 2)
    assert again == [token("b", 1), token("a", 2), token("a", 3)]
    assert bench.gaps == []


async def test_the_end_of_a_request_comes_again_and_its_place_is_free() -> None:
    bench = Bench()
    bench.put(token("a", 1), last("a", 2))
    await bench.read(1)
    assert len(bench.places) == 1
    assert await bench.resume({"a": 3}, 1) == [last("a", 2)]


async def test_prefills_token_is_not_ours_to_repeat() -> None:
    """A router that has not heard of prefill yet lacks it, and nothing is lost."""
    bench = Bench(expect=False)
    bench.expect("a", first_index=7)
    bench.put(token("a", 8))
    await bench.read(1)
    assert await bench.resume({"a": 7}, 1) == [token("a", 8)]


async def test_an_unknown_request_ends_with_a_lost_worker() -> None:
    (delta,) = await Bench().resume({"stranger": 4})
    assert (delta.request_id, delta.start_index) == ("stranger", 4)
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error is not None
    assert delta.error.code is ErrorCode.PEER_LOST


@pytest.mark.parametrize(
    "limits", [SentLimits(max_deltas=2), SentLimits(max_bytes=600), SentLimits(keep_s=3.0)]
)
async def test_what_is_kept_is_bounded_and_a_gap_ends_the_request(limits: SentLimits) -> None:
    bench = Bench(limits=limits)
    stream = bench.outboxes.stream("r0")
    await anext(stream)
    for index in range(1, 6):
        bench.put(token("a", index))
        await anext(stream)
        bench.clock.now += 1.0
    bench.outboxes.sweep()
    assert bench.outboxes.num_kept_deltas == 2
    await stream.aclose()
    assert await bench.resume({"a": 4}) == [token("a", 4), token("a", 5)]
    bench.put(token("a", 6), token("b", 1))
    again = await bench.resume({"a": 3, "b": 1}, 2)
    assert [delta.error is not None for delta in again] == [True, False]
    assert again[1] == token("b", 1), "a's news are not wanted any more"
    assert bench.gaps == ["a"]


async def test_a_request_that_ended_long_ago_is_forgotten() -> None:
    bench = Bench()
    silent = Delta(request_id="b", start_index=1, finish_reason=FinishReason.STOP, is_silent=True)
    bench.put(last("a", 1), silent)
    assert await bench.read(1) == [last("a", 1)]
    assert len(bench.places) == 0
    # The router has b's only token from prefill: no news, and no error.
    assert await bench.resume({"a": 1, "b": 0}) == [last("a", 1)]
    bench.clock.now += module.REPLAY_S
    bench.outboxes.sweep()
    assert bench.outboxes.num_kept_deltas == 0
    assert all(delta.error is not None for delta in await bench.resume({"a": 1, "b": 0}))


async def test_a_later_request_of_the_same_id_hears_nothing_of_the_former() -> None:
    bench = Bench()
    bench.put(token("a", 1), last("a", 2))
    await bench.read(1)
    bench.expect("a")
    bench.put(token("a", 1))
    assert await bench.resume({"a": 1}) == [token("a", 1)]


class Router:
    """Its requests and their tokens, as frames bring them; a broken stream loses the last ones."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.tokens: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}
        self.ended: set[str] = set()
        self.unread: list[list[Delta]] = []

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.request_id not in self.tokens or delta.request_id in self.ended:
                continue
            assert delta.error is None
            output = self.tokens[delta.request_id]
            new = self.first[delta.request_id] + 1 + len(output) - delta.start_index
            assert new >= 0, "a gap"
            output += delta.token_ids[new:]
            if delta.finish_reason is not None:
                self.ended.add(delta.request_id)

    @property
    def points(self) -> dict[str, int]:
        return {
            request_id: self.first[request_id] + 1 + len(output)
            for request_id, output in self.tokens.items()
            if request_id not in self.ended
        }


@settings(deadline=None, max_examples=60)
@given(random=st.randoms(use_true_random=True))
def test_whatever_breaks_the_router_has_what_was_generated(random: Random) -> None:
    asyncio.run(_break_streams(random))


async def _break_streams(random: Random) -> None:
    bench = Bench(expect=False)
    router = Router(bench)
    generated: dict[str, list[int]] = {}
    over: set[str] = set()
    stream = bench.outboxes.stream("r0")
    assert await anext(stream) == []
    on_the_wire: list[list[Delta]] = []

    async def connect() -> None:
        nonlocal stream, on_the_wire
        # Some of what was sent arrived before the break, some never does.
        for deltas in on_the_wire[: random.randrange(len(on_the_wire) + 1)]:
            router.take(deltas)
        on_the_wire = []
        if random.random() < 0.5:  # else decode has not noticed yet that the old one broke
            await stream.aclose()
        stream = bench.outboxes.stream("r0", router.points)
        assert await anext(stream) == []

    for step in range(60):
        if random.random() < 0.2:
            request_id, first = f"q{step}", random.randrange(3)
            generated[request_id], router.tokens[request_id] = [], []
            router.first[request_id] = first
            bench.expect(request_id, first)
        live = [request_id for request_id in generated if request_id not in over]
        deltas = []
        for request_id in live:
            output = generated[request_id]
            is_last = random.random() < 0.1
            index = router.first[request_id] + 1 + len(output)
            deltas.append(last(request_id, index) if is_last else token(request_id, index))
            output += deltas[-1].token_ids
            over |= {request_id} if is_last else set()
        bench.put(*deltas)
        while bench.outboxes.num_pending_deltas and random.random() < 0.8:
            on_the_wire.append(await anext(stream))
        if random.random() < 0.2:
            await connect()
        elif on_the_wire and random.random() < 0.7:
            router.take(on_the_wire.pop(0))
        bench.clock.now += random.choice([0.01, 0.5])
        bench.outboxes.sweep()
    await connect()
    bench.outboxes.close()
    async for deltas in stream:
        router.take(deltas)
    assert router.tokens == generated
    assert router.ended == over
    assert len(bench.places) == len(generated) - len(over)
