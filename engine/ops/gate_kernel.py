"""The router gate: scores of all experts for a few tokens, and the group-limited choice among them.

A choice runs in the registers of one program, instead of a dozen small operations over [T, E]. Few
tokens' scores are bound by the reading of the weight, so the hidden size is cut into parts for more
programs; the choice adds the parts up, always in the same order.
"""

# Triton compiles these functions itself; their arguments have no Python types.
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: no-warn-return-any

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.fused.launch import ceil_div, launched, next_power_of_2
from engine.ops.routing_rule import RoutingRule

FEW_TOKENS = 128
"""Tokens that are scored in parts, at most."""

ROWS = 16
"""Tokens of a tile."""

STEP = 64
"""Columns of a product that are read at a time."""

STAGES = 4
"""Steps that are on their way at a time."""

MAX_PARTS = 14
"""Parts of the hidden size, at most."""

FAR = tl.constexpr(1e38)
"""Beyond every choice; two of them add up to a number."""


@launched("num_tokens")
def _score(
    hidden, weight, parts, stride, size,
    num_tokens, B: tl.constexpr, E: tl.constexpr, K: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply B tokens with all experts over K columns."""
    part = tl.program_id(0)
    tokens = tl.program_id(1) * B + tl.arange(0, B)
    mask = (tokens < num_tokens)[:, None]
    experts = tl.arange(0, E)
    inner = part * K + tl.arange(0, STEP)
    rows_at = hidden + tokens.to(tl.int64)[:, None] * stride + inner[None, :]
    weight_at = weight + experts[:, None] * size + inner[None, :]
    total = tl.zeros([B, E], tl.float32)
    for start in tl.range(0, K, STEP, num_stages=STAGES):
        rows = tl.load(rows_at + start, mask=mask, other=0.0)
        total = tl.dot(rows, tl.trans(tl.load(weight_at + start)), total)
    target = parts + (part * num_tokens + tokens).to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(target, total, mask=mask)


@launched("num_tokens", "num_real")
def _choose(
    logits, bias, ids, weights, num_rows, load, scaling, num_tokens, num_real, S: tl.constexpr,
    E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    NORM: tl.constexpr, HAS_PADDING: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = E // GROUPS
    low = float("-inf")
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, SIZE)
    expert = group[:, None] * SIZE + member[None, :]
    correction = tl.load(bias + expert)
    total = tl.load(logits + token * E + expert)
    for part in tl.static_range(1, S):
        # A multiple of E, so that the compiler sees how memory is aligned.
        total += tl.load(logits + (token + part * num_tokens) * E + expert)
    scores = tl.sigmoid(total)
    choice = scores + correction
    # NaN counts as the largest, as in `torch.topk`; what is taken is -inf, and nothing else is.
    choice = tl.where(choice != choice, FAR, tl.minimum(tl.maximum(choice, -FAR), FAR))
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
        choice = tl.where((kept > 0)[:, None], choice, -FAR)
    slots = tl.arange(0, KP)
    chosen = tl.zeros([KP], tl.int32)
    chosen_scores = tl.zeros([KP], tl.float32)
    for k in tl.static_range(K):
        best_in_group = tl.max(choice, axis=1)
        top = tl.max(best_in_group, axis=0)
        # The lowest expert among equals, so that exactly one is taken, and none twice: a token that
        # is twice at an expert takes the room of another.
        taken = tl.min(tl.min(tl.where(choice == top, expert, E), axis=1), axis=0)
        hit = expert == taken
        score = tl.sum(tl.sum(tl.where(hit, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(slots == k, taken, chosen)
        chosen_scores = tl.where(slots == k, score, chosen_scores)
        choice = tl.where(hit, low, choice)
    if NORM:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, axis=0) + 1e-20)
    chosen = tl.where(token < num_real, chosen, -1)
    if HAS_PADDING:
        chosen = tl.where(token < tl.load(num_rows), chosen, -1)
    mask = slots < K
    tl.store(ids + token * K + slots, chosen.to(tl.int64), mask=mask)
    tl.store(weights + token * K + slots, chosen_scores * scaling, mask=mask)
    if COUNTS:
        # Sums do not depend on the order; nobody waits for them, and no kernel is added.
        counted = mask & (chosen >= 0)
        tl.atomic_add(load + chosen, tl.full([KP], 1, tl.int64), mask=counted, sem="relaxed")


def score(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return the logits [T, E] float32 of any number of tokens.

    Products of two bfloat16 numbers are exact in float32, so nothing is lost against converting
    first, as long as the weight is bfloat16 (it is in the checkpoint).
    """
    if weight_ED.dtype != torch.bfloat16 or hidden_TD.dtype != torch.bfloat16:
        return torch.nn.functional.linear(hidden_TD.float(), weight_ED.float())
    return torch.mm(hidden_TD, weight_ED.t(), out_dtype=torch.float32)


def is_better_in_parts(hidden_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return whether `score_in_parts` takes these, and is faster (measured on an H200)."""
    return hidden_TD.shape[0] <= FEW_TOKENS and takes(hidden_TD, weight_ED)


def score_in_parts(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return [S, T, E] float32, which sum to the logits of a few tokens over S.

    For bfloat16 rows and weights that `takes` takes.
    """
    (num_tokens, size), num_experts = hidden_TD.shape, weight_ED.shape[0]
    num_parts = _num_parts(size)
    parts = torch.empty(
        (num_parts, num_tokens, num_experts), dtype=torch.float32, device=hidden_TD.device
    )
    if num_tokens:
        _score(
            (num_parts, ceil_div(num_tokens, ROWS)),
            (hidden_TD, weight_ED, parts),
            (hidden_TD.stride(0), size),
            (num_tokens,),
            (ROWS, num_experts, size // num_parts, STEP, STAGES),
        )
    return parts


def takes(hidden_TD: Tensor, weight_ED: Tensor) -> bool:
    """Return whether `score_in_parts` takes these."""
    num_experts, size = weight_ED.shape
    is_bf16 = hidden_TD.dtype == weight_ED.dtype == torch.bfloat16
    is_tile = 16 <= num_experts <= 256 and num_experts & (num_experts - 1) == 0
    is_dense = hidden_TD.stride(1) == 1 and weight_ED.is_contiguous()
    return is_bf16 and is_tile and is_dense and size % STEP == 0


def _num_parts(size: int) -> int:
    """Return the most parts that cut `size` into equal runs of whole steps."""
    steps = size // STEP
    return max(parts for parts in range(1, MAX_PARTS + 1) if steps % parts == 0)


def group_limited_topk(
    logits: Tensor,
    bias_E: Tensor,
    rule: RoutingRule,
    num_rows: Tensor | int | None = None,
    load_C: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return topk_ids [T, K] int64, -1 for padding, and topk_weights [T, K] float32.

    Args:
        logits: [T, E] float32, or [S, T, E] parts of a sum; E and the size of a group must be
            powers of two (`is_supported`).
        bias_E: see `gate`.
        rule: see `gate`.
        num_rows: see `gate`.
        load_C: see `gate`.
    """
    num_parts = logits.shape[0] if logits.dim() == 3 else 1
    num_tokens, num_experts = logits.shape[-2:]
    num_real = num_rows if isinstance(num_rows, int) else num_tokens
    on_device = num_rows if isinstance(num_rows, Tensor) else None
    ids = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=logits.device)
    if num_tokens:
        groups = (rule.n_group, rule.topk_group)
        chosen = (rule.top_k, next_power_of_2(rule.top_k))
        _choose(
            (num_tokens,),
            (
                logits.contiguous(),
                bias_E,
                ids,
                weights,
                ids if on_device is None else on_device,
                ids if load_C is None else load_C,
            ),
            (rule.routed_scaling_factor,),
            (num_tokens, num_real),
            (
                num_parts,
                num_experts,
                *groups,
                *chosen,
                rule.norm_topk_prob,
                on_device is not None,
                load_C is not None,
            ),
            num_warps=1,
        )
    return ids, weights


def is_supported(num_experts: int, rule: RoutingRule) -> bool:
    """Return whether the shapes fit the kernel's power-of-two tiles."""
    sizes = (num_experts, rule.n_group, num_experts // rule.n_group)
    return all(size & (size - 1) == 0 for size in sizes)
