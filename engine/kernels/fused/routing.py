"""Group-limited top-k: the whole choice of experts for one token in the registers of one program.

Otherwise a dozen small operations over [T, E] each. See `reference.group_limited_topk`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.fused.launch import launched, next_power_of_2
from engine.kernels.routing import RoutingRule


@launched()
def _choose(
    logits, bias, ids, weights, scaling,
    E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    low = float("-inf")
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    scores = tl.sigmoid(tl.load(logits + token * E + expert).to(tl.float32))
    choice = scores + tl.load(bias + expert)
    if KEPT < GROUPS:
        best = tl.max(choice, axis=1)
        where = tl.argmax(choice, axis=1)
        second = tl.max(tl.where(member[None, :] == where[:, None], low, choice), axis=1)
        worth = best + second
        kept = tl.zeros([GROUPS], tl.int32)
        for _ in tl.static_range(KEPT):
            top = tl.argmax(worth, axis=0)
            kept = tl.where(group == top, 1, kept)
            worth = tl.where(group == top, low, worth)
        choice = tl.where((kept > 0)[:, None], choice, low)
    slots = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    chosen_scores = tl.zeros([KP], tl.float32)
    for k in tl.static_range(K):
        best_in_group = tl.max(choice, axis=1)
        top = tl.max(best_in_group, axis=0)
        # The lowest expert among equals, so that exactly one is taken.
        taken = tl.min(tl.min(tl.where(choice == top, expert, E), axis=1), axis=0)
        hit = expert == taken
        score = tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(slots == k, taken, chosen)
        chosen_scores = tl.where(slots == k, score, chosen_scores)
        choice = tl.where(hit, low, choice)
    if NORM:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=0) + 1e-20)
    # NaN logits equal nothing: keep the ids valid, the weights carry the NaN.
    chosen = tl.minimum(chosen, E - 1)
    mask = slots < K
    tl.store(ids + token * K + slots, chosen.to(tl.int64), mask=mask)
    tl.store(weights + token * K + slots, chosen_scores * scaling, mask=mask)


def group_limited_topk(
    logits_TE: Tensor, bias_E: Tensor, rule: RoutingRule
) -> tuple[Tensor, Tensor]:
    """Return topk_ids [T, K] int64 and topk_weights [T, K] float32.

    E and the size of a group must be powers of two (`is_supported`).
    """
    num_tokens, num_experts = logits_TE.shape
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits_TE.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits_TE.device)
    if num_tokens:
        groups = (rule.n_group, rule.topk_group)
        chosen = (rule.top_k, next_power_of_2(rule.top_k))
        _choose(
            (num_tokens,),
            (logits_TE.contiguous(), bias_E, ids, weights),
            (rule.routed_scaling_factor,),
            constants=(num_experts, *groups, *chosen, rule.norm_topk_prob),
            num_warps=1,
        )
    return ids, weights


def is_supported(num_experts: int, rule: RoutingRule) -> bool:
    """Return whether the shapes fit the kernel's power-of-two tiles."""
    sizes = (num_experts, rule.n_group, num_experts // rule.n_group)
    return all(size & (size - 1) == 0 for size in sizes)
