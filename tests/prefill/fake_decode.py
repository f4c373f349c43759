"""A decode rank over real gRPC: gives tickets for what was reserved, remembers what it hears."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotLayout
from runtime.errors import StaleTicketError, TandemError
from runtime.net.credentials import Credentials, Listen
from runtime.pb import common_pb2, decode_pb2, decode_pb2_grpc
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.wire import error_to_proto, own_wire
from runtime.trace.context import trace_id

SECRET = "shh"
CREDENTIALS = Credentials.of_secret(SECRET)
LISTEN = Listen(bind="127.0.0.1")
LAYOUT = KVLayout(dtype=KVDtype.FLOAT32, block_size=4, num_layers=3, head_width=8)
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
    wire: common_pb2.Wire = field(default_factory=own_wire)
    fence_generation: int = 3
    transfer_timeout_s: float = 30.0
    has_endpoint: bool = True
    """Whether a claim is ever answered with one."""
    claim_error: TandemError | None = None
    claim_gate: asyncio.Event | None = None
    """While it is closed there is no room."""
    answer_gate: asyncio.Event | None = None
    """While it is closed answers are on their way."""
    ticket_changes: dict[str, Any] = field(default_factory=dict)
    num_refused_closures: int = 0
    closure_gate: asyncio.Event | None = None
    places: dict[int, list[int]] = field(default_factory=dict)
    """Blocks of what is reserved, by nonce."""
    claims: list[decode_pb2.ClaimRequest] = field(default_factory=list)
    num_cancelled_claims: int = 0
    closings: list[decode_pb2.CloseTicketsRequest] = field(default_factory=list)
    renewals: list[decode_pb2.RenewTicketsRequest] = field(default_factory=list)
    traces: list[tuple[str, str]] = field(default_factory=list)
    """Calls, and the id of the trace that each came with."""
    renewal_error: grpc.StatusCode | None = None

    def reserve(self, nonce: int, block_ids: list[int]) -> decode_pb2.Reservation:
        """Take a request on; its ticket will be of these blocks."""
        self.places[nonce] = block_ids
        return decode_pb2.Reservation(
            request_id=f"request-{nonce}",
            decode=self.identity,
            decode_address=self.address,
            nonce=nonce,
        )

    @property
    def closures(self) -> list[decode_pb2.TicketClosure]:
        """All that came."""
        return [closure for closing in self.closings for closure in closing.closures]

    def parts_of(self, nonce: int) -> list[decode_pb2.PartClosure]:
        """The parts of one ticket."""
        return [
            part for closure in self.closures if closure.nonce == nonce for part in closure.parts
        ]

    async def Claim(
        self, request: decode_pb2.ClaimRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.ClaimResponse:
        self.claims.append(request)
        self.traces.append(("Claim", trace_id()))
        try:
            if self.claim_gate:
                await self.claim_gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled_claims += 1
            raise
        if self.claim_error:
            return decode_pb2.ClaimResponse(error=error_to_proto(self.claim_error))
        if request.nonce not in self.places:
            error = StaleTicketError(f"nothing is reserved under {request.nonce:016x}")
            return decode_pb2.ClaimResponse(error=error_to_proto(error))
        response = decode_pb2.ClaimResponse(ticket=self.ticket(request))
        is_old = not request.has_endpoint or request.fence_generation < self.fence_generation
        if is_old and self.has_endpoint:
            response.endpoint.CopyFrom(self.endpoint(request.prefill))
        if self.answer_gate:
            await self.answer_gate.wait()
        return response

    def ticket(self, request: decode_pb2.ClaimRequest) -> decode_pb2.TransferTicket:
        """What the claim is answered with."""
        values: dict[str, Any] = {
            "request_id": request.request_id,
            "decode": self.identity,
            "nonce": request.nonce,
            "block_ids": self.places[request.nonce],
            "timeout_s": self.transfer_timeout_s,
            "fence_generation": self.fence_generation,
        }
        return decode_pb2.TransferTicket(**(values | self.ticket_changes))

    def endpoint(self, writer: common_pb2.WorkerIdentity) -> decode_pb2.PeerEndpoint:
        """How `writer` reaches our memory."""
        return decode_pb2.PeerEndpoint(
            decode=self.identity,
            transport=self.transport,
            endpoint=b"endpoint",
            kv_region_bytes=1 << 20,
            metadata_region_bytes=1 << 20,
            metadata_slot_bytes=self.slot_bytes,
            fence_generation=self.fence_generation,
            wire=self.wire,
        )

    async def RenewTickets(
        self, request: decode_pb2.RenewTicketsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.RenewTicketsResponse:
        if self.renewal_error:
            await context.abort(self.renewal_error, "no")
        self.renewals.append(request)
        unknown = [nonce for nonce in request.nonces if nonce not in self.places]
        return decode_pb2.RenewTicketsResponse(unknown=unknown)

    async def CloseTickets(
        self, request: decode_pb2.CloseTicketsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> decode_pb2.CloseTicketsResponse:
        if self.closure_gate:
            await self.closure_gate.wait()
        if self.num_refused_closures > 0:
            self.num_refused_closures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        self.closings.append(request)
        self.traces.append(("CloseTickets", trace_id()))
        for closure in request.closures:
            self.places.pop(closure.nonce, None)
        return decode_pb2.CloseTicketsResponse()


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
