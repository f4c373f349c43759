"""The budget of drafts of a rank, where the options leave a choice; its costs all ranks share."""

from __future__ import annotations

import torch

from decode.draft_budget import DraftBudget, agreed_costs
from decode.draft_costs import Costs, imagined_costs
from engine.graphs.buckets import batch_buckets
from engine.graphs.graph_runner import GraphRunner
from engine.options import EngineOptions
from engine.parallel.groups import RankGroup
from runtime.logging import fields, get_logger

logger = get_logger(__name__)

_MICRO = 1_000_000


def open_budget(
    options: EngineOptions, runner: GraphRunner, group: RankGroup, *, max_model_len: int
) -> DraftBudget | None:
    """Measure what steps cost, and return what chooses their drafts; None without a choice.

    All ranks of the instance call, once their steps are captured. Steps that are called and not
    replayed are not measured, because each would take as long as it takes later: there the costs
    begin with what rows cost alike, and follow the steps.

    Args:
        options: of the engine.
        runner: of the rank's steps.
        group: of all ranks, for host memory.
        max_model_len: most tokens of a request.

    Raises:
        PeerLostError: another rank ended meanwhile.
    """
    choices = options.draft_choices
    if not choices.are_open:
        return None
    sizes = batch_buckets(options.max_num_seqs)
    costs: Costs | None = runner.time_steps(max_model_len)
    if costs is None:
        pool = runner.plain.kv_pool
        num_layers = pool.num_layers - pool.num_mtp_layers
        costs = imagined_costs(sizes, {size: choices.of(size)[-1] for size in sizes}, num_layers)
    else:
        costs, sizes = _agree(costs, group), tuple(sorted(costs))
        shown = {size: [round(1e3 * cost, 2) for cost in costs[size]] for size in sorted(costs)}
        logger.info("steps by requests and drafts %s", fields(milliseconds=shown))
    return DraftBudget(choices, sizes, costs)


def _agree(costs: Costs, group: RankGroup) -> Costs:
    """Return the costs of the slowest rank, the same on all of them to the bit."""
    sizes = sorted(costs)
    own = torch.tensor([[round(cost * _MICRO) for size in sizes for cost in costs[size]]])
    rows = []
    for gathered in group.all_gather(own).tolist():
        values = iter(gathered)
        rows.append({size: [next(values) / _MICRO for _ in costs[size]] for size in sizes})
    return agreed_costs(rows)
