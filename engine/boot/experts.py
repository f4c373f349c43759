"""The boot of a rank's experts: in which slots they stand, and how tokens travel to them.

A part of `engine.boot.rank`, by what its options say.
"""

from __future__ import annotations

import torch

from engine.model.spec import CommonConfig, num_expert_slots, num_experts
from engine.options import ChunkSteps, DispatcherKind, EngineOptions
from engine.parallel.choose_dispatcher import OpenDispatcher, RankExperts, choose_dispatcher
from engine.parallel.dims import ParallelDims
from engine.parallel.expert_balance import balance_experts
from engine.parallel.expert_placement import ExpertPlacement
from runtime.errors import ConfigError


def place_experts(
    options: EngineOptions, config: CommonConfig, dims: ParallelDims, device: torch.device
) -> ExpertPlacement:
    """Choose the slots of the experts.

    Nothing is known of their load at the start, so redundant slots are dealt out evenly.

    Raises:
        ConfigError: the ranks cannot split the model, or hold equally many experts.
    """
    num_redundant, field = options.num_redundant_experts, options.named("num_redundant_experts")
    num_logical = num_experts(config)
    num_slots = num_expert_slots(config, num_redundant, field=field)
    dims.check_model(config, num_physical_experts=num_slots)
    if not num_redundant:
        return ExpertPlacement.identity(num_logical, device)
    slots = balance_experts([1.0] * num_logical, num_slots=num_slots, num_ranks=dims.ep)
    return ExpertPlacement.from_physical(slots, num_logical, device=device)


def open_dispatcher(
    options: EngineOptions, experts: RankExperts, *, played_ranks: int = 0
) -> OpenDispatcher:
    """Choose and open the way to experts that the options ask for; all ranks call.

    Args:
        options: of the engine.
        experts: of this rank.
        played_ranks: for measurements: a rank alone, with steps of single tokens, plays one of so
            many; 0 to be itself.

    Raises:
        ConfigError: a step may bring more tokens than the ranks make room for, or the dispatcher
            that is asked for does not run here.
    """
    steps = options.steps
    if isinstance(steps, ChunkSteps):
        return choose_dispatcher(experts)
    is_on_gpu, most = options.device != "cpu", steps.max_tokens_per_rank
    is_fixed = (is_on_gpu or played_ranks) and experts.config.num_moe_layers
    if is_fixed and options.max_rows > most and experts.groups.dims.ep > 1:
        each = options.max_rows // options.max_num_seqs
        problem = f"{options.named('max_tokens_per_rank')} is {most}"
        if each > 1:
            problem += f", and with its drafts a request brings {each} tokens to a step"
        path, fitting = options.named("max_num_seqs"), max(most // each, 1)
        raise ConfigError(path, options.max_num_seqs, problem, f"{fitting} or less")
    return choose_dispatcher(
        experts,
        steps.dispatcher if is_on_gpu else DispatcherKind.AUTO,
        max_tokens_per_rank=most,
        played_ranks=played_ranks,
    )
