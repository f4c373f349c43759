"""A model with a KV pool, a runner and tables of experts: what one measurement needs of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.engine.options import BLOCK_SIZE, Routing, Setup
from bench.engine.played_tables import PlayedTables, open_played_tables
from bench.engine.rank_model import RankModel, free_memory
from bench.engine.report import Report
from bench.engine.routing import (
    LayerTables,
    RoutingTables,
    draw_skewed,
    draw_uniform,
    even_experts,
    num_draws,
)
from bench.experts.skew import log_likelihoods
from engine.boot.build import build_kv_pool
from engine.boot.experts import moe_layers
from engine.boot.make_runner import make_runner
from engine.execution import Execution
from engine.memory.kv_pool import KVPool
from engine.options import EngineOptions
from engine.parallel.groups import agree_on_epoch
from engine.parallel.lockstep import Lockstep, Rider, SoloLockstep, create_lockstep
from engine.parallel.wait_recorder import WaitRecorder
from engine.runner import ModelRunner
from runtime.garbage import set_aside, take_back


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One rank during one measurement.

    Attributes:
        rank: its model.
        runner: of the model on a pool of its own.
        epoch: the same on all ranks.
        waits: records the rank's waits for the others; None to record nothing.
    """

    rank: RankModel
    runner: ModelRunner
    epoch: int
    waits: WaitRecorder | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank times and reports."""
        return self.rank.place.rank == 0

    @property
    def is_follower(self) -> bool:
        """Whether rank 0 schedules and samples for this rank."""
        return self.rank.groups.dims.tp_rank > 0

    @property
    def device(self) -> torch.device:
        """Of the rank."""
        return self.rank.device

    def lockstep(self, rider: Rider | None = None) -> Lockstep:
        """How this rank meets the others before each step, as in a worker."""
        groups = self.rank.groups
        if groups.dims.dp == 1:
            return SoloLockstep(rider)
        return create_lockstep(groups.ep_group, self.epoch, self.waits, rider=rider)

    def settle(self) -> None:
        """Begin to measure, all ranks together: what is there is set aside, as in a worker.

        What an earlier call set aside, and nobody has any more, is freed first.
        """
        take_back()
        set_aside()
        self.rank.meet()

    def begin_step(self) -> None:
        """Issue what comes before a step: the experts of its tokens, where tables choose them."""
        tables = self.rank.routing.tables
        if tables is not None:
            tables.begin_step()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all ranks, by rank."""
        row = torch.tensor([list(values)], dtype=torch.float64)
        gathered: list[list[float]] = self.rank.groups.boot_group.all_gather(row).tolist()
        return gathered

    def memory_gb(self) -> float | None:
        """Most bytes of device memory that tensors held, in 10**9; None on a CPU."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device) / 1e9


def open_session(
    rank: RankModel,
    setup: Setup,
    *,
    num_blocks: int,
    options: EngineOptions,
    max_tokens: int,
    num_rows: int | None = None,
) -> Session:
    """Give a model what a measurement needs; all ranks call.

    Args:
        rank: the model.
        setup: says who chooses experts.
        num_blocks: of the pool, block 0 included; ranks may differ.
        options: of the engine: the pool's numbers, and what runs behind a step.
        max_tokens: most tokens of a step on this rank, padding included.
        num_rows: of every step, those that are no padding; None where there is none.
    """
    free_memory(rank.device)  # what the measurement before has left
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.device)
    rank.routing.tables = make_tables(rank, setup, max_tokens, num_rows)
    # What is counted there is read, and not only paid for.
    rank.routing.counts_tables = setup.routing is Routing.SKEWED or rank.moves is not None
    pool = build_kv_pool(rank.model, num_blocks, block_size=BLOCK_SIZE, dtype=options.kv.dtype)
    return Session(
        rank=rank,
        runner=make_runner(rank.model, _fill(pool), options),
        epoch=agree_on_epoch(rank.everyone),
        waits=rank.waits,
    )


def close_session(session: Session) -> None:
    """End a measurement, all ranks together; its pool goes with the last who refers to it."""
    session.rank.meet()
    take_back()  # or what refers to the pool in a cycle would never go
    session.rank.routing.tables = None


def make_tables(
    rank: RankModel, setup: Setup, max_tokens: int, num_rows: int | None
) -> RoutingTables | None:
    """Tables of experts; None where the router chooses, or there is none.

    Ranks with their own tokens draw apart; ranks that share them have to agree on their experts.
    """
    config, dims = rank.measured.config, rank.groups.dims
    if setup.routing is Routing.MODEL or not config.num_moe_layers:
        return None
    own = rank.place.rank if dims.dp > 1 else 0
    if setup.routing is Routing.EVEN:
        table = even_experts(config, max_tokens, rank=own, num_ranks=dims.dp)
        return RoutingTables(table.to(rank.device)[None, None], num_rows=num_rows)
    # Two micro-batches ask once each.
    num_calls = config.num_moe_layers * (1 if rank.execution.overlap is None else 2)
    num_calls += rank.model.with_mtp
    generator = torch.Generator(device=rank.device).manual_seed(setup.seed * dims.world_size + own)
    if setup.routing is Routing.SKEWED:
        return _skewed_tables(rank, setup, max_tokens, num_rows, generator)
    drawn = draw_uniform(
        config,
        num_steps=num_draws(config, max_tokens, num_calls),
        num_calls=num_calls,
        num_tokens=max_tokens,
        generator=generator,
    )
    return RoutingTables(rank.groups.tp_group.broadcast(drawn), num_rows=num_rows)


def _skewed_tables(
    rank: RankModel,
    setup: Setup,
    max_tokens: int,
    num_rows: int | None,
    generator: torch.Generator,
) -> RoutingTables:
    """Tables of a skew that all ranks share and every layer has for itself."""
    if setup.plays:
        return open_played_tables(rank, setup, max_tokens, num_rows, generator)
    config, layers = rank.measured.config, list(moe_layers(rank.model).values())
    log_LE = log_likelihoods(len(layers), config.n_routed_experts, seed=setup.seed)
    drawn = draw_skewed(
        config,
        torch.from_numpy(log_LE),
        num_steps=num_draws(config, max_tokens, len(layers)),
        num_tokens=max_tokens,
        generator=generator,
    )
    gates = [layer.gate.e_score_correction_bias.data_ptr() for layer in layers]
    layer_of = {address: place for place, address in enumerate(gates)}
    return LayerTables(rank.groups.tp_group.broadcast(drawn), layer_of, num_rows=num_rows)


def describe_tables(session: Session) -> Report:
    """What its ranks play, for a report; nothing where they are themselves."""
    tables = session.rank.routing.tables
    return {"played": tables.played} if isinstance(tables, PlayedTables) else {}


def describe_execution(execution: Execution) -> Report:
    """How steps run, for a report: what every "auto" of the section has become."""
    return {
        "two_batch_overlap": execution.overlap is not None,
        "scatter_tokens": execution.scatter_tokens,
        "max_masked_tokens": execution.max_masked_tokens,
        "dispatcher": type(execution.dispatcher).__name__,
        "overlap_shared_expert": execution.overlap_shared_expert,
        "side_stream": execution.side_stream is not None,
        "dependent_launches": execution.dependent_launches,
        "tp_exchange": _name_exchange(execution),
    }


def _name_exchange(execution: Execution) -> str | None:
    """How ranks that share heads send one another rows; None where none keeps a share of them."""
    if execution.tp_group is None or execution.tp_group.size == 1 or not execution.scatter_tokens:
        return None
    return "collectives" if execution.tp_group.sums is None else "nvlink"


def _fill(pool: KVPool) -> KVPool:
    """Contexts of invented requests: numbers as latents have them, never NaN."""
    generator = torch.Generator(device=pool.device).manual_seed(1)
    for index in range(pool.num_layers):
        layer = pool.layer(index)
        drawn = torch.randn(layer.shape[1:], generator=generator, device=pool.device)
        layer.copy_(drawn.to(layer.dtype))
    return pool
