"""A rank that is ready to be measured: groups, model, KV pool and runner, as a worker boots them.

What differs from a worker: weights are invented, experts may be chosen evenly, and calls of kernels
and collectives can be named in a trace. Kernels are compiled for the rows that will come, each
weight shape on one rank, so that no two ranks compile the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from deploy.engine_bench.execution import MakeExecution, RankParts
from deploy.engine_bench.launcher import RankPlace
from deploy.engine_bench.options import Routing, Setup
from deploy.engine_bench.report import say
from deploy.engine_bench.routing import EvenRouting, even_experts
from deploy.engine_bench.shapes import MeasuredModel, choose_model
from engine.build import build_kv_pool, build_model
from engine.config import ModelConfig
from engine.execution import Execution
from engine.kernels.base import Kernels
from engine.kernels.create import create_kernels
from engine.kernels.fp8_rows import GROUP
from engine.kernels.portable import PortableKernels
from engine.memory.kv_pool import KVPool
from engine.model.deepseek_v3 import DeepseekV3ForCausalLM
from engine.parallel.groups import ProcessGroups, RankGroup, init_process_groups
from engine.runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.stage_timer import StageTimer
from engine.warm_up import Product

BLOCK_SIZE = 64
ListProducts = Callable[[DeepseekV3ForCausalLM], Sequence[Product]]
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank, until its process ends.

    Attributes:
        place: which rank.
        measured: the model and what it stands for.
        groups: the ranks.
        timer: names the calls of the model.
        model: with invented weights.
        runner: of the model, with a KV pool.
        device: of the rank.
        close_execution: frees what the ranks opened besides.
    """

    place: RankPlace
    measured: MeasuredModel
    groups: ProcessGroups
    timer: StageTimer
    model: DeepseekV3ForCausalLM
    runner: ModelRunner
    device: torch.device
    close_execution: Callable[[], None]

    @property
    def everyone(self) -> RankGroup:
        """All ranks."""
        return _everyone(self.groups)

    @property
    def is_follower(self) -> bool:
        """Whether rank 0 samples for this rank."""
        return self.groups.dims.tp > 1 and self.place.rank > 0

    def meet(self) -> None:
        """Wait for the device, then for all ranks."""
        self.synchronize()
        self.everyone.barrier()

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory_gb(self) -> float | None:
        """Most bytes of device memory that tensors held, in 10**9; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated() / 1e9

    def close(self) -> None:
        """Leave the groups, all ranks together."""
        self.meet()
        self.close_execution()
        self.groups.destroy()


def open_session(
    setup: Setup,
    place: RankPlace,
    make_execution: MakeExecution,
    *,
    max_tokens: int,
    list_products: ListProducts,
    kv_tokens: int,
    kv_dtype: torch.dtype | None = None,
) -> Session:
    """Make a rank ready.

    Args:
        setup: model and ranks.
        place: which rank.
        make_execution: opens what the ranks need besides.
        max_tokens: most tokens of a step on this rank.
        list_products: products of the model that will come, to compile them ahead.
        kv_tokens: that the KV pool must hold, in whole blocks.
        kv_dtype: of the pool; None for the model's.

    Raises:
        ConfigError: a shape that the ranks cannot split.
        PeerLostError: the other ranks did not come.
    """
    start = time.perf_counter()
    measured = choose_model(setup)
    device = _take_device(setup.device, place)
    groups = init_process_groups(
        setup.dims(place.rank),
        place.rendezvous,
        backend=_BACKENDS[setup.device],
        timeout_s=setup.timeout_s,
    )
    config = measured.config
    timer, kernels = _make_kernels(setup, config, device, max_tokens, place.rank)
    watched = timer.watch_groups(groups)
    parts = RankParts(config=config, groups=watched, kernels=kernels, timer=timer, device=device)
    opened = make_execution(parts)
    model = _build_model(parts, opened.execution)
    say(f"weights are there after {time.perf_counter() - start:.1f} s", rank=place.rank)
    if device.type == "cuda":
        compile_kernels(list_products(model), _everyone(groups))
    say(f"kernels are there after {time.perf_counter() - start:.1f} s", rank=place.rank)
    pool = _fill(build_kv_pool(model, _num_blocks(kv_tokens), dtype=kv_dtype))
    return Session(
        place=place,
        measured=measured,
        groups=groups,
        timer=timer,
        model=model,
        runner=ModelRunner(model, pool, Sampler(config.vocab_size)),
        device=device,
        close_execution=opened.close,
    )


def _make_kernels(
    setup: Setup, config: ModelConfig, device: torch.device, max_tokens: int, rank: int
) -> tuple[StageTimer, Kernels]:
    """Return the timer of the device's kernels, and the kernels that the model is given."""
    timer = StageTimer(
        create_kernels(device)
        if device.type == "cuda"
        else PortableKernels(has_fp8=_is_fp8(config))
    )
    kernels = cast(Kernels, timer)
    if setup.routing is Routing.EVEN and config.num_moe_layers:
        # Ranks that share tokens have to agree on their experts.
        table = even_experts(config, max_tokens, rank=rank % setup.dp, num_ranks=setup.dp)
        kernels = cast(Kernels, EvenRouting(kernels, table.to(device)))
    return timer, kernels


def _build_model(parts: RankParts, execution: Execution) -> DeepseekV3ForCausalLM:
    model = build_model(
        parts.config,
        parts.groups,
        dtype=torch.bfloat16 if _is_fp8(parts.config) else torch.float32,
        device=parts.device,
        load_format="dummy",
        kernels=parts.kernels,
        execution=execution,
    )
    if parts.device.type == "cuda":
        torch.cuda.empty_cache()  # what drawing the weights took; the KV pool wants one piece
    return model


def _is_fp8(config: ModelConfig) -> bool:
    return config.fp8_block_size == GROUP


def compile_kernels(todo: Sequence[Product], group: RankGroup) -> None:
    """Run products that compile: each weight shape on one rank, then all from the cache on all."""
    shapes = sorted({_shape_of(product) for product in todo})
    own = set(shapes[group.rank :: group.size])
    for chosen in ([product for product in todo if _shape_of(product) in own], todo):
        for product in chosen:
            product.run()
        torch.cuda.synchronize()
        group.barrier()


def _shape_of(product: Product) -> str:
    return product.name.split(" x ")[0]


def _everyone(groups: ProcessGroups) -> RankGroup:
    return groups.tp_group if groups.dims.tp > 1 else groups.ep_group


def _take_device(kind: str, place: RankPlace) -> torch.device:
    if kind == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _num_blocks(kv_tokens: int) -> int:
    return -(-kv_tokens // BLOCK_SIZE) + 1  # block 0 is nobody's


def _fill(pool: KVPool) -> KVPool:
    """Contexts of invented requests: numbers as latents have them, never NaN."""
    generator = torch.Generator(device=pool.device).manual_seed(1)
    for index in range(pool.num_layers):
        layer = pool.layer(index)
        drawn = torch.randn(layer.shape[1:], generator=generator, device=pool.device)
        layer.copy_(drawn.to(layer.dtype))
    return pool
