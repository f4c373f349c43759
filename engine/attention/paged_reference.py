"""Paged attention in plain PyTorch: what kernels are tested against, and their stand-in.

Legend: S sequences, T queries of all of them, H heads, L = C + R numbers of a latent, C
kv_lora_rank, B blocks of a table, P = B * block_size.
"""

from typing import Final

import torch
from torch import Tensor

from engine.attention.latent_storage import take_blocks
from engine.attention.paged_queries import PagedQueries
from engine.kernels.reference import absorbed_attention

MAX_BYTES: Final = 256 << 20
"""Of latents and scores that exist at a time, though always those of one query."""


def paged_attention(
    q_THL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
) -> Tensor:
    """Run `absorbed_attention` for every query, over latents found by block tables.

    Reads nothing on the host; its work is that of all the tables' blocks, for every query.

    Args:
        q_THL: [T, H, L], the last positions of each sequence, carried into the latent space.
        cache: [num_blocks, block_size, L], one layer of a pool, any strides, any dtype.
        queries: lengths and block tables.
        kv_lora_rank: C.
        scale: of the scores.

    Returns:
        [T, H, C] in the dtype of q.
    """
    num_tokens, num_heads, latent = q_THL.shape
    tables_TB, visible_T = _of_each_query(queries, num_tokens)
    num_positions = tables_TB.shape[1] * cache.shape[1]
    per_query = 8 * num_positions * (latent + num_heads)  # both in float32, twice
    at_once = max(1, MAX_BYTES // max(1, per_query))
    positions = torch.arange(num_positions, device=q_THL.device)
    out_THC = q_THL.new_empty((num_tokens, num_heads, kv_lora_rank))
    for first in range(0, num_tokens, at_once):
        rows = slice(first, first + at_once)
        is_hidden_TP = positions >= visible_T[rows].unsqueeze(1)
        latents_TPL = _gather(cache, tables_TB[rows], is_hidden_TP).to(q_THL.dtype)
        out_THC[rows] = absorbed_attention(
            q_THL[rows].unsqueeze(1), latents_TPL, is_hidden_TP.unsqueeze(1), kv_lora_rank, scale
        ).squeeze(1)
    # Who sees nothing has a softmax of nothing: NaN.
    return out_THC.masked_fill_((visible_T <= 0)[:, None, None], 0.0)


def _of_each_query(queries: PagedQueries, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the table of each query's sequence, [T, B], and how many positions it sees, [T]."""
    tables_SB, seq_lens_S = queries.block_tables_SB, queries.seq_lens_S
    if queries.counts is None:
        return tables_SB, seq_lens_S
    ends = queries.counts.cu_seqlens_q[1:]
    rows = torch.arange(num_tokens, dtype=ends.dtype, device=ends.device)
    seq_T = torch.bucketize(rows, ends, right=True)
    return tables_SB[seq_T], seq_lens_S[seq_T] - (ends[seq_T] - 1 - rows)


def _gather(cache: Tensor, tables_TB: Tensor, is_hidden_TP: Tensor) -> Tensor:
    """Return latents [T, P, L] of tables, zero where they are hidden."""
    latents_TPL = take_blocks(cache, tables_TB.long()).flatten(1, 2)
    # A block's last owner may have left NaN there, and 0 times NaN is NaN.
    return latents_TPL.float().masked_fill(is_hidden_TP.unsqueeze(2), 0.0)
