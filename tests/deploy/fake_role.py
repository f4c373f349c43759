"""A stand-in for a role's process: registers, answers, drains and dies as told; no model, no KV.

Run as ``python -m tests.deploy.fake_role ROLE --config FILE ...`` with the arguments of the real
roles. What it should do wrong stands in the environment: ``FAKE_<INSTANCE>`` (with underscores) is
one of ``exit-at-start``, ``ignore-sigterm``, ``last-rank-is-late``, which answers for a while
after the others have ended, and ``never-empty``, which drains for ever.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

from runtime.config import ClusterConfig
from runtime.config.file import cluster_credentials, load_config
from runtime.logging import configure_logging, get_logger
from runtime.net.credentials import Credentials, Listen
from runtime.net.roles import Role
from runtime.pb import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.registration import RegistryClient
from runtime.rpc.wire import own_wire

logger = get_logger("fake_role")

if TYPE_CHECKING:
    from aiohttp import web

    Context = grpc.aio.ServicerContext[Any, Any]


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    """A registry without leases: members leave by Deregister or by a namesake's return."""

    def __init__(self) -> None:
        self._members: dict[str, registry_pb2.PoolMember] = {}
        self._changed = asyncio.Condition()
        self._version = 0

    @property
    def roles(self) -> set[int]:
        return {member.worker.role for member in self._members.values()}

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Context
    ) -> registry_pb2.RegisterResponse:
        identity = request.worker.identity
        lease_id = f"{identity.instance}/{identity.rank}"
        self._members[lease_id] = registry_pb2.PoolMember(worker=request.worker)
        await self._tell()
        return registry_pb2.RegisterResponse(lease_id=lease_id, lease_ttl_s=0.5, wire=own_wire())

    async def Renew(
        self, request: registry_pb2.RenewRequest, context: Context
    ) -> registry_pb2.RenewResponse:
        member = self._members.get(request.lease_id)
        if member is not None and request.draining and not member.worker.draining:
            member.worker.draining = True
            await self._tell()
        return registry_pb2.RenewResponse(known=member is not None)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: Context
    ) -> registry_pb2.DeregisterResponse:
        self._members.pop(request.lease_id, None)
        await self._tell()
        return registry_pb2.DeregisterResponse()

    async def Watch(
        self, request: registry_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[registry_pb2.PoolSnapshot]:
        while True:
            version = self._version
            yield registry_pb2.PoolSnapshot(members=list(self._members.values()))
            async with self._changed:
                await self._changed.wait_for(lambda version=version: self._version != version)

    async def _tell(self) -> None:
        self._version += 1
        async with self._changed:
            self._changed.notify_all()


async def serve_router(config: ClusterConfig, stop: asyncio.Event) -> None:
    """The registry, /ready, and a completion that says back its prompt."""
    from aiohttp import web  # late: most of these processes are workers

    registry = FakeRegistry()
    credentials = cluster_credentials(config, Role.ROUTER)
    server = create_server(credentials)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    listen = Listen(bind=config.cluster.host, port=config.router.control_port)
    bind_port(server, listen, credentials)
    await server.start()

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=200 if len(registry.roles) == 2 else 503)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": config.model.name}]})

    app = web.Application()
    app.add_routes([web.get("/ready", ready), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/completions", complete)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, config.cluster.host, config.router.port).start()
    logger.info("listening")
    await stop.wait()
    await runner.cleanup()
    await server.stop(0.1)


async def complete(request: web.Request) -> web.StreamResponse:
    """Stream the prompt's words back; an empty prompt is refused, "break" breaks off."""
    from aiohttp import web

    prompt = (await request.json())["prompt"]
    if not prompt:
        error = {"message": "prompt: must not be empty", "type": "invalid_request_error"}
        return web.json_response({"error": error}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for word in prompt.split():
        chunk = '{"choices": [{"index": 0, "text": "<' + word + '>"}]}'
        await response.write(f"data: {chunk}\n\n".encode())
    if prompt == "fail":
        await response.write(b'data: {"error": {"message": "the worker died"}}\n\n')
    if prompt not in ("break", "fail"):
        await response.write(b"data: [DONE]\n\n")
    return response


class FakeWorker(decode_pb2_grpc.DecodeServicer, prefill_pb2_grpc.PrefillServicer):
    """Drains: says that two requests are left, then none, or for ever that two are."""

    def __init__(self, *, is_never_empty: bool) -> None:
        self.on_drain: Callable[[], None] | None = None
        self._is_draining = False
        self._is_never_empty = is_never_empty

    async def Drain(
        self, request: common_pb2.DrainRequest, context: Context
    ) -> common_pb2.DrainResponse:
        is_first, self._is_draining = not self._is_draining, True
        if self.on_drain is not None:
            self.on_drain()
        if is_first or self._is_never_empty:
            return common_pb2.DrainResponse(num_requests_left=2, num_tokens_left=70)
        return common_pb2.DrainResponse()


async def serve_worker(
    arguments: argparse.Namespace, credentials: Credentials, stop: asyncio.Event
) -> None:
    """Register as the real worker's ranks do, and wait."""
    prefill = arguments.role == "prefill"
    logger.info("loading weights")
    worker = FakeWorker(is_never_empty=arguments.fault == "never-empty")
    server = create_server(credentials)
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(worker, server)
    listen = Listen(bind=arguments.host, advertise=arguments.advertise)
    port = bind_port(server, listen, credentials)
    await server.start()
    record = registry_pb2.WorkerRecord(
        identity=common_pb2.WorkerIdentity(
            instance=arguments.instance, epoch=secrets.randbits(63) + 1, rank=arguments.rank
        ),
        role=common_pb2.ROLE_PREFILL if prefill else common_pb2.ROLE_DECODE,
        address=listen.address(port),
    )
    client = RegistryClient(arguments.router, credentials, record, registry_pb2.WorkerLoad)
    worker.on_drain = client.set_draining
    if not prefill or arguments.rank == 0:
        await client.start()
    logger.info("serving rendezvous=%s", arguments.rendezvous)
    await stop.wait()
    await client.close()
    await server.stop(0.1)
    if arguments.fault == "last-rank-is-late" and arguments.rank > 0:
        await asyncio.sleep(2)
        logger.info("answered all")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("router", "prefill", "decode"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--instance", default="router")
    parser.add_argument("--rank", type=int, default=0)
    for name in ("--rendezvous", "--router", "--host", "--advertise", "--grace"):
        parser.add_argument(name, default="")
    parser.add_argument("--index", type=int, default=0)
    return parser.parse_args()


async def main() -> None:
    arguments = parse_arguments()
    configure_logging(arguments.role, arguments.instance, arguments.rank)
    fault = os.environ.get("FAKE_" + arguments.instance.upper().replace("-", "_"), "")
    if fault == "exit-at-start":
        logger.error("this device is on fire")
        sys.exit(3)
    config = load_config(arguments.config)
    config = dataclasses.replace(config, router=config.router.numbered(arguments.index))
    arguments.fault = fault
    stop = asyncio.Event()
    act = (lambda: None) if fault == "ignore-sigterm" else stop.set
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, act)
    if arguments.role == "router":
        await serve_router(config, stop)
    else:
        await serve_worker(arguments, cluster_credentials(config, Role(arguments.role)), stop)


if __name__ == "__main__":
    asyncio.run(main())
