"""A decode rank over real gRPC that answers handshakes and remembers closures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotLayout
from runtime.errors import TandemError
from runtime.net import Credentials, Listen
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc
from runtime.rpc import bind_port, create_server
from runtime.wire import error_to_proto

SECRET = "shh"
CREDENTIALS = Credentials.of_secret(SECRET)
LISTEN = Listen(bind="127.0.0.1")
LAYOUT = KVLayout(dtype=KVDtype.FLOAT32, block_size=4, num_layers=3, latent_dim=8)
SLOT_BYTES = SlotLayout().slot_bytes


@dataclass
class FakeDecode(decode_pb2_grpc.DecodeServicer):
    """One decode rank; change its fields to make it misbehave."""

    identity: common_pb2.WorkerIdentity = field(
        default_factory=lambda: common_pb2.WorkerIdentity(instance="decode-0", epoch=77, rank=0)
    )
    address: str = ""
    transport: str = "loopback"
    slot_bytes: int = SLOT_BYTES
    fence_generation: int = 3
    handshake_error: TandemError | None = None
    handshake_gate: asyncio.Event | None = None
    num_refused_closures: int = 0
    handshakes: list[decode_pb2.HandshakeRequest] = field(default_factory=list)
    closures: list[decode_pb2.CloseTicketRequest] = field(default_factory=list)

    async def Handshake(
        self, request: decode_pb2.HandshakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.HandshakeResponse:
        self.handshakes.append(request)
        if self.handshake_gate:
            await self.handshake_gate.wait()
        if self.handshake_error:
            return decode_pb2.HandshakeResponse(error=error_to_proto(self.handshake_error))
        return decode_pb2.HandshakeResponse(
            endpoint=decode_pb2.PeerEndpoint(
                decode=self.identity,
                transport=self.transport,
                endpoint=b"endpoint",
                kv_region_bytes=1 << 20,
                metadata_region_bytes=1 << 20,
                metadata_slot_bytes=self.slot_bytes,
                fence_generation=self.fence_generation,
            )
        )

    async def CloseTicket(
        self, request: decode_pb2.CloseTicketRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.CloseTicketResponse:
        if self.num_refused_closures > 0:
            self.num_refused_closures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        self.closures.append(request)
        return decode_pb2.CloseTicketResponse()


@asynccontextmanager
async def serve_decode(decode: FakeDecode) -> AsyncIterator[FakeDecode]:
    """Serve `decode` on a free port and set its address."""
    server = create_server(CREDENTIALS)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    port = bind_port(server, LISTEN, CREDENTIALS)
    decode.address = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield decode
    finally:
        await server.stop(None)
