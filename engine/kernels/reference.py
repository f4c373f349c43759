"""Attention and number formats in plain PyTorch: the path on CPUs, and the oracle of kernels.

Functions of tensors, without modules, ranks or state. They are written to be read next to the
paper, and fast enough to serve a small model. All other operations are in `engine.ops`.

Scores and softmax are in float32 whatever type queries and keys have. Rounded to bfloat16, a score
of 20 is off by up to 0.06, so its weight by 6 %: what a prompt is answered would depend on how its
attention was computed. Products of two 16-bit numbers are exact in float32, and all fast kernels
keep them so.

Legend: T tokens, D hidden size, H heads, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim,
C kv_lora_rank, E experts, K experts per token, F expert width, M expert rows, S sequences,
Q queries per sequence, P positions of the context. The layouts of experts have their own modules
(`expert_reference`), and so has attention by block tables.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.formats.fp8_rows import GROUP, MIN_AMAX, Fp8Rows

QUERY_CHUNK = 256
"""Queries scored at once in `causal_attention`; bounds its memory at H x 256 x P scores."""


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
            gate, up = F.linear(rows, w13_EGD[expert]).chunk(2, dim=-1)
            hidden = F.silu(gate) * up
            torch.mm(hidden, w2_EDF[expert].t(), out=out_MD[start : start + num_rows])
            start += num_rows
    return out_MD


def as_factor(x: Tensor) -> Tensor:
    """Return `x` as `multiply_scores` wants it: no CPU multiplies 16 bits into 32-bit sums."""
    return x.float() if x.dtype.itemsize < 4 and not x.is_cuda else x


def multiply_scores(q_BMK: Tensor, k_BKN: Tensor) -> Tensor:
    """Return the products [B, M, N] of two `as_factor`s, in float32."""
    if q_BMK.dtype.itemsize < 4:
        return torch.bmm(q_BMK, k_BKN, out_dtype=torch.float32)
    return torch.bmm(q_BMK, k_BKN).float()


def softmax_(scores: Tensor) -> Tensor:
    """Turn scores into probabilities over the last dimension, in place, and return them."""
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True))


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
    return _attend(q_QHA, k_PHA, v_PHV, scale, is_causal=True, lse_HQ=None)


def _attend(
    q_QHA: Tensor,
    k_PHA: Tensor,
    v_PHV: Tensor,
    scale: float,
    *,
    is_causal: bool,
    lse_HQ: Tensor | None,
) -> Tensor:
    """Attend to all positions, or causally; write the log of the softmax's sums if wanted."""
    num_queries, num_positions = q_QHA.shape[0], k_PHA.shape[0]
    prefix = num_positions - num_queries
    q_HQA, k_HAP = as_factor(q_QHA.transpose(0, 1)), as_factor(k_PHA.permute(1, 2, 0))
    v_HPV = v_PHV.transpose(0, 1)
    out_QHV = q_QHA.new_empty((num_queries, *v_PHV.shape[1:]))
    positions = torch.arange(num_positions, device=q_QHA.device)
    for start in range(0, num_queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, num_queries)
        visible = prefix + end if is_causal else num_positions
        scores = multiply_scores(q_HQA[:, start:end], k_HAP[:, :, :visible]).mul_(scale)
        if is_causal:
            # Only the square on the diagonal holds keys that come after a query.
            square = scores[:, :, prefix + start :]
            keys, queries = positions[: end - start], positions[: end - start, None]
            square.masked_fill_(keys > queries, float("-inf"))
        if lse_HQ is not None:
            lse_HQ[:, start:end] = scores.logsumexp(dim=-1)
        probs = scores.softmax(dim=-1).to(v_PHV.dtype)
        out_QHV[start:end] = torch.bmm(probs, v_HPV[:, :visible]).transpose(0, 1)
    return out_QHV


def absorbed_attention(
    q_SQHL: Tensor, latents_SPL: Tensor, hidden_SQP: Tensor, kv_lora_rank: int, scale: float
) -> Tensor:
    """Attend over latents as multi-query attention; L = C + R.

    Takes S * Q * H * P scores in float32, and as many probabilities in the type of the latents
    where that is another: who has many queries calls with some of them at a time.

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
    scores = multiply_scores(as_factor(rows), as_factor(latents_SPL.transpose(1, 2))).mul_(scale)
    scores.view(num_seqs, num_queries, num_heads, -1).masked_fill_(
        hidden_SQP.unsqueeze(2), float("-inf")
    )
    probs = softmax_(scores).to(latents_SPL.dtype)
    out = torch.bmm(probs, latents_SPL[..., :kv_lora_rank])
    return out.view(num_seqs, num_queries, num_heads, kv_lora_rank)


def varlen_attention(
    q_THA: Tensor,
    k_PHA: Tensor,
    v_PHV: Tensor,
    lengths: Sequence[tuple[int, int]],
    scale: float,
) -> Tensor:
    """Run `causal_attention` for sequences that lie one after another.

    Args:
        q_THA: [T, H, N + R].
        k_PHA: [P, H, N + R].
        v_PHV: [P, H, V].
        lengths: per sequence its queries and its positions; they sum to T and P.
        scale: of the scores.

    Returns:
        [T, H, V].
    """
    parts = _split_sequences(q_THA, k_PHA, v_PHV, lengths)
    outs = [causal_attention(q, k, v, scale) for q, k, v in parts]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _split_sequences(
    q_THA: Tensor, k_PHA: Tensor, v_PHV: Tensor, lengths: Sequence[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    queries, positions = ([pair[i] for pair in lengths] for i in (0, 1))
    return zip(
        q_THA.split_with_sizes(queries),
        k_PHA.split_with_sizes(positions),
        v_PHV.split_with_sizes(positions),
        strict=True,
    )


def varlen_attention_part(
    q_THA: Tensor,
    k_PHA: Tensor,
    v_PHV: Tensor,
    lengths: Sequence[tuple[int, int]],
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend to a part of each sequence's positions, to be merged with the other parts.

    Args:
        q_THA: as above, and so are the others.
        k_PHA: positions of the part.
        v_PHV: positions of the part.
        lengths: per sequence its queries and the part's positions, at least one of each.
        scale: of the scores.
        is_causal: whether the part ends with the queries' own positions; if not, it comes before
            all of them and is seen whole.

    Returns:
        [T, H, V], and [H, T] float32: the natural logarithm of each query's sum of exponentials.
    """
    outs, lses = [], []
    for q, k, v in _split_sequences(q_THA, k_PHA, v_PHV, lengths):
        lses.append(q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32))
        outs.append(_attend(q, k, v, scale, is_causal=is_causal, lse_HQ=lses[-1]))
    return torch.cat(outs), torch.cat(lses, dim=1)


def merge_attention(
    out_THV: Tensor, lse_HT: Tensor, other_THV: Tensor, other_lse_HT: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention to other positions into `out_THV`, in place.

    Each part counts by its share of the exponentials; a logarithm of -inf is a part that saw
    nothing.

    Args:
        out_THV: [T, H, V].
        lse_HT: [H, T] float32, see `varlen_attention_part`.
        other_THV: [T, H, V].
        other_lse_HT: [H, T] float32.

    Returns:
        `out_THV`, and the logarithms of both parts together (the inputs keep theirs).
    """
    total_HT = torch.logaddexp(lse_HT, other_lse_HT)
    shift_HT = total_HT.nan_to_num(neginf=0.0)
    first, second = ((part - shift_HT).exp().t().unsqueeze(-1) for part in (lse_HT, other_lse_HT))
    out_THV.copy_(out_THV.float() * first + other_THV.float() * second)
    return out_THV, total_HT


def quantize_rows(x_TK: Tensor, out: Fp8Rows | None = None) -> Fp8Rows:
    """Quantise each group of 128 neighbours of [T, K] to e4m3, its largest becoming 448.

    The rows go to `out`, of any layout, if it is given.
    """
    groups = x_TK.float().reshape(x_TK.shape[0], x_TK.shape[1] // GROUP, GROUP)
    scale_TG = groups.abs().amax(dim=-1).clamp_min(MIN_AMAX) / 448.0
    if out is None:
        out = Fp8Rows.empty(x_TK.shape[0], x_TK.shape[1], x_TK.device)
    scaled = (groups / scale_TG.unsqueeze(-1)).clamp(-448.0, 448.0)
    out.data_TK.copy_(scaled.flatten(1).to(torch.float8_e4m3fn))
    out.scale_TG.copy_(scale_TG)
    return out


def fp8_linear(x: Fp8Rows, weight_NK: Tensor, scale_inv_PQ: Tensor) -> Tensor:
    """Return bfloat16 [T, N]: the product with a block-quantised weight, in float32."""
    rows = scale_inv_PQ.repeat_interleave(GROUP, 0)[: weight_NK.shape[0]]
    weight = weight_NK.float() * rows.repeat_interleave(GROUP, 1)[:, : weight_NK.shape[1]]
    return F.linear(x.dequantize(), weight).bfloat16()
