"""Mixture of experts: a gate, routed experts in physical slots, and a shared expert.

The gate chooses logical experts; the placement says in which physical slots they stand; the
dispatcher brings tokens there and back. Each of the three can change without the others. The shared
expert is not routed; when it runs says `shared_expert`. Where all ranks hold all tokens it is split
over tp, and its partial sum rides on the dispatcher's reduction; otherwise each rank runs it whole,
on its own rows.

Legend: T tokens, D hidden size, E routed experts, K experts per token, L slots of this rank,
M rows at this rank's experts, F expert width (of this rank, if tp splits it).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import DeepseekV3Config
from engine.experts.placement import ExpertPlacement
from engine.formats.base import NumberFormat, run_experts
from engine.formats.expert_rows import Rows
from engine.layers.context import LayerContext
from engine.layers.matrix import Matrix
from engine.layers.mlp import MLP
from engine.layers.norm import FeedFormat, Normed
from engine.layers.shared_expert import SharedSchedule
from engine.operations import Operations
from engine.ops.gate import GATE_LOGITS, GROUP_LIMITED_TOPK
from engine.ops.routing_rule import RoutingRule
from engine.options import DispatcherKind
from engine.parallel.choose_dispatcher import RankExperts, choose_dispatcher
from engine.parallel.token_dispatcher import TokenDispatcher
from engine.parallel.token_sharding import RowCount
from engine.weights.expert_format import expert_modules
from engine.weights.slices import WeightSlice, split_evenly


class Gate(nn.Module):
    """Scores every expert for every token; whole on every rank, scores in float32.

    Attributes:
        load_C: [E + 1] int64, bins of logical experts that grow with every call; None to count
            nothing. Its address stays, because captured steps add to it.
    """

    def __init__(self, config: DeepseekV3Config, ctx: LayerContext) -> None:
        super().__init__()
        self._gate_logits = ctx.ops[GATE_LOGITS]
        self._group_limited_topk = ctx.ops[GROUP_LIMITED_TOPK]
        self._rule = RoutingRule.of(config)
        # In float32, unless the kernels multiply bfloat16 without loss.
        dtype = torch.bfloat16 if ctx.number_format.is_quantized else torch.float32
        self.weight = ctx.parameter(config.n_routed_experts, config.hidden_size, dtype=dtype)
        self.e_score_correction_bias = ctx.parameter(config.n_routed_experts, dtype=torch.float32)
        self.load_C: Tensor | None = None

    @property
    def top_k(self) -> int:
        """K."""
        return self._rule.top_k

    def forward(self, hidden_TD: Tensor, num_rows: RowCount = None) -> tuple[Tensor, Tensor]:
        """Return logical topk_ids [T, K] int64, -1 for padding, and topk_weights [T, K] float32."""
        logits_TE = self._gate_logits(hidden_TD, self.weight)
        return self._group_limited_topk(
            logits_TE, self.e_score_correction_bias, self._rule, num_rows, self.load_C
        )

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`."""
        yield WeightSlice.whole(f"{prefix}.weight", self.weight)
        yield WeightSlice.whole(f"{prefix}.e_score_correction_bias", self.e_score_correction_bias)


class Experts(nn.Module):
    """The routed experts in this rank's slots, stacked; with ep = 1 tp splits their width."""

    def __init__(
        self, config: DeepseekV3Config, ctx: LayerContext, placement: ExpertPlacement
    ) -> None:
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
        stack = (num_slots,)
        hidden, names = config.hidden_size, [*expert_modules(ctx.path, config.n_routed_experts)]
        # Both in one format: a width that is not whole blocks decides for the two.
        self.up = Matrix(ctx, [width] * 2, hidden, stack=stack, whole_blocks=True, names=names)
        self.down = Matrix(ctx, [hidden], width, stack=stack, whole_blocks=True, names=names)

    @property
    def number_format(self) -> NumberFormat:
        """Of both matrices."""
        return self.up.number_format

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.up.weight.shape[0]

    @property
    def w13(self) -> Tensor:
        """[L, 2F, D], gate over up."""
        return self.up.weight

    @property
    def w2(self) -> Tensor:
        """[L, D, F]."""
        return self.down.weight

    @property
    def takes_quantized(self) -> bool:
        """Whether rows come quantised."""
        return self.up.takes_quantized

    def forward(self, rows: Rows) -> Tensor:
        """Map the rows to [M, D] ([L, M, D] in the masked layout), in the same order."""
        return run_experts(self.number_format, rows, self.up.stored, self.down.stored)

    def weight_slices(self, prefix: str) -> Iterator[WeightSlice]:
        """See `HoldsWeights`; a logical expert in several slots is read once per slot."""
        slot_of: dict[int, list[int]] = {}
        for slot in range(*self._slots):
            logical = self._placement.physical_to_logical_map[slot]
            slot_of.setdefault(logical, []).append(slot - self._slots[0])
        for logical in range(self._placement.num_logical_experts):
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
        for name, row in ("gate", 0), ("up", width):
            yield self.up.slice(
                f"{prefix}.{name}_proj.weight", up_shape, (wide, hidden), row=row, index=(slot,)
            )
        down_shape = (self._hidden_size, self._width)
        yield self.down.slice(
            f"{prefix}.down_proj.weight", down_shape, (hidden, wide), index=(slot,)
        )


class MoE(nn.Module):
    """Routed plus shared experts of one layer.

    Attributes:
        dispatcher: the one that all layers share.
        feed_format: of the rows that `forward` takes, beside the plain ones.
    """

    def __init__(
        self,
        config: DeepseekV3Config,
        ctx: LayerContext,
        placement: ExpertPlacement,
        dispatcher: TokenDispatcher[Any],
    ) -> None:
        """Take the dispatcher that all layers share, of `create_expert_dispatcher`."""
        super().__init__()
        self.placement = placement
        self.gate = Gate(config, ctx)
        self.experts = Experts(config, ctx.within("experts"), placement)
        self.shared_experts = None
        if config.n_shared_experts:
            width = config.moe_intermediate_size * config.n_shared_experts
            shared_ctx = ctx.unsplit if ctx.scatter_tokens else ctx
            shared_ctx = shared_ctx.within("shared_experts")
            self.shared_experts = MLP(shared_ctx, config.hidden_size, width)
        self.dispatcher = dispatcher
        self._shared_schedule = SharedSchedule(
            overlaps=ctx.overlap_shared_expert,
            side_stream=ctx.side_stream,
            side_rule=ctx.side_rule,
            num_shares=ctx.groups.tp_group.size if ctx.scatter_tokens else 1,
        )
        does_shared = self.shared_experts is not None and self.shared_experts.takes_quantized
        self.feed_format = FeedFormat.of(
            is_quantized=dispatcher.takes_quantized or does_shared,
            is_sent=ctx.sharding.sends_rows,
        )

    def forward(self, normed: Normed, num_rows: RowCount = None) -> Operations[Tensor]:
        """Map [T, D] to [T, D]; T may be 0, and with ep > 1 every rank must call.

        Args:
            normed: the rows.
            num_rows: rows from there on go to no routed expert; None where there are none such.
        """
        shared = self._shared_schedule.start(self.shared_experts, normed)
        topk_ids_TK, topk_weights_TK = self.gate(normed.plain, num_rows)
        topk_ids_TK = self.placement.to_physical(topk_ids_TK)
        feed = normed.feed if self.dispatcher.takes_quantized else normed.plain
        dispatching = self.dispatcher.start_dispatch(feed, topk_ids_TK, topk_weights_TK)
        shared.while_dispatched()
        yield
        rows, handle = dispatching.wait()
        out = self.experts(rows)
        combining = self.dispatcher.start_combine(out, handle, shared.while_combined())
        yield
        return combining.wait()


def create_expert_dispatcher(
    config: DeepseekV3Config, ctx: LayerContext, num_physical_experts: int
) -> TokenDispatcher[Any]:
    """Return the dispatcher of a model that was given none; it serves all MoE layers in turn."""
    experts = RankExperts(
        config=config,
        groups=ctx.groups,
        kernels=ctx.kernels,
        device=ctx.device,
        num_physical_experts=num_physical_experts,
        scatter_tokens=ctx.scatter_tokens,
    )
    return choose_dispatcher(experts, DispatcherKind.COLLECTIVES).dispatcher
