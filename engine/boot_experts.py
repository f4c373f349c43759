"""The boot of a rank's experts: in which slots they stand, and how tokens travel to them.

A part of `engine.boot`, by what the configuration of the role says.
"""

from __future__ import annotations

import math

import torch

from engine.kernels.base import Kernels
from engine.model.spec import CommonConfig, num_expert_slots, num_experts
from engine.parallel.deep_ep_shape import ROW_TILE
from engine.parallel.dims import ParallelDims
from engine.parallel.expert_balance import balance_experts
from engine.parallel.expert_placement import ExpertPlacement
from engine.parallel.groups import ProcessGroups
from engine.parallel.open_dispatcher import (
    DispatcherKind,
    OpenDispatcher,
    RankExperts,
    open_decode_dispatcher,
    open_prefill_dispatcher,
)
from runtime.config import DecodeSection, PrefillSection
from runtime.errors import ConfigError


def place_experts(
    section: PrefillSection | DecodeSection,
    config: CommonConfig,
    dims: ParallelDims,
    device: torch.device,
) -> ExpertPlacement:
    """Choose the slots of the experts.

    Nothing is known of their load at the start, so redundant slots are dealt out evenly.

    Raises:
        ConfigError: the ranks cannot split the model, or hold equally many experts.
    """
    num_redundant = section.num_redundant_experts if isinstance(section, DecodeSection) else 0
    num_logical = num_experts(config)
    num_slots = num_expert_slots(config, num_redundant)
    dims.check_model(config, num_physical_experts=num_slots)
    if not num_redundant:
        return ExpertPlacement.identity(num_logical, device)
    slots = balance_experts([1.0] * num_logical, num_slots=num_slots, num_ranks=dims.ep)
    return ExpertPlacement.from_physical(slots, num_logical, device=device)


def open_transfers(
    section: PrefillSection | DecodeSection,
    config: CommonConfig,
    groups: ProcessGroups,
    kernels: Kernels,
    placement: ExpertPlacement,
    *,
    is_halved: bool = False,
    played_ranks: int = 0,
) -> OpenDispatcher | None:
    """Open the way to experts: for decode one that a captured step can hold, for prefill one for
    many tokens.

    None where the axes alone say how tokens travel: on a CPU (but for a measurement that plays one
    of many ranks), and with tensor parallelism.

    Args:
        section: of the role.
        config: of the model.
        groups: the ranks.
        kernels: of the rank.
        placement: of the experts.
        is_halved: every step runs as two micro-batches, so a transfer has half of the tokens.
        played_ranks: for measurements: a decode rank alone plays one of so many; 0 to be itself.

    Raises:
        ConfigError: a step may bring more tokens than the ranks make room for, or the dispatcher
            that is asked for does not run here.
    """
    model = config.experts
    if (section.device == "cpu" and not played_ranks) or model is None or not model.num_moe_layers:
        return None
    experts = RankExperts(
        config=model,
        groups=groups,
        kernels=kernels,
        num_physical_experts=placement.num_physical_experts,
    )
    if isinstance(section, PrefillSection):
        return open_prefill_dispatcher(DispatcherKind.AUTO, experts) if section.dp > 1 else None
    most = section.max_tokens_per_rank
    if section.max_num_seqs > most and groups.dims.ep > 1:
        problem = f"decode.max_tokens_per_rank is {most}"
        raise ConfigError("decode.max_num_seqs", section.max_num_seqs, problem, f"{most} or less")
    room = half_room(most, groups.ep_group.size) if is_halved else most
    kind = DispatcherKind(section.dispatcher)
    if played_ranks and experts.are_fp8:
        kind = DispatcherKind.LOOPBACK
    return open_decode_dispatcher(
        kind, experts, max_tokens_per_rank=room, played_ranks=played_ranks
    )


def half_room(num_tokens: int, num_ranks: int) -> int:
    """Return half of the tokens of a rank, rounded up until those of all ranks fill whole tiles."""
    step = ROW_TILE // math.gcd(num_ranks, ROW_TILE)
    half = -(-num_tokens // 2)
    return min(-(-half // step) * step, num_tokens)
