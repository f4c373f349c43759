"""What every rank of a prefill worker is made of: groups, model, KV pool, transport, sender.

Reads as the list of what happens at boot. Nothing here knows gRPC, requests or the router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from engine.boot.rank import BootedRank
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotLayout
from kv_transfer.sender import KVSender
from kv_transfer.settings import tls_contexts, transport_options
from kv_transfer.ticket import SendOutcome, SendReport
from kv_transfer.transport import KV_REGION, MemoryRegion, Transport, peer_name
from kv_transfer.transports import create_transport
from prefill.kv_push import PushSettings, ReadyCheck, always_ready
from prefill.rank_plan import Closure, ClosureOutcome, PlanShape
from prefill.scheduler import Scheduler
from runtime.config import ClusterConfig, PrefillSection
from runtime.garbage import set_aside
from runtime.metrics.core import gauge_of
from worker.arguments import WorkerOptions
from worker.boot import boot_worker_rank
from worker.host import HostedRank

_OUTCOMES = {
    SendOutcome.SENT: ClosureOutcome.SENT,
    SendOutcome.ABANDONED: ClosureOutcome.ABANDONED,
    SendOutcome.FAILED: ClosureOutcome.FAILED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSide:
    """What sends: layouts, transport, sender, and how layers are grouped for it."""

    layout: KVLayout
    slot_layout: SlotLayout
    transport: Transport
    sender: KVSender
    push: PushSettings

    def watch(self, registry: CollectorRegistry) -> None:
        """Export what is registered."""
        gauge_of(
            registry,
            "pd_kv_transfer_registered_bytes",
            "Memory that is registered with the transport",
            lambda: self.transport.registered_bytes,
        )

    def close(self) -> None:
        """Stop sending and let the peers go; takes at most the sender's drain timeout."""
        self.sender.close()
        self.transport.close()


def build_send_side(
    options: WorkerOptions, side: BootedRank, on_closed: Callable[[Closure], None]
) -> SendSide:
    """Register the KV pool with a transport and start the sender's threads.

    Args:
        options: which rank of what.
        side: whose KV is sent.
        on_closed: told of each ticket that the sender has closed, on one of its threads.
    """
    settings, kv_pool = options.config.kv_transfer, side.kv_pool
    num_ranks = side.groups.dims.tp
    layout, slot_layout = layout_of(kv_pool, num_ranks), SlotLayout()
    transport = create_transport(
        settings.transport,
        local_name=peer_name(options.instance, side.epoch, options.rank),
        host=options.listen.reach,
        options=transport_options(
            settings, tls_contexts(options.credentials), port=options.data_port
        ),
    )
    region = MemoryRegion(
        KV_REGION,
        kv_pool.address,
        kv_pool.nbytes,
        device=kv_pool.device.index if kv_pool.device.type == "cuda" else None,
        scratch_bytes=kv_pool.block_bytes,  # block 0 is for padding
    )
    transport.register(region)
    sender = KVSender(
        transport,
        layout,
        slot_layout,
        kv_region=region,
        on_closed=lambda report: on_closed(closure_of(report)),
        part=side.groups.dims.tp_rank,
        num_parts=num_ranks,
        splits_heads=kv_pool.kv_spec.is_split,
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
        sender=sender,
        push=push,
    )


def closure_of(report: SendReport) -> Closure:
    """What the report means for rank 0 and for decode."""
    first, last = report.first_post_at, report.last_done_at
    return Closure(
        nonce=report.nonce,
        outcome=_OUTCOMES[report.outcome],
        drained=report.drained,
        num_bytes=report.num_bytes,
        num_descriptors=report.num_descriptors,
        post_s=report.post_s,
        wire_s=report.wire_s,
        transfer_s=last - first if first is not None and last is not None else 0.0,
        finished_at=last or 0.0,
        error_code=report.error.code if report.error else None,
        error=report.error.message if report.error else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """One rank, ready to run: what computes, what sends its KV, and the size of step plans."""

    model: BootedRank
    send: SendSide
    plan_shape: PlanShape

    def hosted(self) -> HostedRank:
        """The same to whoever hosts it."""
        return HostedRank(
            groups=self.model.groups,
            epoch=self.model.epoch,
            max_model_len=self.model.max_model_len,
            close_transfer=self.send.close,
            close_model=self.model.close_transfers,
            settle=set_aside,
        )


def build_rank(options: WorkerOptions, on_closed: Callable[[Closure], None]) -> RankParts:
    """Boot one rank: the model's side first, then what sends its KV. Slow; blocks."""
    model = boot_worker_rank(options)
    send = build_send_side(options, model, on_closed)
    model.groups.boot_group.barrier()  # registering memory may take one rank longer than another
    return RankParts(
        model=model,
        send=send,
        plan_shape=plan_shape_of(options.config, model.max_model_len),
    )


def build_scheduler(section: PrefillSection, num_blocks: int) -> Scheduler:
    """The books: block pool and queues."""
    pool = BlockPool(
        num_blocks, section.block_size, enable_prefix_caching=section.enable_prefix_caching
    )
    return Scheduler(
        pool,
        max_num_seqs=section.sizes.max_num_seqs,
        max_num_batched_tokens=section.sizes.max_num_batched_tokens,
    )


def layout_of(kv_pool: KVPool, num_ranks: int) -> KVLayout:
    """How decode has to store KV to take that of `num_ranks` of us: with the heads of all."""
    spec = kv_pool.kv_spec
    return KVLayout(
        dtype=KVDtype(str(kv_pool.dtype).removeprefix("torch.")),
        block_size=kv_pool.block_size,
        num_layers=kv_pool.num_layers,
        num_mtp_layers=kv_pool.num_mtp_layers,
        num_heads=spec.num_heads * num_ranks if spec.is_split else spec.num_heads,
        head_width=spec.head_width,
    )


def plan_shape_of(config: ClusterConfig, max_model_len: int) -> PlanShape:
    """The size of step plans: the same on every rank."""
    return PlanShape(
        max_num_tokens=config.prefill.sizes.max_num_batched_tokens,
        max_num_seqs=config.prefill.sizes.max_num_seqs,
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
