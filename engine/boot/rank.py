"""The boot of one worker rank: meet the other ranks, load the weights, allocate KV, run once.

The same for every role; what a role adds (senders, receivers, books) it builds on the result. Slow
and blocking, so it runs off the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.boot.build import build_kv_pool, build_model
from engine.boot.experts import place_experts
from engine.boot.jit_cache import use_jit_cache
from engine.boot.kv_size import choose_num_blocks, largest_steps, measure_memory
from engine.boot.open_execution import open_execution
from engine.boot.refusals import refuse_for_room
from engine.boot.rehearsal import rehearse, sampled_prefill, smaller_prefills
from engine.boot.warm_up import attention_products, chosen_rows, products, warm_up
from engine.kernels.create import create_kernels
from engine.memory.kv_budget import MemorySums
from engine.memory.kv_pool import KVPool
from engine.model.registry import read_config, spec_of
from engine.model.spec import CommonConfig, ServedModel
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import ProcessGroups, agree_on_epoch, init_process_groups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.weights.progress import Unit, progress_bar
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError
from runtime.logging import fields, get_logger
from runtime.worker import WorkerOptions

GROUP_TIMEOUT_S = 60.0
"""A rank that hangs, and whose death the kernel cannot tell, is given up after this.

While a worker boots `cluster.boot_timeout_s` holds: no two disks and compilers are equally fast."""
# Step plans and lockstep rows are host memory, so a GPU instance needs both backends.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

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
        runner: of the model on that pool.
        launch_waits: whether launching a step takes as long as the step; see `ModelRunner`.
        sums: of the device's memory before that pool, where they were taken.
        close_transfers: frees what the ranks opened with one another, all together, after the last
            step and before they leave the groups.
    """

    groups: ProcessGroups
    epoch: int
    config: CommonConfig
    max_model_len: int
    kv_pool: KVPool
    runner: ModelRunner
    launch_waits: bool = False
    close_transfers: Callable[[], None]
    sums: MemorySums | None = None


def boot_rank(options: WorkerOptions, dims: ParallelDims) -> BootedRank:
    """Boot the rank that `options` describe; its instance is parallel as `dims` say.

    Raises:
        ConfigError: a model, a device or sizes that do not fit together.
        PeerLostError: the other ranks did not come.
    """
    model_section, section = options.config.model, options.section
    config = _read_config(options)
    max_model_len = choose_max_model_len(model_section.max_model_len, config)
    torch.set_num_threads(section.num_threads)
    device = _take_device(section.device, options.rank)
    placement = place_experts(section, config, dims, device)
    groups = init_process_groups(
        dims,
        options.rendezvous,
        backend=_BACKENDS[section.device],
        timeout_s=GROUP_TIMEOUT_S,
        boot_timeout_s=options.config.cluster.boot_timeout_s,
    )
    epoch = agree_on_epoch(groups.tp_group if dims.tp > 1 else groups.ep_group)
    dtype = _DTYPES[options.config.compute_dtype]
    kernels = create_kernels(device, dtype)
    opened = open_execution(
        section, config, groups, kernels=kernels, placement=placement, device=device
    )
    model = build_model(
        model_section.path,
        groups,
        dtype=dtype,
        device=device,
        load_format=model_section.load_format,
        progress=options.rank == 0,
        kernels=kernels,
        placement=placement,
        execution=opened.execution,
    )
    groups.boot_group.barrier()  # from here on ranks take part in one another's steps
    _compile(model, section, show=options.rank == 0)
    model.prepare()  # before the KV pool takes the memory: short prompts want it too
    kv_dtype = None if section.kv_dtype == "auto" else _DTYPES[section.kv_dtype]
    sums = measure_memory(section, model, max_model_len=max_model_len, kv_dtype=kv_dtype)
    num_blocks = choose_num_blocks(section, groups, sums, max_model_len=max_model_len)
    kv_pool = build_kv_pool(model, num_blocks, block_size=section.block_size, dtype=kv_dtype)
    runner = ModelRunner(model, kv_pool, Sampler(config.vocab_size))
    _rehearse(runner, model, section, max_model_len, sums, follows=dims.tp_rank > 0)
    facts = fields(epoch=f"{epoch:016x}", device=kv_pool.device, kv_pool_bytes=kv_pool.nbytes)
    logger.info("the model is ready %s", facts)
    return BootedRank(
        groups=groups,
        epoch=epoch,
        config=config,
        max_model_len=max_model_len,
        kv_pool=kv_pool,
        runner=runner,
        launch_waits=model.waits_for_counts,
        close_transfers=opened.close,
        sums=sums,
    )


def _read_config(options: WorkerOptions) -> CommonConfig:
    """Read the model's configuration; one rank tells what is odd about it."""
    config = read_config(options.config.model.path)
    spec_of(config).check_device(f"{options.role}.device", options.section.device)
    for remark in config.remarks if options.rank == 0 else ():
        logger.warning("%s", remark)
    return config


def _rehearse(
    runner: ModelRunner,
    model: ServedModel,
    section: PrefillSection | DecodeSection,
    max_model_len: int,
    sums: MemorySums | None,
    *,
    follows: bool,
) -> None:
    """Run steps that nobody asked for, all ranks together, so that no request pays for it.

    On a GPU of every size up to the largest one, and with every kind of sampling: kernels compile
    and memory is taken. A rank that `follows` does not sample: the first of its tensor-parallel
    group does.

    Raises:
        ConfigError: the largest step does not fit beside the KV pool.
    """
    runner.run_dummy()
    if runner.kv_pool.device.type == "cpu":
        return
    steps = largest_steps(section, model.attention_rule, max_model_len)
    if isinstance(section, PrefillSection):
        sizes = smaller_prefills(
            max_num_tokens=section.max_num_batched_tokens,
            max_num_seqs=section.max_num_seqs,
            max_model_len=max_model_len,
            block_size=section.block_size,
        )
        steps = [sampled_prefill(section.block_size), *sizes, *steps]
    try:
        for scheduled in steps:
            rehearse(runner, scheduled, follows=follows)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        measured = 0 if sums is None else sums.activations
        raise refuse_for_room(section, "the largest step", measured, sums) from error


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


def _take_device(device: str, rank: int) -> torch.device:
    """Ranks of a host take its devices in order; a rank that sees only its own takes that."""
    if device == "cpu":
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


def _most_tokens(section: PrefillSection | DecodeSection) -> int:
    """The most tokens that this rank runs at once."""
    if isinstance(section, PrefillSection):
        return section.max_num_batched_tokens
    return section.max_num_seqs


def _compile(model: ServedModel, section: PrefillSection | DecodeSection, *, show: bool) -> None:
    """Compile, divided over the ranks; nothing to do on a CPU."""
    if model.device.type != "cuda":
        return
    most = _most_tokens(section)
    todo = products(model, model.kernels, most, rows=chosen_rows(os.environ, most))
    if isinstance(section, PrefillSection):
        todo = [*attention_products(model, model.kernels), *todo]
    with progress_bar("compiling kernels", unit=Unit.CALLS) if show else nullcontext() as moved:
        warm_up(todo, model.groups, synchronize=torch.cuda.synchronize, progress=moved)
