"""A stream of tokens that breaks: what is missing is asked for, and nothing ends silently."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import aiohttp
import grpc
import grpc.aio
import pytest

from router.pool.members import Member, Role, WorkerKey, WorkerLoad
from router.requests import frames as frames_module
from router.requests.frames import FrameStream
from runtime.errors import ErrorCode, TandemError
from runtime.pb import common_pb2, decode_pb2, registry_pb2
from tests.router.conftest import ANSWER, MODEL, Cluster, StartRouter
from tests.router.fakes import FakeDecode
from tests.tcp_proxy import Proxy
from tests.waiting import until

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 100}
KEY = WorkerKey("decode-0", 1, 0)
IDENTITY = common_pb2.WorkerIdentity(instance="decode-0", epoch=1)


async def answer(http: aiohttp.ClientSession) -> tuple[int, str]:
    async with http.post("/v1/completions", json=BODY) as response:
        body = await response.json()
        if response.status == 200:
            return 200, body["choices"][0]["text"]
        return response.status, body["error"]["message"]


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
async def test_a_stream_that_is_cut_goes_on(http, cluster: Cluster, num_tokens: int) -> None:
    """Decode has every token: none is computed again."""
    cluster.decode.cut_after = num_tokens
    assert await answer(http) == (200, ANSWER)
    assert len(cluster.decode.seen) == len(cluster.prefill.seen) == 1
    assert [point.next_index for point in cluster.decode.resumed] == [num_tokens]
    assert cluster.decode.num_streams_ever == 2


async def test_a_stream_that_is_cut_while_prefill_computes_goes_on(http, cluster: Cluster) -> None:
    cluster.prefill.holds_runs = True
    task = asyncio.create_task(answer(http))
    await until(lambda: len(cluster.prefill.seen) == 1)
    await until(lambda: len(cluster.decode.requests) == 1)
    cluster.decode.cut_streams()
    await until(lambda: cluster.decode.num_streams_ever == 2)
    cluster.prefill.go_on.set()
    assert await asyncio.wait_for(task, 60) == (200, ANSWER)
    assert len(cluster.decode.seen) == 1
    assert [point.next_index for point in cluster.decode.resumed] == [1]


async def test_a_connection_that_is_cut_costs_no_request(
    start_router: StartRouter,
) -> None:
    cluster = await start_router()
    await cluster.add_prefill()
    proxy = Proxy()
    decode = await cluster.add_decode(proxy=proxy)
    await until(lambda: decode.num_streams > 0)
    decode.hold_after = 3
    async with aiohttp.ClientSession(cluster.url) as http:
        tasks = [asyncio.create_task(answer(http)) for _ in range(20)]
        await until(lambda: len(decode.requests) == 20)
        await until(lambda: all(len(r.sent) == 2 for r in decode.requests.values()))
        await proxy.cut()
        await until(lambda: decode.num_streams_ever == 2)
        decode.go_on.set()
        assert [await task for task in tasks] == [(200, ANSWER)] * 20
    assert len(decode.seen) == 20
    await proxy.close()


async def lose_in_the_middle(cluster: Cluster, lose: Callable[[FakeDecode], None]) -> None:
    """What became of a worker after four tokens costs nothing: another one goes on with them."""
    await cluster.add_prefill()
    first = await cluster.add_decode()
    await until(lambda: first.num_streams > 0)
    first.hold_after = 4
    async with aiohttp.ClientSession(cluster.url) as http:
        task = asyncio.create_task(answer(http))
        await until(lambda: any(len(r.sent) == 3 for r in first.requests.values()))
        other = await cluster.add_decode("decode-1")
        lose(first)
        assert await asyncio.wait_for(task, 60) == (200, ANSWER)
    assert [request.num_output_tokens for request in other.seen] == [4]


async def test_a_worker_that_refuses_streams_is_lost_at_once(start_router: StartRouter) -> None:
    cluster = await start_router(resume_timeout_s=600.0)

    def refuse(first: FakeDecode) -> None:
        first.refuses_streams = True
        first.cut_streams()

    await lose_in_the_middle(cluster, refuse)


async def test_a_stream_that_does_not_stand_again_in_time_is_lost(
    start_router: StartRouter,
) -> None:
    cluster = await start_router(resume_timeout_s=0.3)

    def hang(first: FakeDecode) -> None:
        first.hangs_streams = True
        first.cut_streams()

    await lose_in_the_middle(cluster, hang)


async def test_a_worker_that_falls_silent_is_left(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection stands, and so do its keepalives: its event loop hangs."""
    monkeypatch.setattr(frames_module, "LISTEN_S", 0.5)
    cluster = await start_router(resume_timeout_s=0.3)

    def fall_silent(first: FakeDecode) -> None:
        first.is_silent = first.hangs_streams = True

    await lose_in_the_middle(cluster, fall_silent)


async def test_what_decode_cannot_continue_moves(http, cluster: Cluster) -> None:
    cluster.decode.hold_after = 4
    task = asyncio.create_task(answer(http))
    await until(lambda: any(len(r.sent) == 3 for r in cluster.decode.requests.values()))
    other = await cluster.add_decode("decode-1")
    cluster.decode.requests.clear()
    cluster.decode.cut_streams()
    cluster.decode.hold_after = 0
    assert await asyncio.wait_for(task, 60) == (200, ANSWER)
    assert [request.num_output_tokens for request in other.seen] == [4]


async def test_a_finish_reason_of_a_newer_version_fails_its_request_alone(
    http, cluster: Cluster
) -> None:
    cluster.decode.hold_after = 3
    whole = asyncio.create_task(answer(http))
    await until(lambda: any(r.sent for r in cluster.decode.requests.values()))
    request_id, reserved = next(iter(cluster.decode.requests.items()))
    strange = asyncio.create_task(answer(http))
    await until(lambda: len(cluster.decode.requests) == 2)
    other = next(name for name in cluster.decode.requests if name != request_id)
    delta = decode_pb2.TokenDelta(request_id=other, finish_reason=77)  # type: ignore[arg-type]
    cluster.decode.send(reserved.request.router_id, [delta])
    status, message = await asyncio.wait_for(strange, 60)
    assert (status, "finish_reason = 77 is unknown" in message) == (500, True)
    cluster.decode.go_on.set()
    assert await asyncio.wait_for(whole, 60) == (200, ANSWER)
    assert cluster.decode.num_streams_ever == 1


class ScriptedStub:
    """Streams as the test writes them, one a call; the last one stays open."""

    def __init__(self, *streams: Callable[[], AsyncIterator[decode_pb2.Frame]]) -> None:
        self.streams = list(streams)
        self.requests: list[decode_pb2.FramesRequest] = []

    def Frames(self, request: decode_pb2.FramesRequest) -> object:
        self.requests.append(request)
        stream = self.streams.pop(0) if self.streams else standing_forever
        return ScriptedCall(stream())


class ScriptedCall:
    def __init__(self, frames: AsyncIterator[decode_pb2.Frame]) -> None:
        self._frames = frames

    def __aiter__(self) -> AsyncIterator[decode_pb2.Frame]:
        return self._frames

    def cancel(self) -> None:
        """Nothing is on a wire."""


async def standing_forever() -> AsyncIterator[decode_pb2.Frame]:
    yield decode_pb2.Frame(decode=IDENTITY)
    await asyncio.Event().wait()


def frame_of(*request_ids: str, epoch: int = 1) -> decode_pb2.Frame:
    identity = common_pb2.WorkerIdentity(instance="decode-0", epoch=epoch)
    deltas = [decode_pb2.TokenDelta(request_id=request_id) for request_id in request_ids]
    return decode_pb2.Frame(decode=identity, deltas=deltas, load=registry_pb2.WorkerLoad())


class Sink:
    """Counts; a bad one cannot be told anything."""

    def __init__(self, *, is_bad: bool = False) -> None:
        self.is_bad = is_bad
        self.num_deltas = 0
        self.tokens: list[tuple[int, list[int]]] = []
        self.lost: list[TandemError] = []
        self.next_index: int | None = 3

    def on_token(self, index: int, token_id: int, now: float) -> None:
        self.on_tokens(index, [token_id], now, 0)

    def on_tokens(
        self, start_index: int, token_ids: list[int], now: float, num_drafts: int
    ) -> None:
        if self.is_bad:
            raise ZeroDivisionError
        self.tokens.append((start_index, token_ids))

    def on_delta(self, delta: decode_pb2.TokenDelta) -> None:
        if self.is_bad:
            raise ZeroDivisionError
        self.num_deltas += 1

    def on_lost(self, error: TandemError) -> None:
        self.lost.append(error)
        if self.is_bad:
            raise ZeroDivisionError


def open_stream(
    stub: ScriptedStub, on_load: Callable[[WorkerKey, WorkerLoad], None] = lambda *_: None
) -> FrameStream:
    member = Member(
        key=KEY,
        role=Role.DECODE,
        address="127.0.0.1:1",
        num_ranks=1,
        model=MODEL,
        max_model_len=64,
        layout_fingerprint="",
        transport="loopback",
    )
    return FrameStream(
        member,
        stub,  # type: ignore[arg-type]
        "router-1",
        row_ids=itertools.count(1),
        resume_timeout_s=30.0,
        on_load=on_load,
        on_loss=lambda *_: None,
    )


async def test_a_sink_that_fails_is_its_own_end_only() -> None:
    go_on = asyncio.Event()

    async def frames() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of()
        await go_on.wait()
        yield frame_of("bad", "good")
        yield frame_of("bad", "good")
        await asyncio.Event().wait()

    stream = open_stream(ScriptedStub(frames))
    await stream.standing()
    bad, good = Sink(is_bad=True), Sink()
    stream.attach("bad", bad)
    stream.attach("good", good)
    go_on.set()
    await until(lambda: good.num_deltas == 2)
    assert [error.code for error in bad.lost] == [ErrorCode.INTERNAL]
    assert (good.lost, stream.stands) == ([], True)
    await stream.close("over")
    assert [error.code for error in good.lost] == [ErrorCode.PEER_LOST]


Row = tuple[int, int, list[int]]


def rows_of(*rows: Row) -> decode_pb2.Frame:
    """(row id, index of the first token, tokens)."""
    sizes = [len(token_ids) for _, _, token_ids in rows]
    return decode_pb2.Frame(
        decode=IDENTITY,
        rows=decode_pb2.TokenRows(
            row_ids=[row_id for row_id, _, _ in rows],
            start_indexes=[index for _, index, _ in rows],
            num_tokens=sizes if sizes != [1] * len(rows) else [],
            token_ids=[token_id for _, _, token_ids in rows for token_id in token_ids],
        ),
    )


@pytest.mark.parametrize("has_several", [False, True])
async def test_a_row_reaches_its_request_and_fails_alone(has_several: bool) -> None:
    go_on = asyncio.Event()
    names = ("good", "bad", "gone", "other")
    sinks = {name: Sink(is_bad=name == "bad") for name in names}
    row_ids: dict[str, int] = {}

    async def frames() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of()
        await go_on.wait()
        tokens = [70, 71] if has_several else [70]
        of = row_ids
        yield rows_of((of["bad"], 4, [5]), (of["gone"], 4, [6]), (of["good"], 4, tokens))
        yield rows_of(
            (of["bad"], 5, [5]), (of["good"], 9, [8]), (999, 1, [2]), (of["other"], 3, [1])
        )
        await asyncio.Event().wait()

    stream = open_stream(ScriptedStub(frames))
    await stream.standing()
    row_ids |= {name: stream.attach(name, sink) for name, sink in sinks.items()}
    assert len(set(row_ids.values())) == 4
    stream.detach("gone")
    go_on.set()
    await until(lambda: bool(sinks["other"].tokens))
    assert sinks["other"].tokens == [(3, [1])]
    assert sinks["good"].tokens == [(4, [70, 71] if has_several else [70]), (9, [8])]
    assert [error.code for error in sinks["bad"].lost] == [ErrorCode.INTERNAL]
    assert (sinks["gone"].tokens, stream.num_attached, stream.stands) == ([], 2, True)
    await stream.close("over")


@pytest.mark.parametrize(
    "rows",
    [
        decode_pb2.TokenRows(row_ids=[1, 2], start_indexes=[3], token_ids=[4, 5]),
        decode_pb2.TokenRows(row_ids=[1, 1], start_indexes=[3, 4], token_ids=[4]),
        decode_pb2.TokenRows(row_ids=[1], start_indexes=[3], token_ids=[4], num_tokens=[2]),
        decode_pb2.TokenRows(row_ids=[1], start_indexes=[3], token_ids=[4], num_tokens=[1, 0]),
    ],
)
async def test_columns_that_do_not_fit_together_reach_nobody(rows: decode_pb2.TokenRows) -> None:
    go_on = asyncio.Event()

    async def frames() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of()
        await go_on.wait()
        yield decode_pb2.Frame(decode=IDENTITY, rows=rows)

    stub = ScriptedStub(frames)
    stream = open_stream(stub)
    await stream.standing()
    sink = Sink()
    assert stream.attach("r", sink) == 1
    go_on.set()
    await until(lambda: len(stub.requests) == 2 and stream.stands)
    assert (sink.tokens, sink.lost, stream.num_breaks) == ([], [], 1)
    await stream.close("over")


@pytest.mark.parametrize("cause", ["a bug", "a closed channel", "an end", "an error"])
async def test_whatever_ends_a_stream_it_is_opened_again(cause: str) -> None:
    go_on = asyncio.Event()

    async def frames() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of()
        await go_on.wait()
        if cause == "a closed channel":
            raise asyncio.CancelledError
        if cause == "an error":
            meta = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, meta, meta, details="RST_STREAM")
        if cause == "a bug":
            yield frame_of()

    loads = 0

    def on_load(*_: object) -> None:
        nonlocal loads
        loads += 1
        if loads == 2 and cause == "a bug":
            raise ZeroDivisionError

    stub = ScriptedStub(frames)
    stream = open_stream(stub, on_load)
    await stream.standing()
    sink = Sink()
    stream.attach("r", sink)
    go_on.set()
    await until(lambda: len(stub.requests) == 2 and stream.stands)
    (point,) = stub.requests[1].resume
    assert (point.request_id, point.next_index) == ("r", 3)
    assert (sink.lost, stream.num_breaks) == ([], 1)
    await stream.close("over")


async def test_another_life_behind_the_address_is_a_loss_at_once() -> None:
    go_on = asyncio.Event()

    async def first() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of()
        await go_on.wait()

    async def second() -> AsyncIterator[decode_pb2.Frame]:
        yield frame_of(epoch=2)

    stream = open_stream(ScriptedStub(first, second))
    await stream.standing()
    sink = Sink()
    stream.attach("r", sink)
    go_on.set()
    await until(lambda: bool(sink.lost))
    assert "was replaced behind" in sink.lost[0].message
    await stream.close("over")


async def test_a_sink_that_fails_twice_leaves_the_others_their_loss() -> None:
    stream = open_stream(ScriptedStub())
    await stream.standing()
    bad, good = Sink(is_bad=True), Sink()
    stream.attach("bad", bad)
    stream.attach("good", good)
    await stream.close("over")
    assert len(bad.lost) == len(good.lost) == 1
