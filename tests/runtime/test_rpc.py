"""Authenticated gRPC and the life of a service, over real sockets and processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from runtime.errors import ConfigError, InternalError, PeerLostError
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc import bind_port, create_server, map_rpc_errors, open_channel
from tests.runtime.fake_registry import FakeRegistry, serve


async def test_only_the_secret_opens_the_server() -> None:
    server, port = await serve(FakeRegistry())
    request = registry_pb2.WatchRequest(watcher="w")
    async with open_channel(f"127.0.0.1:{port}", "right") as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        assert [s.version async for s in stub.Watch(request)] == [1]
    for secret in ("wrong", ""):
        async with open_channel(f"127.0.0.1:{port}", secret) as channel:
            stub = registry_pb2_grpc.RegistryStub(channel)
            with pytest.raises(InternalError, match="secret"), map_rpc_errors("registry"):
                await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
            with pytest.raises(InternalError, match="UNAUTHENTICATED"), map_rpc_errors("registry"):
                [s async for s in stub.Watch(request)]
    await server.stop(None)


async def test_a_taken_port_is_a_config_error() -> None:
    server, port = await serve(FakeRegistry())
    with pytest.raises(ConfigError, match=r"router\.control_port"):
        bind_port(create_server("right"), "127.0.0.1", port, "router.control_port")
    await server.stop(None)


async def test_an_absent_peer_is_lost() -> None:
    server, port = await serve(FakeRegistry())
    await server.stop(None)
    async with open_channel(f"127.0.0.1:{port}", "right") as channel:
        stub = registry_pb2_grpc.RegistryStub(channel)
        lost = pytest.raises(PeerLostError, match="registry")
        with lost as caught, map_rpc_errors("registry", "r9"):
            await stub.Renew(registry_pb2.RenewRequest(lease_id="x"))
        assert caught.value.request_id == "r9"


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
    out, _ = process.communicate(timeout=10)
    assert out == "draining\nreleased\n"
    assert process.returncode == 0


def test_a_second_signal_ends_at_once() -> None:
    process = started_service("slow")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "draining\n"
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert out == "released\n"
    assert time.monotonic() - start < 5


def test_a_crash_releases_and_exits_non_zero() -> None:
    process = start_service("crash")
    out, err = process.communicate(timeout=10)
    assert out == "started\nreleased\n"
    assert process.returncode == 1
    assert "boom" in err
