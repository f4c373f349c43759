"""A registry without a pool, which answers what the test wants."""

from __future__ import annotations

import asyncio

import grpc.aio

from runtime.net.credentials import Credentials, Listen
from runtime.pb import registry_pb2, registry_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.wire import own_wire

RIGHT = Credentials.of_secret("right")


class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    def __init__(self, ttl_s: float = 1.5) -> None:
        self.ttl_s = ttl_s
        self.leases: dict[str, registry_pb2.RegisterRequest] = {}
        self.num_registrations = 0
        self.renewals: list[registry_pb2.RenewRequest] = []
        self.refusal = registry_pb2.RegisterResponse()
        """Answered instead of a lease, if it has an error."""
        self.wire = own_wire()
        self.silent = asyncio.Event()
        """Answers to registrations and renewals wait while this is not set."""
        self.silent.set()
        self.port = 0

    @property
    def draining(self) -> bool:
        return bool(self.renewals) and self.renewals[-1].draining

    async def Register(self, request, context):
        self.num_registrations += 1
        if self.refusal.HasField("error"):
            return self.refusal
        lease_id = f"lease-{self.num_registrations}"
        self.leases[lease_id] = request
        await self.silent.wait()
        return registry_pb2.RegisterResponse(
            lease_id=lease_id, lease_ttl_s=self.ttl_s, wire=self.wire
        )

    async def Renew(self, request, context):
        self.renewals.append(request)
        await self.silent.wait()
        return registry_pb2.RenewResponse(known=request.lease_id in self.leases)

    async def Deregister(self, request, context):
        self.leases.pop(request.lease_id, None)
        return registry_pb2.DeregisterResponse()

    async def Watch(self, request, context):
        yield registry_pb2.PoolSnapshot(version=1)


async def serve(
    registry: FakeRegistry, port: int = 0, credentials: Credentials = RIGHT
) -> tuple[grpc.aio.Server, int]:
    server = create_server(credentials)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    port = bind_port(server, Listen(bind="127.0.0.1", port=port), credentials)
    await server.start()
    return server, port
