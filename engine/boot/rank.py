"""The boot of one rank: meet the other ranks, load the weights, allocate KV, run once.

The same whatever its steps are like; what a worker adds (senders, receivers, books) it builds on
the result. Slow and blocking, so a server calls it off its event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from engine.boot.build import build_kv_pool, build_model
from engine.boot.captured import capture_short_steps
from engine.boot.experts import check_agreement, counted_experts, place_experts
from engine.boot.jit_cache import use_jit_cache
from engine.boot.kv_size import choose_num_blocks, measure_memory
from engine.boot.make_runner import make_runner
from engine.boot.moves import OpenMoves, can_move, close_of, open_moves
from engine.boot.open_execution import OpenExecution, open_execution
from engine.boot.refusals import refuse_for_room
from engine.boot.rehearsal import all_steps, rehearse
from engine.boot.waits import open_wait_recorder
from engine.boot.warm_up import attention_products, chosen_rows, products, warm_up
from engine.experts.counted import CountedExperts
from engine.experts.placements import ExpertPlacements
from engine.kernels.create import create_kernels
from engine.memory.kv_budget import MemorySums
from engine.memory.kv_pool import KVPool
from engine.model.registry import read_config, spec_of
from engine.model.spec import CommonConfig, ServedModel
from engine.options import ChunkSteps, EngineOptions, ModelOptions
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, agree_on_epoch, init_process_groups
from engine.parallel.wait_recorder import WaitRecorder
from engine.runner import ModelRunner
from engine.streams import Streams
from engine.weights.progress import Unit, progress_bar
from experts.static_start import RecordedLoad
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger

GROUP_TIMEOUT_S = 60.0
"""A rank that hangs, and whose death the kernel cannot tell, is given up after this.

While it boots `boot_timeout_s` holds: no two disks and compilers are equally fast."""
BOOT_TIMEOUT_S = 1800.0
"""How long ranks wait for one another while they boot, if nobody says otherwise."""
# Step plans and lockstep rows are host memory, so a GPU instance needs both backends.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BootedRank:
    """A rank that can run steps.

    Attributes:
        groups: the ranks of the instance.
        epoch: of this life of the instance, the same on all ranks, in [1, 2**63).
        config: of the model.
        max_model_len: most tokens of prompt and output together.
        kv_pool: on the rank's device.
        runner: of the model on that pool; short steps of chunks are captured where they can be.
        launch_waits: whether launching a step takes as long as the step; see `ModelRunner`.
        streams: beside that of its steps; who works beside them takes one here.
        sums: of the device's memory before that pool, where they were taken.
        experts: whose tokens are counted; None for a dense model.
        waits: what the rank records of its waits for the others; None where nothing is.
        close_transfers: forgets captured steps, frees what the ranks opened with one another, and
            ends the streams, all together, after the last step and before they leave the groups.
        moves: what its experts move with, where they may.
    """

    groups: ProcessGroups
    epoch: int
    config: CommonConfig
    max_model_len: int
    kv_pool: KVPool
    runner: ModelRunner
    streams: Streams
    launch_waits: bool = False
    close_transfers: Callable[[], None]
    sums: MemorySums | None = None
    experts: CountedExperts | None = None
    moves: OpenMoves | None = None
    waits: WaitRecorder | None = None


def boot_rank(
    source: ModelOptions,
    options: EngineOptions,
    dims: ParallelDims,
    *,
    rendezvous: str = "",
    boot_timeout_s: float = BOOT_TIMEOUT_S,
    expert_load: RecordedLoad | None = None,
) -> BootedRank:
    """Boot one rank; the others of its instance do the same at the same time.

    Args:
        source: which model.
        options: how it runs; the same on all ranks.
        dims: how the ranks share the model, and which of them this is.
        rendezvous: "host:port" where they meet; unused with one rank.
        boot_timeout_s: seconds that they wait for one another meanwhile.
        expert_load: what experts got when it was recorded, to place them by; the same on all ranks.

    Raises:
        ConfigError: a model, a device or sizes that do not fit together.
        PeerLostError: the other ranks did not come.
    """
    config = _read_config(source, options, is_told=dims.rank == 0)
    max_model_len = choose_max_model_len(source.max_model_len, config)
    device = _take_device(options, dims.rank)
    placements = _place(source, options, config, dims, device=device, load=expert_load)
    groups, epoch = _meet(options, dims, rendezvous, boot_timeout_s)
    check_agreement(expert_load, placements, groups.boot_group)
    streams = Streams(device)
    waits = open_wait_recorder(options, groups, epoch, rendezvous)
    model, opened = _load(
        source, options, groups, config=config, placements=placements, streams=streams, waits=waits
    )
    experts = counted_experts(model, placements, is_scattered=options.steps.scatter_tokens)
    moves = open_moves(model, placements, streams, options) if can_move(options, dims) else None
    groups.boot_group.barrier()  # from here on ranks take part in one another's steps
    _compile(model, options, show=dims.rank == 0)
    model.prepare()  # before the KV pool takes the memory: short prompts want it too
    masked = opened.execution.max_masked_tokens
    runner, sums = _give_pool(model, options, max_model_len, masked, streams=streams)
    _rehearse(runner, model, options, max_model_len, sums, follows=dims.tp_rank > 0, masked=masked)
    runner, drop = capture_short_steps(options, model, runner, max_model_len, sums, streams=streams)
    _tell_ready(runner.kv_pool, epoch)
    closing = (drop, close_of(moves), opened.close, streams.close)
    return BootedRank(
        groups=groups,
        epoch=epoch,
        config=config,
        max_model_len=max_model_len,
        kv_pool=runner.kv_pool,
        runner=runner,
        launch_waits=model.waits_for_counts,
        streams=streams,
        close_transfers=partial(_call_all, *closing),
        sums=sums,
        experts=experts,
        moves=moves,
        waits=waits,
    )


def _tell_ready(kv_pool: KVPool, epoch: int) -> None:
    facts = fields(epoch=f"{epoch:016x}", device=kv_pool.device, kv_pool_bytes=kv_pool.nbytes)
    logger.info("the model is ready %s", facts)


def _place(
    source: ModelOptions,
    options: EngineOptions,
    config: CommonConfig,
    dims: ParallelDims,
    *,
    device: torch.device,
    load: RecordedLoad | None,
) -> ExpertPlacements:
    """Choose the slots of the experts of the layers that are built."""
    return place_experts(
        options,
        config,
        dims,
        device,
        with_mtp=source.with_mtp,
        load=load,
        can_change=can_move(options, dims),
    )


def _meet(
    options: EngineOptions, dims: ParallelDims, rendezvous: str, boot_timeout_s: float
) -> tuple[ProcessGroups, int]:
    """Wait for the other ranks, say that we do, and agree on the epoch."""
    if dims.world_size > 1:
        facts = fields(num_ranks=dims.world_size, rendezvous=rendezvous)
        logger.info("waits for the other ranks %s", facts)
    groups = init_process_groups(
        dims,
        rendezvous,
        backend=_BACKENDS[options.device],
        timeout_s=GROUP_TIMEOUT_S,
        boot_timeout_s=boot_timeout_s,
    )
    return groups, agree_on_epoch(groups.tp_group if dims.tp > 1 else groups.ep_group)


def _call_all(*closing: Callable[[], None]) -> None:
    for close in closing:
        close()


def _load(
    source: ModelOptions,
    options: EngineOptions,
    groups: ProcessGroups,
    *,
    config: CommonConfig,
    placements: ExpertPlacements,
    streams: Streams,
    waits: WaitRecorder | None,
) -> tuple[ServedModel, OpenExecution]:
    """Open how steps run, then build the model for that and load its weights; all ranks call."""
    device = streams.device
    kernels = create_kernels(device, source.dtype)
    opened = open_execution(
        options,
        config,
        groups,
        kernels=kernels,
        num_physical_experts=placements.num_physical_experts,
        streams=streams,
        waits=waits,
    )
    if waits is not None:
        opened = replace(opened, close=partial(_call_all, opened.close, waits.close))
    model = build_model(
        source.path,
        groups,
        dtype=source.dtype,
        device=device,
        load_format=source.load_format,
        with_mtp=source.with_mtp,
        progress=groups.dims.rank == 0,
        kernels=kernels,
        placements=placements,
        execution=opened.execution,
    )
    return model, opened


def _give_pool(
    model: ServedModel,
    options: EngineOptions,
    max_model_len: int,
    max_masked_tokens: int,
    *,
    streams: Streams,
) -> tuple[ModelRunner, MemorySums | None]:
    """Allocate the KV pool, of as many blocks on all ranks; with what was measured before it."""
    sums = measure_memory(
        options,
        model,
        max_model_len=max_model_len,
        max_masked_tokens=max_masked_tokens,
        streams=streams,
    )
    num_blocks = choose_num_blocks(options, model.groups, sums, max_model_len=max_model_len)
    kv_pool = build_kv_pool(
        model, num_blocks, block_size=options.kv.block_size, dtype=options.kv.dtype
    )
    return make_runner(model, kv_pool, options), sums


def _read_config(source: ModelOptions, options: EngineOptions, *, is_told: bool) -> CommonConfig:
    """Read the model's configuration; `is_told` on the one rank that tells what is odd about it."""
    config = read_config(source.path)
    spec_of(config).check_device(options.named("device"), options.device)
    for remark in config.remarks if is_told else ():
        logger.warning("%s", remark)
    return config


def _rehearse(
    runner: ModelRunner,
    model: ServedModel,
    options: EngineOptions,
    max_model_len: int,
    sums: MemorySums | None,
    *,
    follows: bool,
    masked: int = 0,
) -> None:
    """Run steps that nobody asked for, all ranks together, so that no request pays for it.

    On a GPU of every size up to the largest one, and with every kind of sampling: kernels compile
    and memory is taken; also with `masked` tokens, if steps of so many lay out rows masked. A rank
    that `follows` does not sample: the first of its tensor-parallel group does.

    Raises:
        ConfigError: the largest step does not fit beside the KV pool.
    """
    runner.run_dummy()
    if runner.kv_pool.device.type == "cpu":
        return
    steps = all_steps(options, model.attention_rule, max_model_len, masked)
    try:
        for scheduled in steps:
            rehearse(runner, scheduled, follows=follows)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        measured = 0 if sums is None else sums.activations
        raise refuse_for_room(options, "the largest step", measured, sums) from error


def choose_max_model_len(wanted: int, config: CommonConfig) -> int:
    """The context length to serve: `wanted`, or for 0 all that the checkpoint knows.

    Raises:
        ConfigError: it is beyond the checkpoint's.
    """
    most = config.max_position_embeddings
    if wanted > most:
        problem = f"the checkpoint knows {most} positions"
        raise ConfigError("model.max_model_len", wanted, problem, f"at most {most}")
    return wanted or most


def _take_device(options: EngineOptions, rank: int) -> torch.device:
    """Ranks of a host take its devices in order; a rank that sees only its own takes that."""
    torch.set_num_threads(options.num_threads)
    if options.device == "cpu":
        return torch.device("cpu")
    use_jit_cache()
    chosen = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    use_device(chosen)
    return chosen


def use_device(device: torch.device) -> None:
    """Let the calling thread launch on `device`; every thread that runs steps has to call.

    Kernels and events go to the current device, wherever their tensors are, and a new thread's is
    the first that the process sees.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _compile(model: ServedModel, options: EngineOptions, *, show: bool) -> None:
    """Compile, divided over the ranks; nothing to do on a CPU."""
    if model.device.type != "cuda":
        return
    most = options.max_rows
    todo = products(model, most, rows=chosen_rows(os.environ, most))
    if isinstance(options.steps, ChunkSteps):
        todo = [*attention_products(model), *todo]
    with progress_bar("compiling kernels", unit=Unit.CALLS) if show else nullcontext() as moved:
        warm_up(todo, model.groups, synchronize=torch.cuda.synchronize, progress=moved)
