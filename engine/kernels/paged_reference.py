"""Paged attention in plain PyTorch: what a vendor's kernel is tested against, and its stand-in.

Legend: S sequences, H heads, L = C + R numbers of a latent, C kv_lora_rank, B blocks of a table,
P = B * block_size.
"""

import torch
from torch import Tensor

from engine.kernels.latent_storage import take_blocks
from engine.kernels.paged_queries import PagedQueries
from engine.kernels.reference import absorbed_attention


def paged_attention(
    q_SHL: Tensor, cache: Tensor, queries: PagedQueries, kv_lora_rank: int, scale: float
) -> Tensor:
    """Run `absorbed_attention` for one query a sequence, over latents found by block tables.

    Reads nothing on the host; its memory is that of all the tables' blocks.

    Args:
        q_SHL: [S, H, L], the last position of each sequence, carried into the latent space.
        cache: [num_blocks, block_size, L], one layer of a pool, any strides, any dtype.
        queries: lengths and block tables.
        kv_lora_rank: C.
        scale: of the scores.

    Returns:
        [S, H, C] in the dtype of q.
    """
    blocks = take_blocks(cache, queries.block_tables_SB.long())
    latents_SPL = blocks.flatten(1, 2).to(q_SHL.dtype)
    positions = torch.arange(latents_SPL.shape[1], device=q_SHL.device)
    is_unused_SP = positions >= queries.seq_lens_S.unsqueeze(1)
    # A block's last owner may have left NaN there, and 0 times NaN is NaN.
    latents_SPL = latents_SPL.masked_fill(is_unused_SP.unsqueeze(2), 0.0)
    return absorbed_attention(
        q_SHL.unsqueeze(1), latents_SPL, is_unused_SP.unsqueeze(1), kv_lora_rank, scale
    ).squeeze(1)
