"""What the options ask of the ranks of a model: sharding of rows, collectives, dispatcher, overlap.

Buffers that a library registers belong to this: they are opened by all ranks before the model is
built, and closed by all of them after its last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deploy.engine_bench.options import Collectives, Dispatcher, PrefillOptions, Setup
from deploy.engine_bench.report import say
from engine.config import ModelConfig
from engine.execution import Execution
from engine.kernels.base import Kernels
from engine.micro_batches import OverlapRule
from engine.parallel.groups import ProcessGroups
from engine.parallel.symmetric import SymmetricGroup, SymmetricOptions, open_symmetric_group
from engine.parallel.token_dispatcher import TokenDispatcher
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
    dispatcher, close_dispatcher = None, None
    if options.setup.dp > 1 and _wants_deep_ep(options.setup):
        dispatcher, close_dispatcher = _open_normal(parts)

    def close() -> None:
        if symmetric is not None:
            symmetric.close()
        if close_dispatcher is not None:
            close_dispatcher()

    return OpenExecution(
        execution=Execution(
            scatter_tokens=options.is_scattered,
            collectives=None if symmetric is None else parts.timer.watch(symmetric),
            dispatcher=dispatcher,
            overlap=overlap if options.overlap else None,
        ),
        close=close,
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


def _wants_deep_ep(setup: Setup) -> bool:
    from engine.parallel import deep_ep

    if setup.dispatcher is Dispatcher.AUTO:
        is_there = setup.device == "cuda" and deep_ep.is_available()
        say(f"tokens travel by {'DeepEP' if is_there else 'all-to-all'}")
        return is_there
    return setup.dispatcher is Dispatcher.DEEP_EP


def _open_normal(parts: RankParts) -> tuple[TokenDispatcher[Any], Callable[[], None]]:
    from engine.parallel.deep_ep import open_normal_buffer
    from engine.parallel.deep_ep_normal_dispatcher import DeepEPNormalDispatcher
    from engine.parallel.deep_ep_shape import NormalShape

    config, group = parts.config, parts.groups.ep_group
    shape = NormalShape(
        num_ranks=group.size,
        num_experts=config.n_routed_experts,
        hidden_size=config.hidden_size,
    )
    buffer = open_normal_buffer(group, shape)
    return DeepEPNormalDispatcher(parts.kernels, buffer), buffer.close
