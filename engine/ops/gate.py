"""The router gate: scores of all experts, and the group-limited choice among them.

Legend: T tokens, D hidden size, E experts, K experts per token, S parts of a sum, C = E + 1 bins.
"""

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.op import Op, Target, Work, late, moved_bytes
from engine.ops.routing_rule import RoutingRule

if TYPE_CHECKING:
    from engine.ops import gate_kernel
else:
    gate_kernel = late("engine.ops.gate_kernel")


def gate_logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return the scores of all experts, [T, E] float32; or [S, T, E], parts that sum to them."""
    return F.linear(hidden_TD.float(), weight_ED.float())


def _in_parts_if_better(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Cut few tokens' products into parts for more programs."""
    if gate_kernel.is_better_in_parts(hidden_TD, weight_ED):
        return gate_kernel.score_in_parts(hidden_TD, weight_ED)
    return gate_kernel.score(hidden_TD, weight_ED)


def _product(logits: Tensor, hidden_TD: Tensor, weight_ED: Tensor) -> Work:
    operations = 2.0 * hidden_TD.shape[0] * weight_ED.numel()
    return Work(moved_bytes(logits, hidden_TD, weight_ED), bf16_operations=operations)


GATE_LOGITS: Final = (
    Op(reference=gate_logits, work=_product)
    .on(Target.TRITON, lambda: gate_kernel.score)
    .on(Target.HOPPER, lambda: _in_parts_if_better)
)


def group_limited_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    rule: RoutingRule,
    num_rows: Tensor | int | None = None,
    load_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose experts as DeepSeek-V3 does (report, section 2.1.2).

    The choice is made by sigmoid score plus bias: first `topk_group` groups by the sum of their
    two best experts, then `top_k` experts inside them. The weight is the score without the bias,
    normalised over the chosen, times the scaling factor (here, and nowhere else).

    Args:
        logits_TE: [T, E] float32. What runs beside a `gate_logits` that returns parts also takes
            those, [S, T, E].
        bias_E: [E] float32, `e_score_correction_bias`.
        rule: K = `top_k`; `n_group` groups of neighbouring experts, of which a token may use
            `topk_group`; whether weights are divided by their sum; the factor of all weights.
        num_rows: from which token on there is padding, [1] int64 on the device, or a number that
            the host knows; None where there is none.
        load_C: [E + 1] int64 on the device: expert e's bin grows by the tokens that have chosen e.
            The last bin is for what chooses none, and its value means nothing. None to count
            nothing.

    Returns:
        topk_ids [T, K] int64, -1 for padding, and topk_weights [T, K] float32.
    """
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + bias_E
    if rule.topk_group < rule.n_group:
        grouped = choice_TE.view(len(choice_TE), rule.n_group, choice_TE.shape[1] // rule.n_group)
        group_score = grouped.topk(2, dim=-1).values.sum(dim=-1)
        chosen = group_score.topk(rule.topk_group, dim=-1).indices
        left_out = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, chosen, False)
        choice_TE = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
    topk_ids_TK = choice_TE.topk(rule.top_k, dim=-1).indices
    topk_weights_TK = scores_TE.gather(1, topk_ids_TK)
    if rule.norm_topk_prob:
        topk_weights_TK = topk_weights_TK / (topk_weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    if num_rows is not None:
        tokens_T1 = torch.arange(len(topk_ids_TK), device=topk_ids_TK.device).unsqueeze(1)
        topk_ids_TK = topk_ids_TK.masked_fill(tokens_T1 >= num_rows, -1)
    if load_C is not None:
        chosen = topk_ids_TK.flatten()
        load_C.index_add_(0, chosen % len(load_C), (chosen >= 0).to(load_C.dtype))
    return topk_ids_TK, topk_weights_TK * rule.routed_scaling_factor


def _choose_in_tiles(
    logits_TE: Tensor,
    bias_E: Tensor,
    rule: RoutingRule,
    num_rows: Tensor | int | None = None,
    load_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Leave what does not fit the kernel's tiles to the reference."""
    if gate_kernel.is_supported(logits_TE.shape[-1], rule):
        return gate_kernel.group_limited_topk(logits_TE, bias_E, rule, num_rows, load_C)
    logits_TE = logits_TE if logits_TE.dim() == 2 else logits_TE.sum(0)
    return group_limited_topk(logits_TE, bias_E, rule, num_rows, load_C)


GROUP_LIMITED_TOPK: Final = Op(reference=group_limited_topk).on(
    Target.TRITON, lambda: _choose_in_tiles
)
