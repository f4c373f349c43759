"""What a decode rank is made of, built in order: the model's side first, then the memory that peers
write, then the books. Blocking and slow (weights), so it runs off the event loop.

Nothing here runs requests; `worker` puts the parts to work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from decode.draft_blocks import DraftSteps
from decode.draft_budget import DraftBudget
from decode.fences import Fences
from decode.live import WriterOrder
from decode.loop import StepRunner
from decode.metrics import DecodeMetrics
from decode.offload import HostBlockStore, HostStore
from decode.open_budget import open_budget
from decode.rank import DecodeRank
from decode.reservations import RankLimits
from decode.scheduler import DecodeScheduler
from decode.tickets import TicketDesk
from engine.boot.captured import try_to_capture
from engine.boot.moves import OpenMoves
from engine.boot.rank import BootedRank
from engine.experts.counted import CountedExperts
from engine.graphs.graph_runner import GraphRunner, capture_steps
from engine.memory.block_pool import BlockPool
from engine.memory.kv_pool import KVPool
from engine.memory.pinned_blocks import PinnedBlocks
from engine.options import EngineOptions, TokenSteps
from engine.parallel.groups import ProcessGroups
from engine.parallel.lockstep import Lockstep, create_lockstep
from engine.parallel.wait_recorder import WaitRecorder
from engine.sampling.graph_sampler import GraphSampler
from engine.streams import Streams
from kv_transfer.layout import KVDtype, KVLayout
from kv_transfer.metadata import SlotArray, SlotLayout
from kv_transfer.ownership import Quarantine
from kv_transfer.receiver import Arrival, KVReceiver
from kv_transfer.settings import tls_contexts, transport_options
from kv_transfer.transport import KV_REGION, METADATA_REGION, MemoryRegion, Transport, peer_name
from kv_transfer.transports import create_transport
from runtime.garbage import set_aside
from runtime.metrics.core import gauge_of
from runtime.pb import decode_pb2
from runtime.pb.common_pb2 import WorkerIdentity
from runtime.rpc.wire import own_wire
from worker.arguments import WorkerOptions
from worker.boot import boot_worker_rank
from worker.engine_options import engine_options

QUARANTINE_SHARE = 0.5
"""Of the pool: beyond it the oldest writers are shut out without waiting for all of the timeout."""
QUARANTINE_PATIENCE_S = 5.0
"""But not earlier: a writer answers between two steps, and a step may take seconds on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSide:
    """The model of this rank, its KV memory, and how it keeps step with the other ranks.

    `launch_waits`, `streams`, `experts`, `moves` and `waits` are those of `BootedRank`; `budget`
    rides in the lockstep, where the drafts of a step are chosen, `max_drafts` at the most; `settle`
    is that of `HostedRank`.
    """

    groups: ProcessGroups
    close_steps: Callable[[], None]
    close_transfers: Callable[[], None]
    epoch: int
    lockstep: Lockstep
    vocab_size: int
    max_model_len: int
    kv_pool: KVPool
    runner: StepRunner
    streams: Streams
    launch_waits: bool = False
    budget: DraftBudget | None = None
    max_drafts: int = 0
    experts: CountedExperts | None = None
    moves: OpenMoves | None = None
    waits: WaitRecorder | None = None
    settle: Callable[[], None] = lambda: None

    def close(self) -> None:
        """After the last step, all ranks together, before the groups end."""
        self.close_steps()
        self.close_transfers()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSide:
    """Memory that prefill workers write into, and who watches it."""

    transport: Transport
    layout: KVLayout
    fences: Fences
    slots: SlotArray
    receiver: KVReceiver

    def endpoint_for(
        self, prefill: WorkerIdentity, decode: WorkerIdentity, transport: str, kv_bytes: int
    ) -> decode_pb2.PeerEndpoint:
        """What a writer needs to reach our memory, of which the KV pool is `kv_bytes`."""
        # In this order: should a fence come between, the endpoint is void and the sender asks
        # again. The other way round it would pass for one of before the fence, and be good.
        writer = peer_name(prefill.instance, prefill.epoch, prefill.rank)
        opaque = self.transport.endpoint(writer)
        return decode_pb2.PeerEndpoint(
            decode=decode,
            transport=transport,
            endpoint=opaque,
            kv_region_bytes=kv_bytes,
            metadata_region_bytes=self.slots.nbytes,
            metadata_slot_bytes=self.slots.layout.slot_bytes,
            fence_generation=self.fences.generation_of(writer),
            wire=own_wire(),
        )

    def watch(self, registry: CollectorRegistry) -> None:
        """Export what is registered, and how many slots are in use."""
        gauge_of(
            registry,
            "pd_kv_transfer_registered_bytes",
            "Memory that is registered with the transport",
            lambda: self.transport.registered_bytes,
        )
        gauge_of(
            registry,
            "pd_kv_transfer_metadata_slots_in_use",
            "Slots of open and quarantined tickets",
            lambda: self.slots.num_slots - self.slots.num_free,
        )

    def close(self) -> None:
        """Watch no more, and let the peers go."""
        self.receiver.close()
        self.transport.close()


def build_model_side(options: WorkerOptions) -> ModelSide:
    """Boot the rank.

    Raises:
        ConfigError: a model or setting that cannot work.
        PeerLostError: not all ranks came.
    """
    booted = boot_worker_rank(options)
    engine = engine_options(options.section)
    runner = choose_runner(engine, booted, show=options.rank == 0)
    group = booted.groups.boot_group
    budget = open_budget(engine, runner, group, max_model_len=booted.max_model_len)
    return ModelSide(
        groups=booted.groups,
        close_steps=runner.close,
        close_transfers=booted.close_transfers,
        epoch=booted.epoch,
        lockstep=create_lockstep(booted.groups.ep_group, booted.epoch, booted.waits, rider=budget),
        waits=booted.waits,
        vocab_size=booted.config.vocab_size,
        max_model_len=booted.max_model_len,
        kv_pool=booted.kv_pool,
        runner=runner,
        streams=booted.streams,
        launch_waits=booted.launch_waits,
        budget=budget,
        max_drafts=engine.draft_choices.most,
        experts=booted.experts,
        moves=booted.moves,
        settle=set_aside,
    )


def choose_runner(options: EngineOptions, booted: BootedRank, *, show: bool) -> GraphRunner:
    """Capture the steps where that is wanted and possible; every rank does the same.

    Args:
        options: say whether.
        booted: with the runner of what is not captured.
        show: draw a progress bar.

    Raises:
        ConfigError: graphs are asked for, and the step of a rank cannot be captured; or the device
            has no memory for them, or fails.
        PeerLostError: another rank ended meanwhile.
    """
    assert isinstance(options.steps, TokenSteps)
    group, num_drafts = booted.groups.boot_group, options.draft_choices
    capture = partial(
        capture_steps,
        booted.runner,
        max_num_seqs=options.max_num_seqs,
        max_model_len=booted.max_model_len,
        group=group,
        num_drafts=num_drafts,
        streams=booted.streams,
    )
    # Steps with drafts are of fixed shape, also where they are called and not replayed. Nothing is
    # padded then, as nothing has to be: any number of requests is a size.
    every_size = range(1, options.max_num_seqs + 1)
    call = partial(capture, buckets=every_size, use_graphs=False)
    if not options.wants_graphs:
        return call() if num_drafts.most else GraphRunner(booted.runner, None)
    captured = try_to_capture(
        options,
        lambda told: capture(progress=told),
        group=group,
        sums=booted.sums,
        show=show,
    )
    if captured is None:
        return call() if num_drafts.most else GraphRunner(booted.runner, None)
    return captured


def build_transfer_side(
    options: WorkerOptions, side: ModelSide, on_arrival: Callable[[Arrival], None]
) -> TransferSide:
    """Register the KV pool and the metadata slots with a transport and start the receiver."""
    settings, pool = options.config.kv_transfer, side.kv_pool
    transport = create_transport(
        settings.transport,
        local_name=peer_name(options.instance, side.epoch, options.rank),
        host=options.listen.reach,
        options=transport_options(
            settings, tls_contexts(options.credentials), port=options.data_port
        ),
    )
    slots = SlotArray(settings.num_metadata_slots, SlotLayout())
    region = MemoryRegion(
        KV_REGION,
        pool.address,
        pool.nbytes,
        device=pool.device.index if pool.device.type == "cuda" else None,
        scratch_bytes=pool.block_bytes,  # block 0 is for padding
    )
    transport.register(region)
    transport.register(slots.region(METADATA_REGION))
    receiver = KVReceiver(transport, slots, epoch=side.epoch, on_arrival=on_arrival)
    layout = KVLayout(
        dtype=KVDtype(str(pool.dtype).removeprefix("torch.")),
        block_size=pool.block_size,
        num_layers=pool.num_layers,
        num_mtp_layers=pool.num_mtp_layers,
        num_heads=pool.kv_spec.num_heads,
        head_width=pool.kv_spec.head_width,
    )
    return TransferSide(
        transport=transport,
        layout=layout,
        fences=Fences(transport.fence),
        slots=slots,
        receiver=receiver,
    )


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
        side.kv_pool.num_blocks,
        decode.block_size,
        enable_prefix_caching=decode.enable_prefix_caching,
    )
    quarantine = Quarantine(
        time.monotonic,
        timeout_s=settings.quarantine_timeout_s,
        max_blocks=int(QUARANTINE_SHARE * pool.num_usable_blocks),
        patience_s=QUARANTINE_PATIENCE_S,
    )
    desk = TicketDesk(
        pool,
        transfer.slots,
        transfer.receiver,
        quarantine,
        fence_generation=transfer.fences.generation_of,
    )
    scheduler = DecodeScheduler(
        pool,
        _host_store(side, decode.preemption_host_blocks),
        max_num_seqs=decode.sizes.max_num_seqs,
        max_model_len=side.max_model_len,
        drafts=DraftSteps(num_drafts=side.max_drafts, takes=GraphSampler.takes),
    )
    limits = RankLimits(
        max_model_len=side.max_model_len,
        transfer_timeout_s=settings.transfer_timeout_s,
        vocab_size=side.vocab_size,
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


def _host_store(side: ModelSide, num_blocks: int) -> HostStore:
    """Where preempted KV goes; a GPU's through pinned memory, which is allocated now."""
    if side.kv_pool.device.type == "cuda":
        pinned = PinnedBlocks(side.kv_pool, num_blocks, side.streams)
        return HostBlockStore(pinned, num_blocks)
    return HostBlockStore(side.kv_pool, num_blocks)
