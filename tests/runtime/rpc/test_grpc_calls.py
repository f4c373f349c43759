"""Authenticated gRPC and the life of a service, over real sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from deploy.certificates import make_certificates
from runtime.errors import ConfigError, InternalError, OverloadedError, PeerLostError
from runtime.net import roles
from runtime.net.credentials import Credentials, Listen
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import (
    ServerLimits,
    bind_port,
    create_server,
    map_rpc_errors,
    open_channel,
)
from tests.runtime.rpc.fake_registry import RIGHT, FakeRegistry, serve
from tests.tcp_proxy import Proxy


async def test_only_the_secret_opens_the_server() -> None:
    server, port = await serve(FakeRegistry())
    request = registry_pb2.WatchRequest(watcher="w")
    async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        assert [s.version async for s in stub.Watch(request)] == [1]
    for secret in ("wrong", ""):
        async with open_channel(f"127.0.0.1:{port}", Credentials.of_secret(secret)) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            with pytest.raises(InternalError, match="secret"), map_rpc_errors("registry"):
                await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
            with pytest.raises(InternalError, match="UNAUTHENTICATED"), map_rpc_errors("registry"):
                [s async for s in stub.Watch(request)]
    await server.stop(None)


async def ask(port: int, credentials: Credentials, host: str = "127.0.0.1") -> bool:
    async with open_channel(f"{host}:{port}", credentials) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with map_rpc_errors("registry"):
            response = await stub.Renew(registry_pb2.RenewRequest(lease_id="x"), timeout=60)
        return not response.known


REFUSING_SERVER = textwrap.dedent(
    """
    import asyncio
    from runtime.net.credentials import Credentials, Listen
    from runtime.pb import prefill_pb2_grpc
    from runtime.rpc.grpc_calls import bind_port, create_server

    async def main():
        credentials = Credentials.of_secret("right")
        server = create_server(credentials)
        prefill_pb2_grpc.add_PrefillServicer_to_server(prefill_pb2_grpc.PrefillServicer(), server)
        port = bind_port(server, Listen(bind="127.0.0.1"), credentials)
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()

    asyncio.run(main())
    """
)


async def test_without_the_secret_no_message_is_read() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", REFUSING_SERVER], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    server, largest = psutil.Process(process.pid), 0
    before = server.memory_info().rss

    async def call(size: int) -> grpc.StatusCode:
        options = [("grpc.max_send_message_length", 2 * size)]
        address = f"127.0.0.1:{port}"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            run = channel.unary_unary("/tandem.v1.Prefill/Run")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await run(bytes(size))
            return caught.value.code()

    try:
        calls = asyncio.gather(*(call(60 * 2**20) for _ in range(8)))
        while not calls.done():
            largest = max(largest, server.memory_info().rss)
            await asyncio.sleep(0.002)
        assert await calls == [grpc.StatusCode.UNAUTHENTICATED] * 8
    finally:
        process.kill()
        process.communicate()
    # Without the bound it is 480 MiB and more; a megabyte or two are the connections.
    assert largest - before < 16 * 2**20


async def test_a_message_beyond_the_limit_is_refused_and_the_channel_lives() -> None:
    server, port = await serve(FakeRegistry())
    async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with pytest.raises(OverloadedError, match="larger than max"), map_rpc_errors("registry"):
            await stub.Renew(registry_pb2.RenewRequest(lease_id="x" * 5 * 2**20))
        large = registry_pb2.RenewRequest(lease_id="x" * 3 * 2**20)
        assert not (await stub.Renew(large)).known
    await server.stop(None)


async def test_one_call_more_than_the_limit_is_an_overload() -> None:
    limits = ServerLimits(max_request_bytes=2**20, max_concurrent_rpcs=2)
    held = asyncio.Event()

    class Slow(FakeRegistry):
        async def Watch(self, request, context):
            yield registry_pb2.PoolSnapshot(version=1)
            await held.wait()

    server = create_server(RIGHT, limits)
    registry_pb2_grpc.add_RegistryServicer_to_server(Slow(), server)
    port = bind_port(server, Listen(bind="127.0.0.1"), RIGHT)
    await server.start()
    channels = [open_channel(f"127.0.0.1:{port}", RIGHT) for _ in range(3)]
    stubs = [registry_pb2_grpc.RegistryStub(channel) for channel in channels]
    streams = [stub.Watch(registry_pb2.WatchRequest(watcher="w")) for stub in stubs[:2]]
    for stream in streams:
        assert (await stream.read()).version == 1
    with pytest.raises(OverloadedError), map_rpc_errors("registry"):
        await stubs[2].Renew(registry_pb2.RenewRequest(lease_id="x"))
    held.set()
    for stream in streams:
        assert await stream.read() is grpc.aio.EOF
    assert not (await stubs[2].Renew(registry_pb2.RenewRequest(lease_id="x"))).known
    for channel in channels:
        await channel.close()
    await server.stop(None)


async def test_two_secrets_open_the_server_while_it_changes() -> None:
    both = Credentials(secret="new", previous_secret="old")
    server, port = await serve(FakeRegistry(), credentials=both)
    assert await ask(port, both)
    assert await ask(port, Credentials.of_secret("old"))
    with pytest.raises(InternalError, match="UNAUTHENTICATED"):
        await ask(port, Credentials.of_secret("older"))
    await server.stop(None)


async def test_with_tls_both_ends_show_certificates(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls", ("127.0.0.1",))
    others = make_certificates(tmp_path / "others", ("127.0.0.1",))
    credentials = dataclasses.replace(RIGHT, tls=files)
    server, port = await serve(FakeRegistry(), credentials=credentials)
    assert await ask(port, credentials)
    strangers = {
        "plain text": RIGHT,
        "no certificate": dataclasses.replace(RIGHT, tls=dataclasses.replace(files, mutual=False)),
        "another authority": dataclasses.replace(RIGHT, tls=others),
        "one of another authority": dataclasses.replace(
            RIGHT, tls=dataclasses.replace(others, ca=files.ca)
        ),
    }
    for stranger in strangers.values():
        with pytest.raises(PeerLostError):
            await ask(port, stranger)
    with pytest.raises(PeerLostError):
        await ask(port, credentials, "localhost")  # the certificate is not for this name
    with pytest.raises(InternalError, match="UNAUTHENTICATED"):
        await ask(port, dataclasses.replace(credentials, secret="wrong"))
    await server.stop(None)


async def test_a_caller_without_a_certificate_where_none_is_asked_for(tmp_path: Path) -> None:
    files = make_certificates(tmp_path / "tls", ("127.0.0.1",))
    alone = dataclasses.replace(RIGHT, tls=dataclasses.replace(files, mutual=False))
    server, port = await serve(FakeRegistry(), credentials=alone)
    assert await ask(port, alone)
    await server.stop(None)


async def test_a_taken_port_is_a_config_error() -> None:
    server, port = await serve(FakeRegistry())
    taken = Listen(bind="127.0.0.1", port=port)
    with pytest.raises(ConfigError, match=r"router\.control_port"):
        bind_port(create_server(RIGHT), taken, RIGHT, "router.control_port")
    await server.stop(None)


async def test_an_absent_peer_is_lost() -> None:
    server, port = await serve(FakeRegistry())
    await server.stop(None)
    async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        lost = pytest.raises(PeerLostError, match="registry")
        with lost as caught, map_rpc_errors("registry", "r9"):
            await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
        assert caught.value.request_id == "r9"


async def test_a_peer_that_ends_a_call_while_it_is_written_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client of gRPC makes some of these calls an INTERNAL of its own, and hides the status."""

    async def leave(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "leaving")

    async def write(call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(b"x")

    monkeypatch.setattr(roles, "CALLERS", {"demo": {"Talk": roles.ALL_ROLES}})
    server = create_server(RIGHT)
    handler = grpc.stream_stream_rpc_method_handler(leave)
    handlers = {"Talk": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("demo", handlers),))
    port = bind_port(server, Listen(bind="127.0.0.1", port=0), RIGHT)
    await server.start()
    seen = set()
    async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
        for _ in range(300):
            call = channel.stream_stream("/demo/Talk")()
            writing = asyncio.create_task(write(call))
            with pytest.raises(PeerLostError) as caught, map_rpc_errors("demo"):
                await call.read()
            seen.add(str(caught.value))
            await writing
    await server.stop(None)
    assert seen <= {"demo: UNAVAILABLE: leaving", "demo: INTERNAL: Internal error from Core"}


def test_only_an_internal_error_that_a_peer_has_said_is_one() -> None:
    def error(details: str) -> grpc.aio.AioRpcError:
        nothing = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details)

    with pytest.raises(PeerLostError), map_rpc_errors("worker"):
        raise error("Internal error from Core")
    with pytest.raises(InternalError), map_rpc_errors("worker"):
        raise error("Run: a field is missing")


@pytest.mark.parametrize("delay_s", [0.4, 1.2])
async def test_a_peer_that_is_slow_to_accept_is_not_lost(delay_s: float) -> None:
    server, port = await serve(FakeRegistry())
    proxy = Proxy(delay_s)
    address = f"127.0.0.1:{await proxy.start(port)}"
    async with open_channel(address, RIGHT) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        with map_rpc_errors("registry"):
            response = await stub.Renew(registry_pb2.RenewRequest(lease_id="x"), timeout=60)
        assert not response.known
    await proxy.close()
    await server.stop(None)


async def test_a_peer_that_comes_back_is_reached_at_once() -> None:
    server, port = await serve(FakeRegistry())
    await server.stop(None)
    async with open_channel(f"127.0.0.1:{port}", RIGHT) as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        request = registry_pb2.RenewRequest(lease_id="x")
        with pytest.raises(PeerLostError), map_rpc_errors("registry"):
            await stub.Renew(request)
        server, _ = await serve(FakeRegistry(), port)
        # The bound is the subject: the longest pause between attempts, and 10 times that.
        await stub.Renew(request, wait_for_ready=True, timeout=10)
    await server.stop(None)


SERVICE = textwrap.dedent(
    """
    import asyncio, sys
    from runtime.service import run_service

    class Demo:
        async def startup(self): print("started", flush=True)
        async def main_loop(self):
            if "crash" in sys.argv: raise RuntimeError("boom")
            await asyncio.Event().wait()
        async def drain(self):
            print("draining", flush=True)
            await asyncio.sleep(0 if "quick" in sys.argv else 60)
        async def shutdown(self): print("released", flush=True)

    sys.exit(run_service(Demo(), grace_s=30))
    """
)


def start_service(mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def started_service(mode: str) -> subprocess.Popen[str]:
    process = start_service(mode)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_signal_drains_then_releases() -> None:
    process = started_service("quick")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out == "draining\nreleased\n"
    assert process.returncode == 0


def test_a_second_signal_ends_at_once() -> None:
    process = started_service("slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert out == "released\n"
    assert time.monotonic() - start < 20  # and not after the 30 s of a drain


def test_a_crash_releases_and_exits_non_zero() -> None:
    process = start_service("crash")
    out, err = process.communicate(timeout=60)
    assert out == "started\nreleased\n"
    assert process.returncode == 1
    assert "boom" in err
