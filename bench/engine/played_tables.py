"""Tables of experts for ranks that play some of a larger group's; see `bench.engine.played`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.engine.options import Setup
from bench.engine.played import (
    PlayedRanks,
    Table,
    chances_of,
    draw_played,
    play_ranks,
)
from bench.engine.plays import Plays
from bench.engine.rank_model import RankModel
from bench.engine.report import Report
from bench.engine.routing import LayerTables, num_draws, skewed_experts
from bench.experts.skew import log_likelihoods
from engine.boot.experts import moe_layers
from engine.config import DeepseekV3Config
from engine.experts.placement import ExpertPlacement
from experts.balance import balance_layers
from experts.balancedness import even_placement
from experts.plan import plan_placement
from experts.time_model import TimeModel
from experts.trace import ExpertTrace
from runtime.errors import ConfigError

SAMPLED_TOKENS = 131_072
"""By which experts of the larger group are placed, and as many others that they then get."""
_CHUNK = 16_384


class PlayedTables(LayerTables):
    """Tables and what they stand for.

    Attributes:
        played: for a report.
    """

    def __init__(
        self,
        draws_SLTK: Tensor,
        layer_of: Mapping[int, int],
        *,
        played: Report,
        num_rows: int | None = None,
    ) -> None:
        """See `LayerTables`."""
        super().__init__(draws_SLTK, layer_of, num_rows=num_rows)
        self.played = played


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeSample:
    """What tokens of the larger group chose.

    Attributes:
        counts_LE: int64, of all tokens.
        ids_LTK: of the first of them.
    """

    counts_LE: Table
    ids_LTK: Tensor


def sample_whole(
    config: DeepseekV3Config, log_LE: Tensor, num_tokens: int, generator: torch.Generator
) -> WholeSample:
    """Draw tokens by a skew.

    Args:
        config: of the larger group's model.
        log_LE: float64, each expert's likelihood, see `skewed_experts`.
        num_tokens: a whole number of some thousands is drawn, at least so many.
        generator: of the draws.
    """
    counts, first = [], []
    for log_E in log_LE:
        count_E = torch.zeros(len(log_E), dtype=torch.int64)
        for start in range(0, num_tokens, _CHUNK):
            ids = skewed_experts(config, min(_CHUNK, num_tokens - start), log_E, generator)
            count_E += torch.bincount(ids.flatten(), minlength=len(log_E)).cpu()
            if not start:
                first.append(ids.cpu())
        counts.append(count_E)
    return WholeSample(counts_LE=torch.stack(counts).numpy(), ids_LTK=torch.stack(first))


def open_played_tables(
    rank: RankModel,
    setup: Setup,
    max_tokens: int,
    num_rows: int | None,
    generator: torch.Generator,
) -> PlayedTables:
    """Make the tables of a rank; all ranks call.

    Args:
        rank: that plays another.
        setup: says which, and what they are of.
        max_tokens: of a step, padding included.
        num_rows: of every step that are no padding; None where steps differ.
        generator: of this rank's draws.

    Raises:
        ConfigError: the choice of the experts here is limited to groups.
    """
    measured, layers = rank.measured, list(moe_layers(rank.model).values())
    whole, here, of = measured.whole, measured.num_gpus, measured.virtual_gpus
    if measured.config.topk_group < measured.config.n_group:
        problem = f"experts of {measured.config.n_group} groups are chosen in some of them"
        raise ConfigError("play-ranks", setup.plays, problem, "ranks that hold fewer groups")
    recorded_LE, served = _agreed_samples(rank, setup, len(layers))
    table_Lp = np.array(rank.placements.table, np.int64)[: len(layers)]
    tokens = of * (num_rows or max_tokens)
    placed_LP = place_experts(
        setup.plays,
        trace_of(whole, recorded_LE, num_ranks=of, num_tokens=tokens),
        num_slots=table_Lp.shape[1] * of // here,
        num_ranks=of,
    )
    top_k = whole.num_experts_per_tok
    ranks = play_ranks(
        served.counts_LE, placed_LP, table_Lp, num_ranks=of, num_here=here, top_k=top_k
    )
    chances = [
        chances_of(chance_p, table_p.tolist(), top_k)
        for chance_p, table_p in zip(ranks.chance_Lp, table_Lp, strict=True)
    ]
    drawn = draw_played(
        chances,
        num_steps=num_draws(measured.config, max_tokens, len(layers)),
        num_tokens=max_tokens,
        top_k=top_k,
        generator=generator,
    )
    num_redundant = placed_LP.shape[1] - whole.n_routed_experts
    told = describe_played(ranks, num_redundant=num_redundant)
    told["whole_other_ranks_of_a_token"] = other_ranks(served.ids_LTK, placed_LP, of)
    told["other_ranks_of_a_token"] = other_ranks(drawn[0], table_Lp, here)
    told |= _describe_rows(rank, drawn, table_Lp)
    told |= describe_times(
        trace_of(whole, served.counts_LE, num_ranks=of, num_tokens=tokens), placed_LP, told, of
    )
    gates = [layer.gate.e_score_correction_bias.data_ptr() for layer in layers]
    layer_of = {address: place for place, address in enumerate(gates)}
    return PlayedTables(drawn, layer_of, played=told, num_rows=num_rows)


def _agreed_samples(rank: RankModel, setup: Setup, num_layers: int) -> tuple[Table, WholeSample]:
    """Return counts [L, E] of a recording, and other tokens; the same counts on all ranks."""
    config = rank.measured.whole
    # Of draws that all ranks share; those of a rank's own tokens have smaller seeds.
    common = torch.Generator(device=rank.device).manual_seed(setup.seed + (1 << 32))
    log_LE = torch.from_numpy(log_likelihoods(num_layers, config.n_routed_experts, seed=setup.seed))
    recorded, served = (sample_whole(config, log_LE, SAMPLED_TOKENS, common) for _ in range(2))
    # Devices of one kind draw alike, but all depends on it.
    counts = torch.from_numpy(np.stack([recorded.counts_LE, served.counts_LE]))
    recorded_LE, served_LE = rank.groups.boot_group.broadcast(counts).numpy()
    return recorded_LE, WholeSample(counts_LE=served_LE, ids_LTK=served.ids_LTK)


def rows_of_ranks(ids_TK: Tensor, table_P: Sequence[int], num_ranks: int) -> Tensor:
    """Return [num_ranks] int64, rows that come to each rank by the dealing of a worker.

    Args:
        ids_TK: experts of tokens.
        table_P: the expert of each slot.
        num_ranks: of as many slots each.
    """
    return torch.bincount(_ranks_of(ids_TK, table_P, num_ranks).flatten(), minlength=num_ranks)


def place_experts(plays: Plays, recorded: ExpertTrace, *, num_slots: int, num_ranks: int) -> Table:
    """Return [L, P], where experts of the larger group stand.

    Args:
        plays: in order, dealt afresh as a start by a recording does, or moved from there by a plan.
        recorded: what experts got, of other tokens than those that run.
        num_slots: P.
        num_ranks: R.
    """
    num_layers, num_experts = recorded.num_layers, recorded.num_experts
    if plays is Plays.RECORDED:
        load_LE = recorded.counts_NLE.sum(axis=0).astype(np.float64)
        return balance_layers(load_LE[None], num_slots=num_slots, num_ranks=num_ranks)
    even_LP = np.tile(even_placement(num_experts, num_slots, num_ranks), (num_layers, 1))
    if plays is Plays.IN_ORDER:
        return even_LP
    model = TimeModel.of_trace(recorded)
    return plan_placement(recorded, even_LP, num_ranks=num_ranks, model=model).target_LP


def trace_of(
    whole: DeepseekV3Config, counts_LE: Table, *, num_ranks: int, num_tokens: int
) -> ExpertTrace:
    """Return a mean pass of the larger group.

    Args:
        whole: its model.
        counts_LE: tokens of each expert, of any number of tokens.
        num_ranks: of the group.
        num_tokens: of a pass of all of them.
    """
    top_k, hidden, inner = whole.num_experts_per_tok, whole.hidden_size, whole.moe_intermediate_size
    share = num_tokens * top_k / counts_LE.sum(axis=1, keepdims=True)
    return ExpertTrace(
        counts_NLE=np.floor(counts_LE * share).astype(np.int64)[None],
        tokens_N=np.array([num_tokens]),
        role="prefill",
        model_name="synthetic skew",
        top_k=top_k,
        num_groups=whole.n_group,
        topk_group=whole.topk_group,
        num_ranks=num_ranks,
        hidden_size=hidden,
        moe_intermediate_size=inner,
        # In FP8, whose scales are a thousandth of it, else in two bytes.
        expert_bytes=3 * hidden * inner * (1 if whole.fp8_block_size else 2),
    )


def describe_times(
    served: ExpertTrace, placed_LP: Table, told: Mapping[str, object], num_ranks: int
) -> Report:
    """Return what the planner's model says of a pass of the larger group, by rates of an H200.

    Args:
        served: a mean pass.
        placed_LP: where experts stand.
        told: says how far tokens travel there and here.
        num_ranks: of the group.
    """
    model = TimeModel.of_trace(served)
    seconds_L = model.layer_seconds(served.counts_NLE, placed_LP, num_ranks=num_ranks)
    there, here = told["whole_other_ranks_of_a_token"], told["other_ranks_of_a_token"]
    assert isinstance(there, float)
    assert isinstance(here, float)
    travels = served.num_layers * float(served.tokens_N[0]) / num_ranks
    return {
        "modelled_experts_ms_of_h200": 1e3 * float(seconds_L.sum()),
        "modelled_travel_missing_ms_of_h200": 1e3 * travels * (there - here) * model.s_per_link_row,
    }


def describe_played(ranks: PlayedRanks, *, num_redundant: int) -> Report:
    """Return what is played, layer by layer; rows are over the mean rank's."""
    busiest_L = ranks.rows_LR.max(axis=1)
    return {
        "whole_ranks": ranks.rows_LR.shape[1],
        "whole_redundant_experts": num_redundant,
        "whole_balancedness": ranks.balancedness,
        "whole_busiest_over_mean": float(busiest_L.mean()),
        "whole_rows_over_mean": ranks.rows_LR.round(4).tolist(),
        "ranks": ranks.ranks_Lr.tolist(),
        "played_rows_over_mean": ranks.played_Lr.round(4).tolist(),
        "rows_moved_inside_a_rank": ranks.moved,
    }


def _describe_rows(rank: RankModel, drawn_SLTK: Tensor, table_Lp: Table) -> Report:
    """Return rows that come to the real ranks by the tables of all of them; all ranks call."""
    size = rank.groups.boot_group.size
    own = [
        [
            rows_of_ranks(ids_TK, table_p, size)
            for ids_TK, table_p in zip(step, table_Lp, strict=True)
        ]
        for step in drawn_SLTK
    ]
    counts_SLr = torch.stack([torch.stack(step) for step in own]).cpu()
    # Ranks with other numbers of tokens draw for other numbers of steps.
    fewest = int(rank.groups.boot_group.all_gather(torch.tensor([len(own)])).min())
    gathered = rank.groups.boot_group.all_gather(counts_SLr[None, :fewest].contiguous())
    rows_SLr = gathered.sum(dim=0).double()
    over_SLr = rows_SLr / rows_SLr.mean(dim=2, keepdim=True)
    return {
        "received_over_mean": over_SLr.mean(dim=(0, 1)).tolist(),
        "fullest_over_mean": float(over_SLr.max(dim=2).values.mean()),
    }


def other_ranks(ids_LTK: Tensor, table_LP: Table, num_ranks: int) -> float:
    """Return to how many ranks beside its own a token goes, in the mean over tokens and layers."""
    visited = []
    for ids_TK, table_P in zip(ids_LTK, table_LP, strict=True):
        ranks_TK = _ranks_of(ids_TK, table_P, num_ranks)
        is_there_TR = torch.zeros((len(ranks_TK), num_ranks), device=ranks_TK.device)
        visited.append(float(is_there_TR.scatter_(1, ranks_TK, 1.0).sum(dim=1).mean()))
    return float(np.mean(visited)) * (num_ranks - 1) / num_ranks


def _ranks_of(ids_TK: Tensor, table_P: Sequence[int], num_ranks: int) -> Tensor:
    slots = [int(expert) for expert in table_P]
    placement = ExpertPlacement.from_physical(slots, max(slots) + 1, device=ids_TK.device)
    return placement.to_physical(ids_TK) // (len(slots) // num_ranks)
