"""Mixture of experts: a gate, routed experts in physical slots, and a shared expert.

The gate chooses logical experts; the placement says in which physical slots they stand; the
dispatcher brings tokens there and back. Each of the three can change without the others. The shared
expert is not routed: under tensor parallelism its partial sum rides on the dispatcher's reduction.

Legend: T tokens, D hidden size, E routed experts, K experts per token, L slots of this rank,
M rows at this rank's experts, F expert width (of this rank, if tp splits it).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels import reference
from engine.layers.context import LayerContext
from engine.layers.mlp import MLP
from engine.parallel.create_dispatcher import create_dispatcher
from engine.parallel.expert_placement import ExpertPlacement
from engine.weights.slices import WeightSlice, split_evenly


class Gate(nn.Module):
    """Scores every expert for every token; whole on every rank, in float32."""

    def __init__(self, config: ModelConfig, ctx: LayerContext) -> None:
        super().__init__()
        self.config = config
        self.weight = ctx.parameter(
            config.n_routed_experts, config.hidden_size, dtype=torch.float32
        )
        self.e_score_correction_bias = ctx.parameter(config.n_routed_experts, dtype=torch.float32)

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return logical topk_ids [T, K] int64 and topk_weights [T, K] float32."""
        config = self.config
        return reference.group_limited_topk(
            F.linear(hidden_TD.float(), self.weight),
            self.e_score_correction_bias,
            top_k=config.num_experts_per_tok,
            n_group=config.n_group,
            topk_group=config.topk_group,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)
        yield WeightSlice.whole(f"{prefix}.e_score_correction_bias", self.e_score_correction_bias)


class Experts(nn.Module):
    """The routed experts in this rank's slots, stacked; with ep = 1 tp splits their width."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, placement: ExpertPlacement) -> None:
        super().__init__()
        groups = ctx.groups
        self._placement = placement
        self._slots = split_evenly(
            placement.num_physical_experts, groups.ep_group.rank, groups.ep_group.size
        )
        self._width = config.moe_intermediate_size
        num_shares, share = (1, 0) if groups.dims.ep > 1 else (groups.dims.tp, groups.dims.tp_rank)
        self._columns = split_evenly(self._width, share, num_shares)
        self._hidden_size = config.hidden_size
        num_slots, width = self._slots[1] - self._slots[0], self._width // num_shares
        self.w13 = ctx.parameter(num_slots, 2 * width, config.hidden_size)
        self.w2 = ctx.parameter(num_slots, config.hidden_size, width)

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.w13.shape[0]

    def forward(self, rows_MD: Tensor, num_rows_per_expert: list[int]) -> Tensor:
        """Map [M, D], sorted by slot, to [M, D]."""
        return reference.grouped_mlp(rows_MD, num_rows_per_expert, self.w13, self.w2)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`; a logical expert in several slots is read once per slot."""
        slot_of: dict[int, list[int]] = {}
        for slot in range(*self._slots):
            logical = self._placement.physical_to_logical_map[slot]
            slot_of.setdefault(logical, []).append(slot - self._slots[0])
        for logical in range(self._placement.logical_replica_count.shape[0]):
            here = slot_of.get(logical)
            for index in here if here else [None]:
                yield from self._expert_slices(f"{prefix}.{logical}", index)

    def _expert_slices(self, prefix: str, slot: int | None) -> Iterator[WeightSlice]:
        wide, hidden = self._columns, (0, self._hidden_size)
        width = wide[1] - wide[0]
        up_shape = (self._width, self._hidden_size)
        if slot is None:
            for name, shape in ("gate", up_shape), ("up", up_shape), ("down", up_shape[::-1]):
                yield WeightSlice.elsewhere(f"{prefix}.{name}_proj.weight", shape)
            return
        for name, half in ("gate", self.w13[slot, :width]), ("up", self.w13[slot, width:]):
            yield WeightSlice(
                name=f"{prefix}.{name}_proj.weight",
                full_shape=up_shape,
                ranges=(wide, hidden),
                destination=half,
            )
        yield WeightSlice(
            name=f"{prefix}.down_proj.weight",
            full_shape=up_shape[::-1],
            ranges=(hidden, wide),
            destination=self.w2[slot],
        )


class MoE(nn.Module):
    """Routed plus shared experts of one layer."""

    def __init__(self, config: ModelConfig, ctx: LayerContext, placement: ExpertPlacement) -> None:
        super().__init__()
        self.placement = placement
        self.gate = Gate(config, ctx)
        self.experts = Experts(config, ctx, placement)
        self.shared_experts = None
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            self.shared_experts = MLP(ctx, config.hidden_size, width, reduce=False)
        self._dispatcher = create_dispatcher(ctx.groups, self.experts.num_local_experts)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, D]; T may be 0, and with ep > 1 every rank must call."""
        topk_ids_TK, topk_weights_TK = self.gate(hidden_TD)
        topk_ids_TK = self.placement.to_physical(topk_ids_TK)
        rows, handle = self._dispatcher.dispatch(hidden_TD, topk_ids_TK, topk_weights_TK)
        expert_out_MD = self.experts(rows.rows_MD, rows.num_rows_per_expert)
        own_TD = self.shared_experts(hidden_TD) if self.shared_experts else None
        return self._dispatcher.combine(expert_out_MD, handle, own_TD)
