"""What a decode rank is made of, built in order: the model's side first, then the memory that peers
write, then the books. Blocking and slow (weights), so it runs off the event loop.

Nothing here runs requests; `worker` puts the parts to work.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from decode.live import WriterOrder
from decode.lockstep import Lockstep, agree_on_epoch, create_lockstep
from decode.loop import StepRunner
from decode.metrics import DecodeMetrics
from decode.offload import HostBlockStore
from decode.options import WorkerOptions
from decode.rank import DecodeRank
from decode.reservations import RankLimits
from decode.scheduler import DecodeScheduler
from decode.tickets import TicketDesk
from engine.build import build_kv_pool, build_model
from engine.config import ModelConfig
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotArray, SlotLayout
from kv_transfer.ownership import Quarantine
from kv_transfer.receiver import Arrival, KVReceiver
from kv_transfer.transport import KV_REGION, METADATA_REGION, MemoryRegion, Transport, peer_name
from kv_transfer.transports import create_transport
from runtime.errors import ConfigError

GROUP_TIMEOUT_S = 60.0
"""A rank that hangs, and whose death the kernel cannot tell, is given up after this."""
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
QUARANTINE_SHARE = 0.5
"""Of the pool: beyond it the oldest writers are shut out without waiting for their answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSide:
    """The model of this rank and its KV memory."""

    groups: ProcessGroups
    epoch: int
    lockstep: Lockstep
    vocab_size: int
    max_model_len: int
    kv_pool: KVPool
    runner: StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSide:
    """Memory that prefill workers write into, and who watches it."""

    transport: Transport
    layout: KVLayout
    slots: SlotArray
    receiver: KVReceiver


def build_model_side(options: WorkerOptions) -> ModelSide:
    """Meet the other ranks, load the weights, allocate the KV pool, run once.

    Raises:
        ConfigError: a model or setting that cannot work.
        PeerLostError: not all ranks came.
    """
    decode, model_section = options.config.decode, options.config.model
    torch.set_num_threads(decode.num_threads)
    dims = ParallelDims(dp=decode.dp, ep=decode.dp, rank=options.rank)
    device = "cpu" if decode.device == "cpu" else f"cuda:{options.rank % _num_devices()}"
    groups = init_process_groups(
        dims, options.rendezvous, backend=_BACKENDS[decode.device], timeout_s=GROUP_TIMEOUT_S
    )
    model = build_model(
        model_section.path,
        groups,
        dtype=_TORCH_DTYPES[model_section.dtype],
        device=device,
        load_format=model_section.load_format,
        progress=options.rank == 0,
    )
    kv_pool = build_kv_pool(
        model,
        decode.num_blocks,
        block_size=decode.block_size,
        dtype=None if decode.kv_dtype == "auto" else _TORCH_DTYPES[decode.kv_dtype],
    )
    runner = ModelRunner(model, kv_pool, Sampler(model.config.vocab_size))
    runner.run_dummy()
    epoch = agree_on_epoch(groups.ep_group)
    return ModelSide(
        groups=groups,
        epoch=epoch,
        lockstep=create_lockstep(groups.ep_group, epoch),
        vocab_size=model.config.vocab_size,
        max_model_len=_max_model_len(options, model.config),
        kv_pool=kv_pool,
        runner=runner,
    )


def build_transfer_side(
    options: WorkerOptions, side: ModelSide, on_arrival: Callable[[Arrival], None]
) -> TransferSide:
    """Register the KV pool and the metadata slots with a transport and start the receiver."""
    settings, pool = options.config.kv_transfer, side.kv_pool
    transport = create_transport(
        settings.transport,
        local_name=peer_name(options.instance, side.epoch, options.rank),
        host=options.host,
    )
    slots = SlotArray(settings.num_metadata_slots, SlotLayout())
    transport.register(MemoryRegion(KV_REGION, pool.address, pool.nbytes))
    transport.register(slots.region(METADATA_REGION))
    receiver = KVReceiver(transport, slots, epoch=side.epoch, on_arrival=on_arrival)
    layout = KVLayout(
        dtype=KVDtype(str(pool.dtype).removeprefix("torch.")),
        block_size=pool.block_size,
        num_layers=pool.num_layers,
        latent_dim=pool.latent_dim,
    )
    return TransferSide(transport=transport, layout=layout, slots=slots, receiver=receiver)


def build_rank(
    options: WorkerOptions,
    side: ModelSide,
    transfer: TransferSide,
    metrics: DecodeMetrics,
    order: Callable[[WriterOrder], None],
) -> DecodeRank:
    """The books: block pool, tickets, scheduler, and the rank that conducts them."""
    decode, settings = options.config.decode, options.config.kv_transfer
    pool = BlockPool(
        decode.num_blocks,
        decode.block_size,
        enable_prefix_caching=decode.enable_prefix_caching,
    )
    quarantine = Quarantine(
        time.monotonic,
        timeout_s=settings.quarantine_timeout_s,
        max_blocks=int(QUARANTINE_SHARE * pool.num_usable_blocks),
    )
    desk = TicketDesk(
        pool,
        transfer.slots,
        transfer.receiver,
        quarantine,
        draw_nonce,
        fence_generation=lambda: transfer.transport.fence_generation,
    )
    scheduler = DecodeScheduler(
        pool,
        HostBlockStore(side.kv_pool, decode.preemption_host_blocks),
        max_num_seqs=decode.max_num_seqs,
        max_model_len=side.max_model_len,
    )
    limits = RankLimits(
        max_model_len=side.max_model_len,
        max_num_reserved=decode.max_num_reserved,
        transfer_timeout_s=settings.transfer_timeout_s,
    )
    return DecodeRank(
        pool,
        desk,
        scheduler,
        limits=limits,
        metrics=metrics,
        clock=time.monotonic,
        order=order,
    )


def build_metrics() -> tuple[CollectorRegistry, DecodeMetrics]:
    """The metrics of this process and the registry that serves them."""
    registry = CollectorRegistry()
    return registry, DecodeMetrics(registry)


def draw_nonce() -> int:
    """Name an allocation: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


def _num_devices() -> int:
    return max(torch.cuda.device_count(), 1)


def _max_model_len(options: WorkerOptions, config: ModelConfig) -> int:
    wanted, most = options.config.model.max_model_len, config.max_position_embeddings
    if wanted > most:
        raise ConfigError(
            "model.max_model_len", wanted, f"the checkpoint has {most} positions", f"at most {most}"
        )
    return wanted or most
