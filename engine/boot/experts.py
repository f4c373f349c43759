"""The boot of a rank's experts: in which slots they stand, and how tokens travel to them.

A part of `engine.boot.rank`, by what its options say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch

from engine.experts.counted import CountedExperts
from engine.experts.counter import ExpertCounter
from engine.experts.placements import ExpertPlacements, check_table
from engine.layers.moe import MoE
from engine.model.spec import CommonConfig, ServedModel, check_dims, num_expert_slots, num_experts
from engine.options import ChunkSteps, DispatcherKind, EngineOptions
from engine.parallel.choose_dispatcher import OpenDispatcher, Play, RankExperts, choose_dispatcher
from engine.parallel.dims import ParallelDims
from engine.parallel.groups import RankGroup
from experts.balance import balance_experts
from experts.static_start import RecordedLoad
from runtime.errors import ConfigError

_LAYER = re.compile(r"\blayers\.(\d+)\b")


def place_experts(
    options: EngineOptions,
    config: CommonConfig,
    dims: ParallelDims,
    device: torch.device,
    *,
    with_mtp: bool = False,
    table: Sequence[Sequence[int]] | None = None,
    load: RecordedLoad | None = None,
    can_change: bool = False,
) -> ExpertPlacements:
    """Choose the slots of the experts of each layer.

    Where nothing is known of their load, redundant slots are dealt out evenly.

    Args:
        options: of the engine.
        config: of the model.
        dims: of its ranks.
        device: of the maps.
        with_mtp: whether the layers for multi-token prediction are built.
        table: [L, P], the logical expert of each slot of each layer, if something is known.
        load: what experts got when it was recorded; without a table.
        can_change: whether experts may move while steps run.

    Raises:
        ConfigError: the ranks cannot split the model, or hold equally many experts; or a table for
            another model, or for other ranks, or a load of another model.
    """
    num_redundant, field = options.num_redundant_experts, options.named("num_redundant_experts")
    num_logical = num_experts(config)
    num_slots = num_expert_slots(config, num_redundant, field=field)
    check_dims(dims, config, num_physical_experts=num_slots)
    layers = config.expert_layers(with_mtp=with_mtp)
    if load is not None and config.experts is not None:
        table = load.table(config.experts, layers=layers, num_slots=num_slots, num_ranks=dims.ep)
    if table is None:
        slots: Sequence[int] = range(num_logical)
        if num_redundant:
            slots = balance_experts([1.0] * num_logical, num_slots=num_slots, num_ranks=dims.ep)
        table = [slots] * len(layers)
    else:
        name = options.named("expert_placement")
        check_table(table, num_logical, num_layers=len(layers), num_slots=num_slots, field=name)
    return ExpertPlacements(
        table, num_logical, first_layer=layers.start, device=device, can_change=can_change
    )


def check_agreement(
    load: RecordedLoad | None, placements: ExpertPlacements, group: RankGroup
) -> None:
    """See that all ranks have read the same file: tokens would go to another expert; all call.

    Raises:
        ConfigError: they have not.
    """
    if load is None:
        return
    digest = hashlib.sha256(repr(placements.table).encode()).digest()
    own = int.from_bytes(digest[:7], "little")
    told = group.all_gather(torch.tensor([own], dtype=torch.int64))
    others = [rank for rank, other in enumerate(told.tolist()) if other != own]
    if others:
        problem = f"places experts otherwise than the file of rank {others[0]}"
        raise ConfigError(load.field, str(load.path), problem, "the same file on all hosts")


def count_experts(model: ServedModel, *, is_wanted: bool = True) -> ExpertCounter | None:
    """Have the gates of a model count from now on; None for a dense model.

    To be called before steps are captured: what they add to is in the graphs.

    Args:
        model: of this rank.
        is_wanted: for measurements of what counting costs: False to have none of them count.
    """
    layers = moe_layers(model)
    if not layers:
        return None
    top_k = next(iter(layers.values())).gate.top_k
    counter = ExpertCounter(sorted(layers), num_experts(model.config), top_k, model.device)
    for index, layer in layers.items():
        layer.gate.load_C = counter.bins(index) if is_wanted else None
    return counter if is_wanted else None


def counted_experts(
    model: ServedModel, placements: ExpertPlacements, *, is_scattered: bool = False
) -> CountedExperts | None:
    """Have the gates of a model count, and say of what; None for a dense model.

    Args:
        model: of this rank.
        placements: of its experts.
        is_scattered: whether ranks that split heads have shares of the rows.
    """
    counter, config = count_experts(model), model.config.experts
    if counter is None or config is None:
        return None
    experts = next(iter(moe_layers(model).values())).experts
    num_bytes = sum(parameter.nbytes for parameter in experts.parameters())
    return CountedExperts(
        counter=counter,
        placements=placements,
        config=config,
        expert_bytes=num_bytes // experts.num_local_experts,
        num_ranks=model.groups.dims.ep,
        sharing=model.groups.tp_group if is_scattered else RankGroup(),
    )


def moe_layers(model: ServedModel) -> dict[int, MoE]:
    """Return the layers with experts by their number in the model, in its order."""
    return {
        int(match[1]): module
        for name, module in model.named_modules()
        if isinstance(module, MoE) and (match := _LAYER.search(name))
    }


def open_dispatcher(
    options: EngineOptions, experts: RankExperts, *, play: Play | None = None
) -> OpenDispatcher:
    """Choose and open the way to experts that the options ask for; all ranks call.

    Args:
        options: of the engine.
        experts: of this rank.
        play: for measurements: makes the dispatcher of a rank alone, with steps of single tokens,
            that plays one of many; None to be itself.

    Raises:
        ConfigError: a step may bring more tokens than the ranks make room for, or the dispatcher
            that is asked for does not run here.
    """
    steps = options.steps
    if isinstance(steps, ChunkSteps):
        return choose_dispatcher(experts)
    is_on_gpu = options.device != "cpu"
    if is_on_gpu and experts.config.num_moe_layers and experts.groups.dims.ep > 1:
        options.check_rows()
    return choose_dispatcher(
        experts,
        steps.dispatcher if is_on_gpu else DispatcherKind.AUTO,
        max_tokens_per_rank=steps.max_tokens_per_rank,
        play=play,
    )
