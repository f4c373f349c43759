"""What every rank of a prefill worker is made of: groups, model, KV pool, transport, sender.

Reads as the list of what happens at boot. Nothing here knows gRPC, requests or the router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.build import build_kv_pool, build_model
from engine.config import ModelConfig
from engine.memory.kv_pool import KVPool
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, init_process_groups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotLayout
from kv_transfer.sender import KVSender
from kv_transfer.transport import KV_REGION, MemoryRegion, Transport, peer_name
from kv_transfer.transports import create_transport
from prefill.kv_push import PushSettings, ReadyCheck, always_ready
from prefill.rank_link import agree_on_epoch
from prefill.rank_plan import Closure, PlanShape
from prefill.rank_sender import RankSender, closure_of
from runtime.config import ClusterConfig
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

COLLECTIVE_TIMEOUT_S = 60.0
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Which process this is.

    Attributes:
        config: of the cluster.
        instance: name of the worker, for example "prefill-0".
        rank: in the tensor-parallel group.
        rendezvous: "host:port" where the ranks meet; unused with one rank.
        router: "host:port" of the router's control process.
        host: interface that peers reach us at.
        secret: of the cluster.
    """

    config: ClusterConfig
    instance: str
    rank: int
    rendezvous: str
    router: str
    host: str
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSide:
    """What computes: the model of this rank and its KV memory."""

    groups: ProcessGroups
    epoch: int
    model_config: ModelConfig
    max_model_len: int
    kv_pool: KVPool
    runner: ModelRunner
    plan_shape: PlanShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSide:
    """What sends: layouts, transport, sender, and how layers are grouped for it."""

    layout: KVLayout
    slot_layout: SlotLayout
    transport: Transport
    sender: RankSender
    push: PushSettings

    def close(self) -> None:
        """Stop sending and let the peers go; takes at most the sender's drain timeout."""
        self.sender.close()
        self.transport.close()


def build_model_side(options: WorkerOptions) -> ModelSide:
    """Meet the other ranks, load the weights, allocate the KV pool, run once. Slow; blocks.

    Raises:
        ConfigError: a model, a device or sizes that do not fit together.
        PeerLostError: the other ranks did not come.
    """
    config, section = options.config, options.config.prefill
    model_path = checkpoint_dir(config)
    model_config = ModelConfig.from_dir(model_path)
    max_model_len = choose_max_model_len(config, model_config)
    torch.set_num_threads(section.num_threads)
    ep = section.tp if section.expert_parallel else 1
    dims = ParallelDims(tp=section.tp, ep=ep, rank=options.rank)
    dims.check_model(model_config)
    groups = init_process_groups(
        dims, options.rendezvous, backend=BACKENDS[section.device], timeout_s=COLLECTIVE_TIMEOUT_S
    )
    epoch = agree_on_epoch(groups.tp_group)
    model = build_model(
        model_path,
        groups,
        dtype=DTYPES[config.model.dtype],
        device=choose_device(config, options.rank),
        load_format=config.model.load_format,
        progress=options.rank == 0,
    )
    kv_pool = build_kv_pool(
        model,
        section.num_blocks,
        block_size=section.block_size,
        dtype=None if section.kv_dtype == "auto" else DTYPES[section.kv_dtype],
    )
    runner = ModelRunner(model, kv_pool, Sampler(model_config.vocab_size))
    runner.run_dummy()  # every rank takes part, so that the first request does not pay for it
    logger.info(
        "the model is ready %s",
        fields(epoch=f"{epoch:016x}", device=kv_pool.device, kv_pool_bytes=kv_pool.nbytes),
    )
    return ModelSide(
        groups=groups,
        epoch=epoch,
        model_config=model_config,
        max_model_len=max_model_len,
        kv_pool=kv_pool,
        runner=runner,
        plan_shape=plan_shape_of(config, max_model_len),
    )


def build_send_side(
    options: WorkerOptions, side: ModelSide, on_closed: Callable[[Closure], None]
) -> SendSide:
    """Register the KV pool with a transport and start the sender's threads.

    Args:
        options: which rank of what.
        side: whose KV is sent.
        on_closed: told of each ticket that the sender has closed, on one of its threads.
    """
    settings, kv_pool = options.config.kv_transfer, side.kv_pool
    layout, slot_layout = layout_of(kv_pool), SlotLayout()
    transport = create_transport(
        settings.transport,
        local_name=peer_name(options.instance, side.epoch, options.rank),
        host=options.host,
    )
    region = MemoryRegion(KV_REGION, kv_pool.address, kv_pool.nbytes)
    transport.register(region)
    sender = KVSender(
        transport,
        layout,
        slot_layout,
        kv_region=region,
        on_closed=lambda report: on_closed(closure_of(report)),
        part=options.rank,
        num_parts=options.config.prefill.tp,
        num_threads=settings.num_sender_threads,
    )
    push = PushSettings(
        num_layers=kv_pool.num_layers,
        layers_per_group=settings.layers_per_group,
        record_ready=ready_recorder(kv_pool.device),
    )
    return SendSide(
        layout=layout,
        slot_layout=slot_layout,
        transport=transport,
        sender=RankSender(sender),
        push=push,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """One rank, ready to run."""

    model: ModelSide
    send: SendSide


def build_rank(options: WorkerOptions, on_closed: Callable[[Closure], None]) -> RankParts:
    """Boot one rank: the model's side first, then what sends its KV. Slow; blocks."""
    model = build_model_side(options)
    return RankParts(model=model, send=build_send_side(options, model, on_closed))


def checkpoint_dir(config: ClusterConfig) -> Path:
    """The folder of the checkpoint.

    Raises:
        ConfigError: none is named.
    """
    if not config.model.path:
        raise ConfigError("model.path", "", "no checkpoint is named", "a folder with config.json")
    return Path(config.model.path)


def choose_max_model_len(config: ClusterConfig, model_config: ModelConfig) -> int:
    """The context length to serve.

    Raises:
        ConfigError: it is beyond the checkpoint's.
    """
    most = model_config.max_position_embeddings
    wanted = config.model.max_model_len or most
    if wanted > most:
        raise ConfigError(
            "model.max_model_len",
            wanted,
            f"the checkpoint knows {most} positions",
            f"at most {most}",
        )
    return wanted


def choose_device(config: ClusterConfig, rank: int) -> torch.device:
    """The device of one rank: ranks of a host take its devices in order."""
    if config.prefill.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", rank % max(torch.cuda.device_count(), 1))


def layout_of(kv_pool: KVPool) -> KVLayout:
    """How decode has to store KV to take ours."""
    return KVLayout(
        dtype=KVDtype(str(kv_pool.dtype).removeprefix("torch.")),
        block_size=kv_pool.block_size,
        num_layers=kv_pool.num_layers,
        latent_dim=kv_pool.latent_dim,
    )


def plan_shape_of(config: ClusterConfig, max_model_len: int) -> PlanShape:
    """The size of step plans: the same on every rank."""
    return PlanShape(
        max_num_tokens=config.prefill.max_num_batched_tokens,
        max_num_seqs=config.prefill.max_num_seqs,
        max_num_blocks=-(-max_model_len // config.prefill.block_size),
    )


def ready_recorder(device: torch.device) -> Callable[[], ReadyCheck | None]:
    """What says that the KV issued so far is written: an event on a GPU, nothing on a CPU."""
    if device.type == "cpu":
        return always_ready

    def record() -> ReadyCheck:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.query

    return record
