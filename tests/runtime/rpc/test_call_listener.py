"""Who may call, and what somebody costs who may not: over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import uvloop

from deploy.certificates import make_certificates
from runtime.errors import ConfigError, PeerLostError, TandemError
from runtime.net.credentials import Credentials, Listen
from runtime.pb import calls_pb2, prefill_pb2
from runtime.rpc import call_listener, call_server, call_stream
from runtime.rpc.call_connection import greeting
from runtime.rpc.call_server import CallServer, CarriedMethod
from runtime.rpc.call_stream import MAX_BATCH_CALLS, CallStream, Method
from runtime.rpc.grpc_calls import map_rpc_errors
from runtime.version import WIRE
from tests.router.fakes import CREDENTIALS as RIGHT
from tests.waiting import until

HOST = "127.0.0.1"


async def run(request: prefill_pb2.RunRequest, _: object) -> prefill_pb2.RunResponse:
    first = prefill_pb2.FirstToken(index=request.num_output_tokens)
    return prefill_pb2.RunResponse(first_token=first)


async def no_call_of_its_own(_: prefill_pb2.RunRequest) -> prefill_pb2.RunResponse:
    raise grpc.aio.UsageError("no connection")


RUN = Method("Run", prefill_pb2.RunResponse.FromString, no_call_of_its_own)


@asynccontextmanager
async def serving(credentials: Credentials = RIGHT) -> AsyncIterator[tuple[CallServer, int]]:
    server = CallServer(credentials)
    server.carry("Prefill", Run=CarriedMethod(prefill_pb2.RunRequest.FromString, run))
    yield server, server.start(Listen(bind=HOST))
    await server.stop(0.0)


async def ask(port: int, credentials: Credentials, host: str = HOST) -> int:
    stream = CallStream(f"{host}:{port}", credentials)
    try:
        with map_rpc_errors("worker"):
            answer = await stream.start(RUN, prefill_pb2.RunRequest(num_output_tokens=7))
    finally:
        await stream.close()
    return answer.first_token.index


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "little") + message


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end of the connection, however it ends."""
    data = b""
    async with asyncio.timeout(60):
        try:
            while piece := await reader.read(2**16):
                data += piece
        except ConnectionError:
            pass
    return data


async def test_one_secret_is_accepted_beside_another_while_they_change() -> None:
    older, newer = Credentials.of_secret("older"), Credentials.of_secret("newer")
    async with serving(dataclasses.replace(newer, previous_secret="older")) as (_, port):
        assert await ask(port, older) == await ask(port, newer) == 7
        with pytest.raises(TandemError, match="UNAUTHENTICATED: the cluster's secret"):
            await ask(port, Credentials.of_secret("oldest"))


@pytest.mark.parametrize("policy", [asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def test_with_tls_both_ends_show_certificates(
    tmp_path: Path, policy: type[asyncio.DefaultEventLoopPolicy]
) -> None:
    files = make_certificates(tmp_path / "tls", (HOST,))
    others = make_certificates(tmp_path / "others", (HOST,))
    credentials = dataclasses.replace(RIGHT, tls=files)
    strangers = [
        dataclasses.replace(RIGHT, tls=dataclasses.replace(others, ca=files.ca)),
        dataclasses.replace(RIGHT, tls=others),
        RIGHT,
    ]

    async def meet() -> None:
        async with serving(credentials) as (_, port):
            assert await ask(port, credentials) == 7
            for stranger in strangers:
                with pytest.raises(PeerLostError):
                    await ask(port, stranger)
            with pytest.raises(
                PeerLostError, match="no connection"
            ):  # the certificate is not for this name
                await ask(port, credentials, "localhost")
            with pytest.raises(TandemError, match="UNAUTHENTICATED"):
                await ask(port, dataclasses.replace(credentials, secret="wrong"))

    with asyncio.Runner(loop_factory=policy().new_event_loop) as runner:
        runner.run(meet())


async def test_a_caller_shows_no_certificate_where_none_is_asked_for(tmp_path: Path) -> None:
    files = dataclasses.replace(make_certificates(tmp_path, (HOST,)), mutual=False)
    credentials = dataclasses.replace(RIGHT, tls=files)
    async with serving(credentials) as (_, port):
        assert await ask(port, credentials) == 7


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"hello"),
        framed(calls_pb2.CallBatch().SerializeToString() or b"\0"),
        (2**20).to_bytes(4, "little") + b"x" * 2**18,
    ],
)
async def test_who_does_not_speak_our_protocol_is_cut_off(data: bytes) -> None:
    async with serving() as (server, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(data)
        assert await rest(reader) == b""
        writer.close()
        assert await ask(port, RIGHT) == 7
        assert server._listener.num_strangers == 0


async def test_who_speaks_another_version_of_it_is_told_so() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        ours = b"tandem wire %d\n" % WIRE
        assert greeting("test-secret").startswith(ours)
        writer.write(framed(greeting("test-secret").replace(ours, b"tandem wire 999\n")))
        (answer,) = calls_pb2.AnswerBatch.FromString((await rest(reader))[4:]).answers
        writer.close()
    assert answer.number == 0
    assert answer.status_code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert f"a caller speaks wire 999 (Tandem of an unknown version), this process wire {WIRE}" in (
        answer.details
    )


@pytest.mark.parametrize("has_tls", [False, True])
async def test_who_says_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_tls: bool
) -> None:
    monkeypatch.setattr(call_listener, "GREETING_S", 0.1)
    files = make_certificates(tmp_path, (HOST,)) if has_tls else None
    async with serving(dataclasses.replace(RIGHT, tls=files)) as (_, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        if not has_tls:
            writer.write(framed(greeting("test-secret"))[:10])
        assert await rest(reader) == b""
        writer.close()


async def met(port: int, *calls: calls_pb2.CarriedCall) -> list[calls_pb2.CarriedAnswer]:
    """What a caller that says ``calls`` in one message gets until it is cut off, or has it all."""
    reader, writer = await asyncio.open_connection(HOST, port)
    batch = calls_pb2.CallBatch(calls=calls).SerializeToString()
    writer.write(framed(greeting("test-secret")) + framed(batch))
    answers: list[calls_pb2.CarriedAnswer] = []
    try:
        async with asyncio.timeout(60):
            while len(answers) <= len(calls):
                length = int.from_bytes(await reader.readexactly(4), "little")
                message = await reader.readexactly(length)
                answers += calls_pb2.AnswerBatch.FromString(message).answers
    except (asyncio.IncompleteReadError, ConnectionError):
        answers.append(calls_pb2.CarriedAnswer(details="cut off"))
    writer.close()
    return answers


async def test_a_number_in_use_is_the_end_of_its_connection_and_of_no_other() -> None:
    async with serving() as (server, port):
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        one, other, none = (calls_pb2.CarriedCall(number=n, method="Run") for n in (1, 2, 0))
        assert [answer.number for answer in await met(port, one, other)] == [0, 1, 2]
        for calls in [(one, one), (other, one, other), (none,), (one, none)]:
            assert (await met(port, *calls))[-1].details == "cut off"
        await until(lambda: not server._callers)
        assert await ask(port, RIGHT) == 7
        assert faults == []


async def test_a_message_holds_a_bounded_number_of_calls() -> None:
    async with serving() as (_, port):
        cancels = [calls_pb2.CarriedCall(number=n) for n in range(1, MAX_BATCH_CALLS + 1)]
        run_it = calls_pb2.CarriedCall(number=7, method="Run")
        *answers, end = await met(port, *cancels, run_it)
        assert end.details == "cut off"
        assert {answer.number for answer in answers} <= {0}  # that it was accepted may be lost


async def test_more_calls_than_a_message_holds_go_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_stream, "MAX_BATCH_CALLS", 3)
    monkeypatch.setattr(call_server, "MAX_BATCH_CALLS", 3)
    async with serving() as (_, port):
        stream = CallStream(f"{HOST}:{port}", RIGHT)
        calls = [stream.start(RUN, prefill_pb2.RunRequest(num_output_tokens=n)) for n in range(10)]
        answers = await asyncio.gather(*calls)
        assert [answer.first_token.index for answer in answers] == list(range(10))
        await stream.close()


async def test_no_number_of_strangers_keeps_a_caller_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_listener, "MAX_STRANGERS", 3)
    monkeypatch.setattr(call_listener, "GREETING_S", 60.0)
    async with serving() as (server, port):
        strangers = [await asyncio.open_connection(HOST, port) for _ in range(10)]
        for reader, _ in strangers[:7]:
            assert await rest(reader) == b""  # the oldest had to go
        assert await ask(port, RIGHT) == 7
        assert server._listener.num_strangers <= 3
        for _, writer in strangers:
            writer.close()


async def test_the_end_of_the_server_is_the_end_of_strangers() -> None:
    async with serving() as (_, port):
        reader, writer = await asyncio.open_connection(HOST, port)
    assert await rest(reader) == b""
    writer.close()
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(HOST, port)


async def test_a_taken_port_is_named() -> None:
    async with serving() as (_, port):
        with pytest.raises(ConfigError, match=f"--calls-port = {port}: cannot listen"):
            CallServer(RIGHT).start(Listen(bind=HOST, port=port))
