"""Every operation in plain PyTorch: the path on CPUs, and what faster kernels are tested against.

Functions of tensors, without modules, ranks or state. They are written to be read next to the
paper, and fast enough to serve a small model. Softmax, routing and norms run in float32 whatever
the dtype of the input.

Legend: T tokens, D hidden size, H heads, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim,
C kv_lora_rank, E experts, K experts per token, F expert width, M expert rows, S sequences,
Q queries per sequence, P positions of the context.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_CHUNK = 256
"""Queries scored at once in `causal_attention`; bounds its memory at H x 256 x P scores."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in the dtype of x."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F], gate before up: [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleave: bool = True) -> Tensor:
    """Rotate pairs of the last dimension, keeping its layout.

    Args:
        x: [T, ..., R].
        cos: [T, R / 2] float32.
        sin: [T, R / 2] float32.
        interleave: pairs are (0, 1), (2, 3), ... as in DeepSeek checkpoints, else (i, i + R / 2).

    Returns:
        The shape and dtype of x. Only products of two tensors rotated alike have a meaning.
    """
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (cos.shape[-1],)
    cos, sin = cos.view(shape), sin.view(shape)
    if interleave:
        even, odd = x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2).unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return rotated.flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def group_limited_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    *,
    top_k: int,
    n_group: int,
    topk_group: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Choose experts as DeepSeek-V3 does (report, section 2.1.2).

    The choice is made by sigmoid score plus bias: first `topk_group` groups by the sum of their
    two best experts, then `top_k` experts inside them. The weight is the score without the bias,
    normalised over the chosen, times the scaling factor (here, and nowhere else).

    Args:
        logits_TE: [T, E] float32.
        bias_E: [E] float32, `e_score_correction_bias`.
        top_k: K.
        n_group: groups of E / n_group neighbouring experts.
        topk_group: groups that a token may use.
        norm_topk_prob: whether weights are divided by their sum.
        routed_scaling_factor: factor of all weights.

    Returns:
        topk_ids [T, K] int64 and topk_weights [T, K] float32.
    """
    scores_TE = logits_TE.sigmoid()
    choice_TE = scores_TE + bias_E
    if topk_group < n_group:
        grouped = choice_TE.view(choice_TE.shape[0], n_group, choice_TE.shape[1] // n_group)
        group_score = grouped.topk(2, dim=-1).values.sum(dim=-1)
        chosen = group_score.topk(topk_group, dim=-1).indices
        left_out = torch.ones_like(group_score, dtype=torch.bool).scatter_(1, chosen, False)
        choice_TE = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
    topk_ids_TK = choice_TE.topk(top_k, dim=-1).indices
    topk_weights_TK = scores_TE.gather(1, topk_ids_TK)
    if norm_topk_prob:
        topk_weights_TK = topk_weights_TK / (topk_weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    return topk_ids_TK, topk_weights_TK * routed_scaling_factor


def grouped_mlp(
    rows_MD: Tensor, num_rows_per_expert: Sequence[int], w13_EGD: Tensor, w2_EDF: Tensor
) -> Tensor:
    """Run each expert's gated MLP over its run of rows (contiguous layout).

    Args:
        rows_MD: [M, D], sorted by expert.
        num_rows_per_expert: E counts that sum to M.
        w13_EGD: [E, 2F, D], gate over up.
        w2_EDF: [E, D, F].

    Returns:
        [M, D], same order.
    """
    out_MD = torch.empty_like(rows_MD)
    start = 0
    for expert, num_rows in enumerate(num_rows_per_expert):
        if num_rows:
            rows = rows_MD[start : start + num_rows]
            hidden = silu_and_mul(F.linear(rows, w13_EGD[expert]))
            torch.mm(hidden, w2_EDF[expert].t(), out=out_MD[start : start + num_rows])
            start += num_rows
    return out_MD


def causal_attention(q_QHA: Tensor, k_PHA: Tensor, v_PHV: Tensor, scale: float) -> Tensor:
    """Attend with decompressed heads; the queries are the last Q of P positions.

    Args:
        q_QHA: [Q, H, N + R].
        k_PHA: [P, H, N + R].
        v_PHV: [P, H, V].
        scale: of the scores.

    Returns:
        [Q, H, V].
    """
    num_queries, num_positions = q_QHA.shape[0], k_PHA.shape[0]
    prefix = num_positions - num_queries
    q_HQA, k_HAP = q_QHA.transpose(0, 1), k_PHA.permute(1, 2, 0)
    v_HPV = v_PHV.transpose(0, 1)
    out_QHV = q_QHA.new_empty((num_queries, *v_PHV.shape[1:]))
    positions = torch.arange(num_positions, device=q_QHA.device)
    for start in range(0, num_queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, num_queries)
        visible = prefix + end
        scores = torch.bmm(q_HQA[:, start:end], k_HAP[:, :, :visible]).float().mul_(scale)
        # Only the square on the diagonal holds keys that come after a query.
        square = scores[:, :, prefix + start :]
        keys, queries = positions[: end - start], positions[: end - start, None]
        square.masked_fill_(keys > queries, float("-inf"))
        probs = scores.softmax(dim=-1).to(v_PHV.dtype)
        out_QHV[start:end] = torch.bmm(probs, v_HPV[:, :visible]).transpose(0, 1)
    return out_QHV


def absorbed_attention(
    q_SQHL: Tensor, latents_SPL: Tensor, hidden_SQP: Tensor, kv_lora_rank: int, scale: float
) -> Tensor:
    """Attend over latents as multi-query attention; L = C + R.

    Args:
        q_SQHL: [S, Q, H, L], queries carried into the latent space (W_UK^T q_nope, then q_pe).
        latents_SPL: [S, P, L], kv_c then k_pe of every position.
        hidden_SQP: [S, Q, P] bool, true where a query must not see a position.
        kv_lora_rank: C.
        scale: of the scores.

    Returns:
        [S, Q, H, C], to be taken out of the latent space by W_UV.
    """
    num_seqs, num_queries, num_heads, _ = q_SQHL.shape
    rows = q_SQHL.flatten(1, 2)  # [S, Q * H, L]
    scores = torch.bmm(rows, latents_SPL.transpose(1, 2)).float().mul_(scale)
    scores.view(num_seqs, num_queries, num_heads, -1).masked_fill_(
        hidden_SQP.unsqueeze(2), float("-inf")
    )
    probs = scores.softmax(dim=-1).to(latents_SPL.dtype)
    out = torch.bmm(probs, latents_SPL[..., :kv_lora_rank])
    return out.view(num_seqs, num_queries, num_heads, kv_lora_rank)
