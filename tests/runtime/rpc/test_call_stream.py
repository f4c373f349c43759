"""Calls that share a connection are what unary calls are: over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio
import pytest

from runtime.net.credentials import Credentials, Listen
from runtime.pb import common_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc import call_stream
from runtime.rpc.call_connection import greeting
from runtime.rpc.call_server import CallServer, CarriedContext, CarriedMethod
from runtime.rpc.call_stream import MAX_CARRIED_BYTES, CallStream, Method
from runtime.rpc.grpc_calls import (
    WORKER_LIMITS,
    bind_port,
    create_server,
    open_channel,
)
from runtime.trace.context import TraceContext, trace_id, use_trace
from tests.router.fakes import CREDENTIALS
from tests.tcp_proxy import Proxy
from tests.waiting import until

Code = grpc.StatusCode


@dataclass
class Peer(prefill_pb2_grpc.PrefillServicer):
    """Answers with what was sent; names say how."""

    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    alone: list[str] = field(default_factory=list)
    """Calls that came by themselves."""
    carried: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    traces: dict[str, str] = field(default_factory=dict)
    server: grpc.aio.Server | None = None
    port: int = 0
    calls: CallServer | None = None
    calls_port: int = 0

    async def start(
        self,
        *,
        carries: bool = True,
        max_calls: int = 1000,
        credentials: Credentials = CREDENTIALS,
    ) -> None:
        self.server = create_server(credentials)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)
        if carries:
            limits = replace(WORKER_LIMITS, max_concurrent_rpcs=max_calls)
            self.calls = CallServer(credentials, limits)
            run = CarriedMethod(prefill_pb2.RunRequest.FromString, self.Run)
            self.calls.carry("Prefill", Run=run)
            self.calls_port = self.calls.start(Listen(bind="127.0.0.1", port=self.calls_port))
        listen = Listen(bind="127.0.0.1", port=self.port)
        self.port = bind_port(self.server, listen, credentials)
        await self.server.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        assert self.server is not None
        await self.server.stop(None)
        if self.calls is not None:
            await self.calls.stop(grace_s)

    async def Run(self, request: prefill_pb2.RunRequest, context: object):
        name = request.request_id
        (self.carried if isinstance(context, CarriedContext) else self.alone).append(name)
        self.traces[name] = trace_id()
        if name == "fails":
            raise KeyError("a fault of the peer")
        if name == "aborts":
            assert isinstance(context, CarriedContext)
            await context.abort(Code.FAILED_PRECONDITION, "not now")
        if name.startswith("waits"):
            try:
                await self.go_on.wait()
            except asyncio.CancelledError:
                self.cancelled.append(name)
                raise
        first = prefill_pb2.FirstToken(
            token_id=len(request.cache_salt), index=request.num_output_tokens
        )
        if name == "echo":
            echo = common_pb2.Error(message=request.cache_salt)
            return prefill_pb2.RunResponse(error=echo)
        return prefill_pb2.RunResponse(first_token=first)


@dataclass
class Line:
    """A stream to a peer."""

    peer: Peer
    channel: grpc.aio.Channel
    stream: CallStream
    method: Method[prefill_pb2.RunResponse]

    @classmethod
    def to(cls, peer: Peer, calls_port: int = 0, *, credentials: Credentials = CREDENTIALS) -> Line:
        channel = open_channel(f"127.0.0.1:{peer.port}", credentials)
        alone = prefill_pb2_grpc.PrefillStub(channel).Run
        method = Method("Run", prefill_pb2.RunResponse.FromString, alone)
        port = calls_port or peer.calls_port
        stream = CallStream(f"127.0.0.1:{port}" if port else "", credentials)
        return cls(peer, channel, stream, method)

    def run(self, name: str, index: int = 0, *, size: int = 0, timeout: float | None = None):
        request = prefill_pb2.RunRequest(
            request_id=name, num_output_tokens=index, cache_salt="x" * size
        )
        return self.stream.start(self.method, request, timeout)

    async def close(self) -> None:
        await self.stream.close()
        await self.channel.close(None)


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    peer = Peer()
    await peer.start()
    line = Line.to(peer)
    yield line
    await line.close()
    await peer.stop()


async def code_of(call: asyncio.Future[prefill_pb2.RunResponse]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_every_call_has_its_own_answer(line: Line) -> None:
    calls = [line.run(f"r{number}", number) for number in range(500)]
    answers = await asyncio.gather(*calls)
    assert [answer.first_token.index for answer in answers] == list(range(500))
    assert len(line.peer.carried) == 500
    assert line.peer.alone == []


async def test_a_quick_answer_overtakes_a_slow_one(line: Line) -> None:
    slow = line.run("waits")
    await line.run("quick")
    assert not slow.done()
    line.peer.go_on.set()
    await slow


async def test_a_failure_is_of_its_call_alone(line: Line) -> None:
    fails, aborts, works = line.run("fails"), line.run("aborts"), line.run("works", 7)
    assert await code_of(fails) is Code.UNKNOWN
    assert await code_of(aborts) is Code.FAILED_PRECONDITION
    assert (await works).first_token.index == 7


async def test_a_method_that_the_peer_lacks_is_unimplemented(line: Line) -> None:
    method = Method("Walk", prefill_pb2.RunResponse.FromString, line.method.alone)
    call = line.stream.start(method, prefill_pb2.RunRequest())
    assert await code_of(call) is Code.UNIMPLEMENTED
    await line.run("works")
    assert line.peer.carried == ["works"]


async def test_who_stops_waiting_cancels_the_call_at_the_peer(line: Line) -> None:
    async def wait() -> None:
        await line.run("waits")

    task = asyncio.create_task(wait())
    await until(lambda: line.peer.carried == ["waits"])
    task.cancel()
    await until(lambda: line.peer.cancelled == ["waits"])
    await line.run("works")


async def test_a_call_that_is_cancelled_before_it_is_sent_never_is(line: Line) -> None:
    line.run("gone").cancel()
    await line.run("works")
    assert line.peer.carried == ["works"]


async def test_a_call_whose_time_is_over_fails_and_is_cancelled_there(line: Line) -> None:
    assert await code_of(line.run("waits", timeout=0.05)) is Code.DEADLINE_EXCEEDED
    await until(lambda: line.peer.cancelled == line.peer.carried)


@pytest.mark.parametrize("carries", [True, False])
async def test_calls_carry_the_trace_of_who_makes_them(carries: bool) -> None:
    peer = Peer()
    await peer.start(carries=carries)
    line = Line.to(peer)
    traces = [TraceContext.begin() for _ in range(2)]
    calls = [line.run("none")]
    for trace in traces:
        with use_trace(trace):
            calls.append(line.run(trace.trace_id))
    await asyncio.gather(*calls)
    assert peer.traces == {"none": "", **{t.trace_id: t.trace_id for t in traces}}
    await line.close()
    await peer.stop()


async def test_a_long_request_has_a_call_of_its_own(line: Line) -> None:
    long, short = line.run("long", size=MAX_CARRIED_BYTES), line.run("short")
    assert (await long).first_token.token_id == MAX_CARRIED_BYTES
    await short
    assert (line.peer.alone, line.peer.carried) == (["long"], ["short"])


async def test_one_that_is_too_long_is_refused_and_nothing_else_is(line: Line) -> None:
    waits, long = line.run("waits"), line.run("long", size=5 * 2**20)
    assert await code_of(long) is Code.RESOURCE_EXHAUSTED
    line.peer.go_on.set()
    await waits


async def test_a_long_call_is_cancelled_and_ends_in_time_as_others_do(line: Line) -> None:
    call = line.run("waits-a", size=MAX_CARRIED_BYTES)
    await until(lambda: line.peer.alone == ["waits-a"])
    call.cancel()
    await until(lambda: line.peer.cancelled == ["waits-a"])
    late = line.run("waits-b", size=MAX_CARRIED_BYTES, timeout=0.05)
    assert await code_of(late) is Code.DEADLINE_EXCEEDED
    await until(lambda: line.peer.cancelled[1:] == line.peer.alone[1:])


async def test_more_than_one_message_holds_is_sent_in_several(line: Line) -> None:
    size = MAX_CARRIED_BYTES - 100
    calls = [line.run(f"r{number}", number, size=size) for number in range(100)]  # 6.4 MB
    answers = await asyncio.gather(*calls)
    assert [answer.first_token.index for answer in answers] == list(range(100))
    assert line.peer.alone == []


async def test_beyond_the_calls_at_once_one_is_an_overload() -> None:
    peer = Peer()
    await peer.start(max_calls=2)
    line = Line.to(peer)
    held = [line.run(f"waits{number}") for number in range(2)]
    assert await code_of(line.run("more")) is Code.RESOURCE_EXHAUSTED
    peer.go_on.set()
    await asyncio.gather(*held)
    await line.run("more")
    await line.close()
    await peer.stop()


async def test_a_peer_of_an_earlier_version_is_called_for_each() -> None:
    peer = Peer()
    await peer.start(carries=False)
    line = Line.to(peer)
    calls = [line.run(f"r{number}", number) for number in range(3)]
    gone = line.run("gone")
    gone.cancel()
    assert [(await call).first_token.index for call in calls] == [0, 1, 2]
    await line.run("later")
    assert sorted(peer.alone) == ["later", "r0", "r1", "r2"]
    await line.close()
    await peer.stop()


async def test_without_a_peer_calls_fail_at_once_and_one_that_comes_is_reached() -> None:
    peer = Peer()
    await peer.start()
    await peer.stop()
    line = Line.to(peer)
    for _ in range(2):
        assert await code_of(line.run("early")) is Code.UNAVAILABLE
    await peer.start()

    async def reached() -> bool:
        try:
            await line.run("late")
        except grpc.aio.AioRpcError:
            return False
        return True

    async with asyncio.timeout(60):
        while not await reached():
            await asyncio.sleep(0.05)
    await line.close()
    await peer.stop()


async def test_a_connection_that_breaks_fails_what_is_under_way_and_the_next_call_has_another() -> (
    None
):
    peer = Peer()
    await peer.start()
    proxy = Proxy()
    line = Line.to(peer, await proxy.start(peer.calls_port))
    calls = [line.run("waits-a"), line.run("waits-b")]
    await until(lambda: len(peer.carried) == 2)
    await proxy.cut()
    assert [await code_of(call) for call in calls] == [Code.UNAVAILABLE] * 2
    await until(lambda: sorted(peer.cancelled) == ["waits-a", "waits-b"])
    await line.run("works")
    await line.close()
    await peer.stop()
    await proxy.close()


async def test_closing_cancels_what_is_under_way_at_both_ends(line: Line) -> None:
    call = line.run("waits")
    await until(lambda: line.peer.carried == ["waits"])
    await line.stream.close()
    assert call.cancelled()
    await until(lambda: line.peer.cancelled == ["waits"])
    await line.channel.close(None)
    with pytest.raises(grpc.aio.UsageError):
        await line.run("late")
    assert line.peer.carried == ["waits"]


async def test_a_peer_that_ends_fails_its_calls(line: Line) -> None:
    call = line.run("waits")
    await until(lambda: line.peer.carried == ["waits"])
    await line.peer.stop()
    assert await code_of(call) is Code.UNAVAILABLE
    await until(lambda: line.peer.cancelled == ["waits"])


async def test_a_peer_that_ends_answers_what_ends_in_time_and_takes_nothing_new(line: Line) -> None:
    waits = line.run("waits")
    await until(lambda: line.peer.carried == ["waits"])
    assert line.peer.calls is not None
    [caller] = line.peer.calls._callers
    stopping = asyncio.create_task(line.peer.calls.stop(60.0))
    await until(lambda: caller._is_stopping)
    assert await code_of(line.run("late")) is Code.UNAVAILABLE
    line.peer.go_on.set()
    await waits
    await stopping
    assert line.peer.carried == ["waits"]


async def test_where_its_port_cannot_be_reached_each_call_goes_by_itself() -> None:
    peer = Peer()
    await peer.start()
    assert peer.calls is not None
    await peer.calls.stop(0.0)
    line = Line.to(peer)
    calls = [line.run(f"r{number}", number) for number in range(3)]
    assert [(await call).first_token.index for call in calls] == [0, 1, 2]
    await line.run("later")
    assert sorted(peer.alone) == ["later", "r0", "r1", "r2"]
    await line.close()
    await peer.stop()


@pytest.mark.parametrize("says", ["nothing", "the end"])
async def test_a_connection_that_ends_before_it_was_accepted_has_lost_no_call(
    monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.setattr(call_stream, "CONNECT_S", 0.1 if says == "nothing" else 60.0)
    heard = bytearray()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(2**16))
        if says == "the end":
            writer.transport.abort()
        heard.extend(await reader.read(2**16))
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    peer = Peer()
    await peer.start()
    line = Line.to(peer, server.sockets[0].getsockname()[1])
    calls = [line.run(f"r{number}", number) for number in range(3)]
    assert [(await call).first_token.index for call in calls] == [0, 1, 2]
    assert sorted(peer.alone) == ["r0", "r1", "r2"]
    assert bytes(heard[4:]) == greeting(CREDENTIALS.secret)
    await line.close()
    server.close()
    await peer.stop()


async def test_a_caller_without_the_secret_is_told_so() -> None:
    peer = Peer()
    await peer.start()
    line = Line.to(peer, credentials=Credentials.of_secret("another"))
    for _ in range(2):
        assert await code_of(line.run("early")) is Code.UNAUTHENTICATED
    assert peer.carried == peer.alone == []
    await line.close()
    await peer.stop()


async def test_answers_that_nobody_takes_hold_up_further_calls(line: Line) -> None:
    await line.run("works")
    connection = line.stream._connection
    assert connection is not None
    connection.pause_reading()
    size = MAX_CARRIED_BYTES - 100
    calls = [line.run("echo", size=size) for number in range(400)]  # 26 MB
    await until(lambda: line.stream._unsent != {} and not connection.is_writable)
    assert line.peer.calls is not None
    [caller] = line.peer.calls._callers
    await until(lambda: bool(caller._answers))
    assert not any(call.done() for call in calls)
    assert len(line.peer.carried) < 400
    connection.resume_reading()
    answers = await asyncio.gather(*calls)
    assert [len(answer.error.message) for answer in answers] == [size] * 400
