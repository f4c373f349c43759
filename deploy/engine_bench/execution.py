"""What the options ask of the ranks of a model: sharding of rows, collectives, dispatcher, overlap.

Buffers that a library registers belong to this: they are opened by all ranks before the model is
built, and closed by all of them after its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from deploy.engine_bench.options import Collectives, DecodeOptions, PrefillOptions
from engine.boot_execution import decode_rule
from engine.boot_experts import half_room
from engine.config import ModelConfig
from engine.execution import Execution
from engine.kernels.base import Kernels
from engine.micro_batches import OverlapRule
from engine.parallel.deep_ep_shape import ROW_TILE
from engine.parallel.groups import ProcessGroups
from engine.parallel.open_dispatcher import (
    DispatcherKind,
    OpenDispatcher,
    RankExperts,
    open_decode_dispatcher,
    open_prefill_dispatcher,
)
from engine.parallel.symmetric import SymmetricGroup, SymmetricOptions, open_symmetric_group
from engine.side_stream import SideStream
from engine.stage_timer import StageTimer
from runtime.errors import ConfigError

_MIN_SYMMETRIC_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParts:
    """What an execution is made of.

    Attributes:
        config: of the model that is run.
        groups: the ranks.
        kernels: of the model.
        timer: names collectives.
        device: of the rank.
    """

    config: ModelConfig
    groups: ProcessGroups
    kernels: Kernels
    timer: StageTimer
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenExecution:
    """An execution, and how to close what it holds."""

    execution: Execution
    close: Callable[[], None] = lambda: None


MakeExecution = Callable[[RankParts], OpenExecution]


def prefill_execution(options: PrefillOptions, parts: RankParts) -> OpenExecution:
    """Open what a prefill measurement asks for; all ranks call.

    Raises:
        ConfigError: a library or a link is missing.
    """
    overlap = OverlapRule(lag=options.lag, min_tokens=_min_tokens(options))
    symmetric = None
    if options.collectives is Collectives.SYMMETRIC:
        symmetric = _open_symmetric(options, parts)
    opened = _open_prefill_dispatcher(options, parts)

    def close() -> None:
        for part in (symmetric, opened):
            if part is not None:
                part.close()

    return OpenExecution(
        execution=Execution(
            scatter_tokens=options.is_scattered,
            collectives=None if symmetric is None else parts.timer.watch(symmetric),
            dispatcher=None if opened is None else opened.dispatcher,
            overlap=overlap if options.overlap else None,
        ),
        close=close,
    )


def decode_execution(options: DecodeOptions, parts: RankParts) -> OpenExecution:
    """Open what a decode measurement asks for; all ranks call.

    Raises:
        ConfigError: a library or a link is missing.
    """
    setup, experts = options.setup, _experts(parts)
    kind = setup.dispatcher
    is_beside = options.side_stream and parts.device.type == "cuda"
    execution = Execution(
        dependent_launches=options.dependent_launches,
        side_stream=SideStream(parts.device) if is_beside else None,
    )
    if setup.dp == 1:
        # A rank alone plays one of many, or has nobody to send to.
        if not (setup.shard_of and experts.are_fp8):
            return OpenExecution(execution=execution)
        kind = DispatcherKind.LOOPBACK
    room = _room(options.batch, setup.dp)
    opened = open_decode_dispatcher(
        kind,
        experts,
        max_tokens_per_rank=half_room(room, setup.dp) if options.two_batch_overlap else room,
        played_ranks=setup.shard_of,
    )
    if options.two_batch_overlap:
        takes_turns = opened is not None and opened.dispatcher.takes_turns
        execution = replace(execution, overlap=decode_rule(takes_turns=takes_turns))
    if opened is None:
        return OpenExecution(execution=execution)
    return OpenExecution(
        execution=replace(execution, dispatcher=opened.dispatcher), close=opened.close
    )


def _min_tokens(options: PrefillOptions) -> int:
    """Batches are cut in two, a single prompt as the engine does."""
    return min(OverlapRule().min_tokens, options.batch_tokens)


def _open_symmetric(options: PrefillOptions, parts: RankParts) -> SymmetricGroup:
    """Room for the largest sum of a batch."""
    largest = options.batch_tokens * parts.config.hidden_size * 2
    group = open_symmetric_group(
        parts.groups.tp_group,
        parts.device,
        SymmetricOptions(
            max_bytes=max(largest, _MIN_SYMMETRIC_BYTES), sum_slices=parts.kernels.sum_slices
        ),
    )
    if group is None:
        problem = "the ranks cannot read each other's memory"
        raise ConfigError("collectives", "symmetric", problem, "nccl")
    return group


def _open_prefill_dispatcher(options: PrefillOptions, parts: RankParts) -> OpenDispatcher | None:
    kind = options.setup.dispatcher
    if options.setup.dp == 1 or kind is DispatcherKind.GATHERED:
        return None  # the collectives of the process group
    return open_prefill_dispatcher(kind, _experts(parts))


def _experts(parts: RankParts) -> RankExperts:
    return RankExperts(config=parts.config, groups=parts.groups, kernels=parts.kernels)


def _room(batch: int, num_ranks: int) -> int:
    """Most tokens of a rank, such that those of all ranks fill whole tiles."""
    step = ROW_TILE // math.gcd(num_ranks, ROW_TILE)
    return -(-batch // step) * step
