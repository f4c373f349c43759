"""What a prefill worker needs around it to run as real processes: a registry, and memory to write.

The decode side has a real transport, real slots and a real receiver, and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from deploy.ports import free_port
from kv_transfer.layout import KVLayout
from kv_transfer.metadata import SlotArray, SlotLayout
from kv_transfer.receiver import Arrival, KVReceiver
from kv_transfer.transport import KV_REGION, METADATA_REGION, MemoryRegion, peer_name
from kv_transfer.transports import create_transport
from runtime.config import ClusterConfig
from runtime.config.file import dump_config
from runtime.pb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)
from runtime.rpc.grpc_calls import bind_port, create_server
from runtime.rpc.wire import own_wire
from tests.prefill.fake_decode import CREDENTIALS, LISTEN, SECRET, FakeDecode
from tests.processes.forked import Process, start

NUM_BLOCKS = 32


@dataclass
class FakeRegistry(registry_pb2_grpc.RegistryServicer):
    """A router's registry that lets everybody in."""

    workers: asyncio.Queue[registry_pb2.WorkerRecord] = field(default_factory=asyncio.Queue)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    loads: list[registry_pb2.WorkerLoad] = field(default_factory=list)

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.RegisterResponse:
        self.workers.put_nowait(request.worker)
        return registry_pb2.RegisterResponse(lease_id="lease", lease_ttl_s=30.0, wire=own_wire())

    async def Renew(
        self, request: registry_pb2.RenewRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.RenewResponse:
        self.loads.append(request.load)
        if request.draining:
            self.draining.set()
        return registry_pb2.RenewResponse(known=True)

    async def Deregister(
        self, request: registry_pb2.DeregisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> registry_pb2.DeregisterResponse:
        self.left.set()
        return registry_pb2.DeregisterResponse()


class RealDecode(FakeDecode):
    """A decode rank whose memory is real: what arrives can be looked at."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__()
        self.layout = layout
        self.num_cached_tokens: dict[int, int] = {}  # by nonce
        shape = (NUM_BLOCKS, layout.num_layers, layout.block_size, layout.head_width)
        self.kv = torch.zeros(shape)
        name = peer_name(self.identity.instance, self.identity.epoch, self.identity.rank)
        self.kv_transport = create_transport("loopback", local_name=name, host="127.0.0.1")
        self.slots = SlotArray(4, SlotLayout())
        self.kv_transport.register(MemoryRegion(KV_REGION, self.kv.data_ptr(), self.kv.nbytes))
        self.kv_transport.register(self.slots.region(METADATA_REGION))
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.receiver = KVReceiver(
            self.kv_transport,
            self.slots,
            epoch=self.identity.epoch,
            on_arrival=lambda arrival: loop.call_soon_threadsafe(self.arrivals.put_nowait, arrival),
        )

    def reserve_blocks(
        self, nonce: int, block_ids: list[int], *, num_cached_tokens: int = 0
    ) -> decode_pb2.Reservation:
        """Take a request on; the transfer is awaited from its claim on."""
        self.num_cached_tokens[nonce] = num_cached_tokens
        return self.reserve(nonce, block_ids)

    def ticket(self, request: decode_pb2.ClaimRequest) -> decode_pb2.TransferTicket:
        """Await a transfer and permit it."""
        assert request.layout_fingerprint == self.layout.fingerprint(), request.layout_description
        self.fence_generation = self.kv_transport.fence_generation
        ticket = super().ticket(request)
        ticket.num_cached_tokens = self.num_cached_tokens[request.nonce]
        ticket.metadata_slot = self.receiver.expect(
            request.request_id, request.nonce, request.num_prefill_ranks
        )
        return ticket

    def endpoint(self, writer: common_pb2.WorkerIdentity) -> decode_pb2.PeerEndpoint:
        """How `writer` reaches our memory."""
        return decode_pb2.PeerEndpoint(
            decode=self.identity,
            transport="loopback",
            endpoint=self.kv_transport.endpoint(
                peer_name(writer.instance, writer.epoch, writer.rank)
            ),
            kv_region_bytes=self.kv.nbytes,
            metadata_region_bytes=self.slots.nbytes,
            metadata_slot_bytes=self.slots.layout.slot_bytes,
            fence_generation=self.kv_transport.fence_generation,
            wire=own_wire(),
        )

    def close(self) -> None:
        """Let go of threads and memory."""
        self.receiver.close()
        self.kv_transport.close()


@contextlib.asynccontextmanager
async def serve(decode: RealDecode, registry: FakeRegistry) -> AsyncIterator[str]:
    """Serve both on one port; its address."""
    server = create_server(CREDENTIALS)
    decode_pb2_grpc.add_DecodeServicer_to_server(decode, server)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server)
    decode.address = f"127.0.0.1:{bind_port(server, LISTEN, CREDENTIALS)}"
    await server.start()
    try:
        yield decode.address
    finally:
        await server.stop(None)
        decode.close()


@contextlib.asynccontextmanager
async def prefill_processes(
    config: ClusterConfig, router: str, folder: Path
) -> AsyncIterator[list[Process]]:
    """`python -m prefill` for every rank; what is left at the end is killed."""
    file = folder / "cluster.toml"
    file.write_text(dump_config(config))
    rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"
    environment = {**os.environ, "TANDEM_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    processes: list[Process] = []
    with contextlib.ExitStack() as logs:
        for rank in range(config.prefill.num_ranks):
            log = logs.enter_context((folder / f"rank-{rank}.log").open("wb"))
            command = ["prefill", "--config", str(file)]
            command += ["--instance", "prefill-0", "--rank", str(rank)]
            command += ["--rendezvous", rendezvous, "--router", router]
            start_one = functools.partial(start, environment=environment, output=log)
            processes.append(await asyncio.to_thread(start_one, command))
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                await asyncio.to_thread(process.wait)


@contextlib.contextmanager
def logs_on_failure(folder: Path) -> Iterator[None]:
    """Show what the processes said when the test fails."""
    try:
        yield
    except BaseException:
        for file in sorted(folder.glob("*.log")):
            sys.stderr.write(f"--- {file.name}\n{file.read_text(errors='replace')}\n")
        raise


def greedy(num_tokens: int) -> common_pb2.SamplingParams:
    """Greedy sampling of `num_tokens` tokens."""
    return common_pb2.SamplingParams(
        max_tokens=num_tokens,
        top_p=1.0,
        repetition_penalty=1.0,
        num_logprobs=2,
        num_prompt_logprobs=-1,
    )
